"""Models against closed forms: what each system makes of failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from best_placement import waste

from benchmarks.simulate import (
    Bamboo,
    CheckpointRestart,
    FailureCost,
    FaultScaled,
    Layout,
    MeasuredStalls,
    Oobleck,
    Pattern,
    ReCycle,
    System,
    ThisSystem,
    TorchFT,
    Trace,
    TraceEvent,
    gcp_trace,
    merge,
    period,
    rerouted,
    simulate,
    young,
)
from benchmarks.simulate.generators import exponential, periodic
from benchmarks.simulate.layout import wiped_out

EXAMPLE = Layout(3, 4, 6)
GCP = Layout(6, 4, 12, step_s=90.0)


def missing(layout: Layout, number: int) -> Pattern:
    return Pattern(layout, frozenset(range(number)))


# -- closed forms -----------------------------------------------------------------------------------------------------


def test_slots_of_recycles_example() -> None:
    """3 x 4 x 6, one failure in each stage; the optimizer's 3 slots are part of the period."""
    assert EXAMPLE.slots == 30
    one = [[int(stage == lost) for stage in range(4)] for lost in range(4)]
    assert [period(EXAMPLE, lost, "coupled") - 3 for lost in one] == [29, 30, 33, 36]
    assert [period(EXAMPLE, lost, "decoupled") - 3 for lost in one] == [27, 28, 29, 30]
    assert [period(EXAMPLE, lost, "staggered") for lost in one] == [30] * 4
    assert [period(EXAMPLE, (0, 0, 2, 0), kind) for kind in ("staggered", "decoupled", "coupled")] == [57, 59, 63]
    assert period(EXAMPLE, (0, 1, 1, 0)) == 30
    assert period(EXAMPLE, (0, 3, 0, 0)) == math.inf, "no peer is left"


def test_state_is_gone_when_a_stage_loses_all_at_once() -> None:
    layout = Layout(2, 2)
    assert wiped_out(Pattern(layout), (0, 2)) and not wiped_out(Pattern(layout), (0, 1))
    assert wiped_out(missing(layout, 1), (2,)), "the other worker of stage 0"


# -- the clock --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed:
    """A system whose every failure costs the same and whose throughput never changes."""

    layout: Layout
    cost: FailureCost
    name: str = "fixed"

    def throughput(self, pattern: Pattern) -> float:
        return 1.0

    def failure(self, before: Pattern, after: Pattern, event: TraceEvent) -> FailureCost:
        return self.cost

    def join(self, before: Pattern, after: Pattern) -> FailureCost:
        return FailureCost()


def test_regular_failures_of_fixed_cost() -> None:
    """100 h, a failure every 2 h but at the very end: 49 stalls."""
    trace = periodic(8, 100.0, 2.0)
    result = simulate(trace, Fixed(Layout(8), FailureCost(90.0)))
    assert result.failures == 49 and result.stalled_s == pytest.approx(49 * 90)
    assert result.work == pytest.approx(360_000 - 49 * 90) and result.useful == result.work / 360_000
    lost = simulate(trace, Fixed(Layout(8), FailureCost(0.0, back_to=1000.0)))
    assert lost.work == 49 * 7000 + 7200 and lost.lost == 49 * 200, "of 7200 s the last 200 are not saved"
    again = simulate(trace, Fixed(Layout(8), FailureCost(10.0, back_to=7000.0, replay=0.5)))
    since: list[float] = []
    work = 0.0
    for _ in range(49):
        work += 7200 - (since[-1] if since else 0.0)
        since.append(10 + 0.5 * (work % 7000))
    assert again.lost == 0 and again.stalled_s == pytest.approx(sum(since)), "replayed at twice the speed"


def test_a_failure_during_a_stall_starts_it_again() -> None:
    trace = Trace(8, 100.0, (TraceEvent(10.0, lost=(1,)), TraceEvent(14.0, lost=(2,))))
    result = simulate(trace, Fixed(Layout(8), FailureCost(6.0)))
    assert (result.stalled_s, result.work) == (10.0, 90.0)
    assert [(one.start_s, one.end_s, one.live) for one in result.segments] == [
        (0.0, 10.0, 8),
        (10.0, 14.0, 7),
        (14.0, 20.0, 6),
        (20.0, 100.0, 6),
    ]


