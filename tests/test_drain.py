"""Workers leave as planned, or because they are slow: the bits are those of the run without, and nobody calls it a
failure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest
from harness import Jobs

from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError
from shared_core.faults import ANY_STEP, Fault
from shared_core.protocol.failure_policy import Death, FailureBook
from shared_core.protocol.generation import CauseKind
from shared_core.protocol.leaving import chosen, refused
from shared_core.protocol.stragglers import LEAST_S, Slow, slow
from shared_core.report import recoveries
from shared_core.watch.view import Live, view_of
from tests.support.report import DRAIN, STARTUP
from tests.support.runner import JobResult, compare, unconfirmed


def run(
    jobs: Jobs,
    script: str,
    drained: Mapping[str, str],
    *,
    faults: Sequence[Fault] = (),
    failed: int = 0,
    args: Sequence[str] = (),
    nproc: int = 2,
    env: Mapping[str, str] | None = None,
) -> JobResult:
    """``drained``: see :data:`DRAIN`. The result is that of the run without any of it."""
    more = {DRAIN: json.dumps(drained)} | dict(env or {})
    result = jobs.run(script, nproc=nproc, faults=faults, env=more, args=args)
    compare(result, jobs.reference(script, nproc=nproc, args=args))
    assert not unconfirmed(result), "\n".join([*unconfirmed(result), result.tail()])
    assert len(result.kinds("failed")) == failed, result.tail()
    return result


def left(result: JobResult) -> list[int]:
    return [event.rank for event in result.kinds("drained")]


#: Script, its arguments, who leaves when. Each time the launcher chooses the step boundary: the one that comes next.
SCRIPTS = {
    "plain": ("plain_ddp.py", ["--norm"], {"1:3": "1"}),
    "rank 0": ("plain_ddp.py", ["--norm"], {"1:3": "0"}),
    "lightning": ("lit.py", ["--feature", "all"], {"0:6": "1"}),
    "accelerate": ("acc.py", [], {"0:5": "1"}),
}


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(each, marks=pytest.mark.nightly) for each in SCRIPTS if each != "plain")]
)
def test_scripts(name: str, jobs: Jobs) -> None:
    script, args, drained = SCRIPTS[name]
    result = run(jobs, script, drained, args=args)
    assert left(result) == [int(rank) for rank in drained.values()], result.tail()
    assert "no worker failed" in result.stderr and len(result.told("left as planned and is back")) == 1, result.tail()
    [answer] = recoveries(result.events)
    assert answer.answer == "drain" and answer.recomputed_steps == 0
    view = view_of(result.events, Live(0.0))
    assert not view.failures_by_kind and [one.kind for one in view.failures] == ["drained"]
    [end] = result.kinds("end")
    assert end.fields["replaced"] == 0, "it costs no replacement"


def test_nobody_leaves_that_is_not_there(jobs: Jobs) -> None:
    """The answer says who is there; the job is as it was."""
    result = run(jobs, "plain_ddp.py", {"1:3": "7"})
    [line] = [line for line in result.stderr.splitlines() if line.startswith("swiftctl: ")]
    assert "'7' is no rank or host of this job" in line and "ranks 0 to 1" in line and not left(result), result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["forward", "leave"])
def test_another_worker_fails_while_one_leaves(point: str, jobs: Jobs) -> None:
    """Also where the worker that leaves fails at that very place: then it is a failure."""
    fault = Fault(2, 4, "forward", "SIGKILL") if point == "forward" else Fault(1, ANY_STEP, "leave", "SIGKILL")
    result = run(jobs, "plain_ddp.py", {"0:3": "1"}, faults=[fault], failed=1, nproc=3)
    assert left(result) == ([1] if point == "forward" else []), result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("prepared", ["auto", "1"])
def test_a_hot_standby_takes_over(prepared: str, jobs: Jobs) -> None:
    """It is prepared for the leave where the job has none."""
    slow_start = {STARTUP: "2.1"} if prepared == "auto" else {}
    env = {"SWIFT_RECOVERY_STANDBY_PREPARED": prepared} | slow_start
    result = run(jobs, "plain_ddp.py", {"0:3": "1"}, args=["--norm", "--steps", "150"], env=env)
    how = [event.fields["how"] for event in result.kinds("replacement_start")]
    assert left(result) == [1] and how[0] in ("prepared", "forked"), result.tail()


@pytest.mark.nightly
def test_a_copy_that_a_fork_has_changed_gives_way(jobs: Jobs) -> None:
    """Its state differs from what was published, as Python's generator did, which is seeded again in each fork."""
    result = run(jobs, "plain_ddp.py", {"0:3": "1"}, args=["--norm", "--own"], failed=1)
    assert [event.fields["how"] for event in result.kinds("replacement_start")] == ["forked", "standby"], result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("answer", ["report", "replace"])
