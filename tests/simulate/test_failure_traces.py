"""Failure traces: the published one, files, generators, spares."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.simulate import Trace, TraceEvent, from_counts, gcp_trace, read_trace
from benchmarks.simulate.choices import trace_of
from benchmarks.simulate.generators import parse, racks, weibull
from shared_core.errors import ConfigError


def live(trace: Trace) -> list[tuple[float, int]]:
    """When how many workers are live; checks that only live workers fail and only vacant places filled."""
    vacant: set[int] = set()
    found = [(0.0, trace.workers)]
    for event in trace.events:
        assert found[-1][0] <= event.time_s
        assert not vacant & set(event.lost) and all(0 <= place < trace.workers for place in event.lost)
        vacant |= set(event.lost)
        assert set(event.joined) <= vacant
        vacant -= set(event.joined)
        found.append((event.time_s, trace.workers - len(vacant)))
    return found


def mean_live(trace: Trace) -> float:
    steps = [*live(trace), (trace.duration_s, 0)]
    return sum((b[0] - a[0]) * a[1] for a, b in itertools.pairwise(steps)) / trace.duration_s


def test_the_published_trace() -> None:
    """Against what the digest of the figures says of it: 37 changes, 19 down, mean 21.7, from 24 to 15 and back."""
    trace = gcp_trace()
    steps = [number for _, number in live(trace)]
    changes = [b - a for a, b in itertools.pairwise(steps)]
    assert (trace.workers, trace.duration_s, trace.resolution_s) == (24, 159 * 144, 144)
    assert (len(changes), sum(change < 0 for change in changes), trace.failures) == (37, 19, 27)
    assert (steps[0], min(steps), steps[-1]) == (24, 15, 24)
    assert steps[:9] == [24, 23, 22, 23, 24, 22, 21, 22, 21]
    assert mean_live(trace) == pytest.approx(21.7, abs=0.05)


def test_a_shift_stays_within_the_resolution() -> None:
    trace, moved = gcp_trace(), gcp_trace().jittered(3)
    shifts = [before.time_s - after.time_s for before, after in zip(trace.events, moved.events, strict=True)]
    assert all(0 <= shift <= 144 for shift in shifts) and max(shifts) > 72 > min(shifts)
    assert [number for _, number in live(moved)] == [number for _, number in live(trace)]
    assert moved == gcp_trace().jittered(3) != gcp_trace().jittered(4)


def test_files(tmp_path: Path) -> None:
    table, data = tmp_path / "a.csv", tmp_path / "a.json"
    table.write_text("# workers: 8\n# duration_s: 900\n# from nowhere\ntime_s,change\n10,-2\n\n400,+1\n")
    data.write_text('{"workers": 8, "duration_s": 900, "events": [[10, -2], [400, 1]]}')
    trace = read_trace(table)
    assert trace == read_trace(data) and trace.duration_s == 900
    assert [number for _, number in live(trace)] == [8, 6, 7]
    assert trace.events[1].joined == trace.events[0].lost[:1], "the place vacant longest is filled first"
    table.write_text("5,-1\n")
    assert read_trace(table, workers=3).duration_s == 5
    assert trace_of(str(data), None, 0.1, 0).duration_s == 360


@pytest.mark.parametrize(
    "text, message",
    [
        ("# workers: 4\nsoon,-1\n", "is not a trace"),
        ("# workers: 4\n5,-1,7\n", "is not a trace"),
        ("# workers: 4\n5,-5\n", "changes 4 of 4 workers by -5"),
        ("# workers: 4\n5,+1\n", "by \\+1"),
        ("5,-1\n", "does not say how many workers"),
    ],
)
def test_what_is_no_trace(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_generators_draw_from_the_seed() -> None:
    for spec in ("exponential:1", "weibull:1:0.7:2", "periodic:1:0.5", "racks:1:4"):
        first = parse(spec, 64, 100.0, seed=5)
        assert first == parse(spec, 64, 100.0, seed=5) != parse(spec, 64, 100.0, seed=6)
        live(first)
    assert parse("racks:2:4:3", 64, 50.0, 1) == racks(64, 50.0, 2.0, 4, 3.0, 1)
    assert parse("weibull:2:0.5", 64, 50.0, 1) == weibull(64, 50.0, 2.0, 0.5, 1.0, 1)


def test_racks_fail_together() -> None:
    trace = racks(30, 1000.0, 1.0, size=8, repair_h=3.0)
    lost = [event.lost for event in trace.events if event.lost]
    assert {places[0] for places in lost} == {0, 8, 16, 24}
    assert all(places == tuple(range(places[0], min(places[0] + 8, 30))) for places in lost)


def test_spares_take_over_at_once_while_they_last() -> None:
    events = (
        TraceEvent(1.0, lost=(3,)),
        TraceEvent(2.0, lost=(5,)),
        TraceEvent(3.0, joined=(3,)),
        TraceEvent(4.0, joined=(5,)),
    )
    trace = Trace(8, 10.0, (*events, TraceEvent(5.0, lost=(3,))))
    filled = trace.with_spares(1).events
    assert filled[0] == TraceEvent(1.0, (3,), (3,)), "by the spare"
    assert filled[1] == TraceEvent(2.0, (5,), ()), "none is left"
    assert filled[2] == TraceEvent(3.0, (), (5,)), "the repaired worker goes where one is missing"
    assert filled[3] == TraceEvent(5.0, (3,), (3,)), "by the one repaired at 4.0"
    assert trace.with_spares(0).failures == 3


@pytest.mark.parametrize(
    "spec", ["exponential", "exponential:", "weibull:1", "racks:1:2.5", "periodic:1:2:3", "periodic:-1"]
)
def test_what_is_no_generator(spec: str) -> None:
    with pytest.raises(ConfigError, match="must look like"):
        trace_of(spec, 8, 10.0, 0)


def test_workers_are_needed() -> None:
    with pytest.raises(ConfigError, match="needs --workers"):
        trace_of("exponential:1", None, 10.0, 0)
    with pytest.raises(ConfigError, match="by -9"):
        from_counts([(1.0, -9)], 8, 10.0)