def test_accounts_add_up() -> None:
    trace = exponential(24, 500.0, 3.0, 2.0)
    every: list[System] = [ReCycle(GCP), FaultScaled(GCP), Oobleck(GCP), Bamboo(GCP), TorchFT(GCP)]
    every += [ThisSystem(GCP, mode) for mode in ("reroute", "replace", "replay")]
    every += [CheckpointRestart(GCP, 900.0, 5.0, 60.0, elastic=elastic) for elastic in (False, True)]
    for system in every:
        result = simulate(trace, system)
        assert sum(one.end_s - one.start_s for one in result.segments) == pytest.approx(500 * 3600)
        made = sum((one.end_s - one.start_s) * one.rate for one in result.segments)
        assert result.work == pytest.approx(made - result.lost)
        assert sum(work for _, work in result.by_live.values()) == pytest.approx(result.work)
        assert 0 < result.useful <= 1 and result.failures == trace.failures
        assert simulate(trace, system) == result
        assert merge([result, result]).useful == pytest.approx(result.useful)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mtbf_h, write_s, restart_s", [(1.0, 30.0, 120.0), (0.25, 10.0, 60.0)])
def test_checkpoint_restart_takes_what_daly_expects(mtbf_h: float, write_s: float, restart_s: float) -> None:
    mtbf_s = mtbf_h * 3600
    interval_s = young(write_s, mtbf_s)
    trace = exponential(512, 4000.0 * mtbf_h, mtbf_h, 1e-9).with_spares(512)
    result = simulate(trace, CheckpointRestart(Layout(512), interval_s, write_s, restart_s))
    expected = result.work * (1 + waste(interval_s, write_s, 1 / mtbf_s)) * math.exp(restart_s / mtbf_s)
    assert result.seconds == pytest.approx(expected, rel=0.02)


def test_who_waits_and_who_continues() -> None:
    layout = Layout(4, 2)
    one = missing(layout, 1)
    assert CheckpointRestart(layout, 90.0, 10.0, 60.0).throughput(one) == 0
    assert CheckpointRestart(layout, 90.0, 10.0, 60.0, elastic=True).throughput(one) == pytest.approx(0.75 * 0.9)
    assert TorchFT(layout).throughput(one) == 0.75 and TorchFT(layout).throughput(missing(layout, 3)) == 0.5
    assert ThisSystem(layout, "replace").throughput(one) == 0
    assert ThisSystem(layout, "reroute").throughput(one) == rerouted(layout, 7) / 1.08


# -- this system ------------------------------------------------------------------------------------------------------


def test_cost_of_a_replacement_and_of_a_rerouted_failure() -> None:
    """Half of a worker's 36 slots of the step again; re-routed, shared by the five peers."""
    measured = MeasuredStalls(overhead=1.0, replace_s=0.2, reroute_s=0.3, admit_s=0.4, copy_s=5.0)
    filled, vacant = TraceEvent(0.0, (7,), (7,)), TraceEvent(0.0, (7,))
    whole, one = Pattern(GCP), Pattern(GCP, frozenset({7}))
    replace_ = ThisSystem(GCP, "replace", measured)
    assert replace_.failure(whole, whole, filled).stall_s == pytest.approx(5.2 + 18 * GCP.slot_s)
    assert replace_.failure(whole, one, vacant) == FailureCost() and replace_.join(one, whole).stall_s > 5.2
    reroute = ThisSystem(GCP, "reroute", measured)
    assert reroute.failure(whole, one, vacant).stall_s == pytest.approx(0.3 + 18 * GCP.slot_s / 5)
    assert reroute.join(one, whole) == FailureCost(0.4)


