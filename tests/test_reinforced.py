"""Streams that depend on what training changes: the same bits after a failure, or refused by name; never others."""

from __future__ import annotations

import pytest
from harness import Jobs, few

from shared_core.faults import Fault
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
