"""When the number of workers changes, without any process."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.config import ResizeOptions, SwiftConfig
from shared_core.protocol.resizing import Resizing
from shared_core.protocol.worker_env import Resized

#: The same examples in each run.
FIXED = settings(max_examples=100, deadline=None, derandomize=True, database=None)
SHRINK = SwiftConfig.from_dict({"on_failure": "shrink", "resize.grow_after_s": 60})
LATE = SwiftConfig.from_dict({"resize.replace_timeout_s": 5})
LINE = Resized(0, 4, (0, 2, 3), 7)

configs = st.builds(
    SwiftConfig,
    on_failure=st.sampled_from(["replace", "shrink", "restart"]),
    resize=st.builds(
        ResizeOptions, replace_timeout_s=st.sampled_from([0.0, 5.0]), grow_after_s=st.sampled_from([0.0, 60.0])
    ),
)


@FIXED
@given(configs, st.booleans())
def test_only_shrink_answers_a_failure_at_once(config: SwiftConfig, goodbyes: bool) -> None:
    assert Resizing(config, 4).shrinks(goodbyes) == (config.on_failure == "shrink" and not goodbyes)


@FIXED
@given(configs, st.booleans())
def test_a_change_under_way_answers_every_failure(config: SwiftConfig, goodbyes: bool) -> None:
    resizing = Resizing(config, 4)
    resizing.begin([3, 0, 2], 3)
    assert resizing.stay == (0, 2, 3) and resizing.target == 3 and resizing.shrinks(goodbyes)
    resizing.begin([0, 2], 2)  # another fails meanwhile
    assert resizing.stay == (0, 2) and resizing.target == 2 and resizing.shrinks(goodbyes)
    resizing.end()
    assert resizing.shrinks(goodbyes) == (config.on_failure == "shrink" and not goodbyes)


@FIXED
@given(configs, st.integers(1, 4), st.floats(0, 1e6))
def test_empty_places_are_filled_after_a_while(config: SwiftConfig, workers: int, now: float) -> None:
    resizing = Resizing(config, 4)
    assert resizing.grow_at is None
    resizing.schedule(now, workers)
    grows = workers < 4 and config.resize.grow_after_s > 0
    assert resizing.grow_at == (now + config.resize.grow_after_s if grows else None)
    resizing.begin([0], 1)
    assert resizing.grow_at is None, "not in the middle of a change"


def test_a_change_that_is_done() -> None:
    resizing = Resizing(SHRINK, 4)
    resizing.begin([0, 2, 3], 3)
    resizing.done(100.0, 3, LINE)
    assert (resizing.stay, resizing.line, resizing.grow_at) == ((), LINE, 160.0)
    resizing.begin([0, 1, 2], 4)
    resizing.done(170.0, 4, LINE)
    assert resizing.grow_at is None


def test_replacements_have_so_much_time() -> None:
    resizing = Resizing(LATE, 4)
    resizing.expect([2], 10.0)
    resizing.expect([1], 12.0)
    assert [resizing.late(now) for now in (10.0, 14.9, 15.0, 17.0)] == [[], [], [2], [1, 2]]
    resizing.expect([2], 16.0)  # its replacement failed, too
    assert resizing.late(17.0) == [1]
    resizing.begin([0, 3], 2)
    assert resizing.late(100.0) == [], "the others continue"


def test_a_restart_of_all_forgets_who_was_awaited() -> None:
    resizing = Resizing(LATE, 4, line=LINE)
    resizing.expect([2], 10.0)
    resizing.done(11.0, 3, resizing.line)
    assert resizing.late(100.0) == [] and resizing.grow_at == 71.0 and resizing.line == LINE


@FIXED
@given(configs, st.floats(0, 1e6))
def test_nobody_is_late_where_the_others_wait_on(config: SwiftConfig, now: float) -> None:
    resizing = Resizing(config, 4)
    resizing.expect([0, 1], now)
    timed = config.on_failure == "replace" and config.resize.replace_timeout_s > 0
    assert resizing.late(now + 1e6) == ([0, 1] if timed else [])
