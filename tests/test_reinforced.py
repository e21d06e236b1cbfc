"""Streams that depend on what training changes: the same bits after a failure, or refused by name; never others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Jobs, few

from shared_core.errors import Unsupported
from shared_core.faults import Fault
from shared_core.loaders import ResumableLoader
from tests.support.runner import compare, unconfirmed

#: What a refusal says: of a buffer that the script fills, and of items that are others when they are read again.
NAMES = ("training data", "has changed since training began")
ITEMS = ("are others when they are read again", "something that training changes", "that the failed worker had read")

CASES = {
    "named": "dqn --buffer named",
    "list_late": "dqn --buffer list --late",
    "deque_late": "dqn --buffer deque --late",
    "ppo": "ppo",
}


@pytest.mark.parametrize("name", few(CASES, "named"))
def test_a_failure_gives_the_same_bits_or_a_name(name: str, jobs: Jobs) -> None:
    args = CASES[name].split()
    result = jobs.run("reinforced.py", faults=[Fault(1, 6, "bucket", "SIGKILL")], args=args)
    assert not unconfirmed(result), result.tail()
    if result.status == 0:
        compare(result, jobs.reference("reinforced.py", args=args))
    else:
        assert "over a Replays" in result.stderr or "over a Played" in result.stderr or NAMES[0] in result.stderr
        assert any(all(word in result.stderr for word in words) for words in (NAMES, ITEMS)), result.tail()


@pytest.mark.parametrize("large", [False, True])
def test_items_that_are_others_when_read_again_are_refused(large: bool, tmp_path: Path) -> None:
    """In one process: the same stream gives the same items, a stream over a buffer that has grown does not."""
    scale = torch.full((20_000 if large else 3,), 1.0)
    buffer = [scale * number for number in range(5)]

    def stream() -> object:
        return (buffer[-1 - number] for number in range(4))

    class Stream:
        def __iter__(self) -> object:
            return stream()

    first = ResumableLoader(Stream(), ahead=0)
    position = iter(first)
    given = [next(position) for _ in range(2)]
    state = first.state(position)

    def read_again() -> torch.Tensor:
        """The next item in a replacement."""
        loader = ResumableLoader(Stream(), ahead=0)
        continuing = iter(loader)
        loader.restore(state, continuing)
        return next(continuing)

    assert torch.equal(read_again(), buffer[-3]) and torch.equal(given[1], buffer[-2])
    buffer.append(scale * 7)
    with pytest.raises(Unsupported, match="2 items .* over a Stream are others when they are read again"):
        read_again()
