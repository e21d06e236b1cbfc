"""The helper of all waits: its words and its times."""

from __future__ import annotations

import math

import pytest

from shared_core.errors import WaitTimeout
from shared_core.waiting import Wait, wait_for


class Clock:
    """Time that passes when it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_line_after_five_seconds_and_an_error_at_the_limit() -> None:
    clock, said = Clock(), []
    wait = Wait("rank 1", "ranks 0, 2 to start", 30.0, advice="Look at them.", say=said.append, clock=clock)
    clock.now += 4.9
    wait.look()
    assert said == [] and wait.next_s() == pytest.approx(0.1)
    for clock.now in (105.0, 106.0, 129.9):
        wait.look()
    assert said == ["rank 1 waits for ranks 0, 2 to start; this ends with an error in 25 s (detection.wait_timeout_s)"]
    clock.now = 130.0
    with pytest.raises(WaitTimeout) as raised:
        wait.look()
    assert str(raised.value) == "rank 1 waited 30 s (detection.wait_timeout_s) for ranks 0, 2 to start. Look at them."
    assert len(said) == 1


def test_a_short_wait_says_its_line_at_half_time() -> None:
    clock, said = Clock(), []
    wait = Wait("rank 1", "rank 0", 3.0, bound="a fixed limit", say=said.append, clock=clock)
    clock.now += 1.5
    wait.look()
    assert said == ["rank 1 waits for rank 0; this ends with an error in 2 s (a fixed limit)"]


def test_a_wait_without_a_limit_says_when_it_ends() -> None:
    clock, said = Clock(), []
    wait = Wait("rank 1", lambda: "rank 0 to finish", math.inf, ends="it waits on", say=said.append, clock=clock)
    clock.now += 1e6
    wait.look()
    assert said == ["rank 1 waits for rank 0 to finish; it waits on"]


def test_whoever_does_not_speak_ends_all_the_same() -> None:
    clock, said = Clock(), []
    wait = Wait("rank 2", "rank 0", 10.0, speaks=lambda: False, say=said.append, clock=clock)
    clock.now += 6
    wait.look()
    clock.now += 4
    with pytest.raises(WaitTimeout, match=r"rank 2 waited 10 s"):
        wait.look()
    assert said == []


class Keys:
    """A store."""

    def __init__(self, *keys: str) -> None:
        self.keys = set(keys)

    def check(self, keys: list[str]) -> bool:
        return self.keys.issuperset(keys)


def test_the_missing_ranks_are_named_by_the_lowest_that_has_come(capsys: pytest.CaptureFixture[str]) -> None:
    store, keys = Keys("b", "d"), {0: "a", 1: "b", 2: "c", 3: "d"}
    for rank in (1, 3):
        with pytest.raises(
            WaitTimeout, match=rf"^rank {rank} waited 0.2 s \(detection.wait_timeout_s\) for ranks 0, 2 to come\."
        ):
            wait_for(store, keys, lambda: False, 0.2, rank, "to come")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("[swift] rank 1 waits for ranks 0, 2 to come; ")