def test_failed_ends_are_waited_for_unless_others_can_read_the_data() -> None:
    """6 x 4: a pipeline without both ends has no data."""
    now, then = (ThisSystem(GCP, measured=MeasuredStalls(overhead=1.0), ends=ends) for ends in (False, True))
    assert "SharedData" in then.name and "SharedData" not in now.name
    ends = Pattern(GCP, frozenset({4, 7}))
    assert now.throughput(ends) == 0 and then.throughput(ends) == 1
    assert now.throughput(Pattern(GCP, frozenset({4, 11}))) == 1, "the ends of two pipelines"
    one, other = Pattern(GCP, frozenset({4})), TraceEvent(0.0, (7,))
    assert now.failure(one, ends, other) == then.failure(one, ends, other) != now.checkpoints.cost
    all_of_stage_1 = TraceEvent(0.0, tuple(range(1, 24, 4)))
    assert now.failure(Pattern(GCP), Pattern(GCP), all_of_stage_1) == now.checkpoints.cost
    assert ThisSystem(Layout(3)).throughput(Pattern(Layout(3), frozenset({0}))) > 0, "data parallel: no ends"


def test_survivors_move() -> None:
    """6 x 4: two failures of a stage cost nothing once they are spread, and the moves as much again until then."""
    measured = MeasuredStalls(overhead=1.0, reroute_s=0.0, copy_s=7.0)
    system = ThisSystem(GCP, measured=measured)
    one, two = Pattern(GCP, frozenset({1})), Pattern(GCP, frozenset({1, 5}))
    assert system.throughput(one) == system.throughput(two) == 1
    again_s = 18 * GCP.slot_s / 5
    stay_s = (3 * 18 + 3) * GCP.slot_s
    assert system.failure(one, two, TraceEvent(0.0, (5,))).stall_s == pytest.approx(again_s + 2 * (7 + stay_s))
    elsewhere = Pattern(GCP, frozenset({1, 6}))
    assert system.failure(one, elsewhere, TraceEvent(0.0, (6,))).stall_s == pytest.approx(again_s)
    all_but_one = Pattern(GCP, frozenset(range(1, 21, 4)))
    assert system.throughput(all_but_one) == pytest.approx(rerouted(GCP, 19))
    last = TraceEvent(0.0, (21,))
    assert system.failure(all_but_one, all_but_one.after((21,), ()), last) == system.checkpoints.cost


# -- the published systems --------------------------------------------------------------------------------------------


def test_bamboo_keeps_whole_pipelines() -> None:
    system = Bamboo(GCP)
    rates = [system.throughput(missing(GCP, number)) for number in (0, 1, 4, 5, 8)]
    assert rates == [1.0, 5 / 6, 5 / 6, 4 / 6, 4 / 6]
    assert (
        system.join(missing(GCP, 2), missing(GCP, 1)) == FailureCost()
        and system.join(missing(GCP, 1), Pattern(GCP)).stall_s == 30
    )
    large = Layout(100, 4, 12)
    assert Bamboo(large).throughput(missing(large, 1)) == pytest.approx(0.75), "one doubled stage holds up all"


@pytest.mark.parametrize("micro_batches", [6, 10, 12, 15])
def test_order_of_systems(micro_batches: int) -> None:
    """ReCycle >= Oobleck > Bamboo from 20 workers on, in samples/s; ReCycle >= fault-scaled from 16 on.

    Below, the ideal can be the worse one: it keeps the stages, and the one that has lost most sets the pace.
    """
    layout = replace(GCP, micro_batches=micro_batches)
    for number in range(10):
        pattern = missing(layout, number)
        recycle = ReCycle(layout).throughput(pattern)
        assert recycle >= FaultScaled(layout).throughput(pattern) or number == 9
        if number <= 4:
            oobleck = Oobleck(layout, 24).throughput(pattern)
            assert recycle >= oobleck > 13.41 / 20.55 * Bamboo(layout).throughput(pattern)


def test_fault_scaled_on_the_published_trace() -> None:
    """Digitised curve: 10.268 of 11.34 samples/s."""
    result = simulate(gcp_trace(), FaultScaled(GCP))
    assert 11.34 * result.useful == pytest.approx(10.268, rel=0.001)
    assert math.isnan(result.average(25)) and result.average(0) == pytest.approx(result.useful)