def test_a_slow_rank(answer: str, jobs: Jobs) -> None:
    """Busy loops share its core. A worker in its place does not have them."""
    env = {"SWIFT_RECOVERY_STRAGGLERS": answer}
    args = ["--width", "1500", "--steps", "60"]
    result = run(jobs, "plain_ddp.py", {}, faults=[Fault(1, 15, "forward", "slow")], args=args, env=env)
    named = result.kinds("straggler")
    assert [event.rank for event in named] == [1], result.tail()
    assert left(result) == ([1] if answer == "replace" else []), result.tail()
    assert len(result.told("rank 1 (pid")) == 1, result.tail()


# -- decisions --------------------------------------------------------------------------------------------------------


def test_a_planned_leave_costs_nothing() -> None:
    def death(rank: int, kind: CauseKind) -> Death:
        return Death(rank, 1, -9, "", 5, None, "", 0.0, kind)

    book = FailureBook(budget=1)
    for _ in range(5):
        plan = book.respond([death(1, CauseKind.PLANNED)])
        book.charge(plan)
        assert (plan.response, plan.delays_s, book.budget) == ("replace", (0.0,), 1)
    book.charge(book.respond([death(1, CauseKind.PLANNED), death(2, CauseKind.DIED)]))
    assert book.budget == 0
    assert book.respond([death(2, CauseKind.DIED)]).response == "end"


def test_who_is_meant() -> None:
    hosts = ["node1 (10.0.0.1)", "node2 (10.0.0.2)"]
    assert chosen("3", hosts, 2) == (1, 3)
    assert chosen("node1", hosts, 2) == (0, None) and chosen("10.0.0.2", hosts, 2) == (1, None)
    with pytest.raises(ConfigError, match=r"'4' is no rank.*node1 \(10.0.0.1\): ranks 0 to 1; node2"):
        chosen("4", hosts, 2)
    with pytest.raises(ConfigError, match="several"):
        chosen("same", ["same (10.0.0.1)", "same (10.0.0.2)"], 1)


@pytest.mark.parametrize(
    ("options", "rank", "spares", "store", "word"),
    [
        ({}, 1, 0, False, ""),
        ({"on_failure": "reroute"}, 1, 0, False, ""),
        ({"on_failure": "restart"}, 1, 0, False, "on_failure"),
        ({}, None, 0, False, "spare"),
        ({}, None, 1, True, "store"),
        ({}, None, 1, False, ""),
    ],
)
def test_why_nobody_can_leave(
    options: dict[str, object], rank: int | None, spares: int, store: bool, word: str
) -> None:
    reason = refused(SwiftConfig.from_dict(options), rank, [0, 1], spares=spares, keeps_store=store)
    assert (word in reason) if word else not reason
    assert refused(SwiftConfig(), 0, [0], spares=0, keeps_store=False)


def test_who_is_slow() -> None:
    """For ten steps, by a factor and by a time; with the part. One slow step does not count."""

    def steps(backward: float, odd: float = 0.0, first: int = 1) -> dict[int, tuple[float, ...]]:
        return {first + at: (0.01, 0.02, backward + odd * (at == 3), 0.005) for at in range(10)}

    def named(found: dict[int, dict[int, tuple[float, ...]]]) -> list[Slow]:
        return slow(found, found)

    [one] = named({0: steps(0.03), 1: steps(0.03, 9.0), 2: steps(0.09, first=2), 3: steps(0.03)})
    assert (one.rank, one.part, one.step) == (2, "backward", 10) and 1.8 < one.factor < 2.0
    two = {0: steps(0.03), 1: steps(0.09)}
    assert [one.rank for one in named(two)] == [1] and not slow(two, [0])
    assert not named({0: steps(0.03), 1: steps(0.04)}) and not named({0: steps(0.09)})
    few: dict[int, dict[int, tuple[float, ...]]] = {0: {1: (1.0, 0, 0, 0)}, 1: {1: (9.0, 0, 0, 0)}}
    assert not named(few)
    short: dict[int, dict[int, tuple[float, ...]]] = {
        rank: dict.fromkeys(range(1, 11), (LEAST_S / 3 * (1 + rank), 0, 0, 0)) for rank in (0, 1)
    }
    assert not named(short)
