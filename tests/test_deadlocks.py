"""Ranks that wait for each other end within seconds, and a rank that is only late does not."""

from __future__ import annotations

import re

import pytest
from harness import Jobs, few

REDUCES = r"rank 0 waits for rank 1 in all_reduce\(float32\[4\]\) .*"
RECEIVES = r"rank 0 waits for rank 1 in recv \(message 0 .*"
ONE, ENDED = "rank 1 waits for rank 0 in", ", though the program of rank 1 has ended"
#: What rank 1 waits in while rank 0 is in an all-reduce: a collective of another group, another one of the same, one
#: whose inputs the log keeps; a message, from a rank or from any; nothing, as its program has ended. Then two messages,
#: a message and nothing, a bucket that DDP waits for in C++, and three ranks in a circle. (Two shapes of one collective
#: are no deadlock: gloo ends the process.)
PLACES = {
    "group": rf"{REDUCES}; {ONE} barrier\(\)",
    "call": rf"{REDUCES}; {ONE} broadcast\(",
    "inputs": rf"{REDUCES}; {ONE} reduce_scatter",
    "message": rf"{REDUCES}; {ONE} recv \(message 0 from rank 0",
    "any source": rf"{REDUCES}; {ONE} recv \(message 0 from any rank",
    "none": rf"{REDUCES}{ENDED}",
    "messages": rf"{RECEIVES}; {ONE} recv \(message 0",
    "message, none": rf"{RECEIVES}{ENDED}",
    "bucket": rf"rank 0 waits for rank 1 in all_reduce\(float32\[5\]\) .*; {ONE} recv \(message 0",
    "three": r"rank 0 waits for ranks 1, 2 in all_reduce\(float32\[4\]\) .*; rank 1 waits for rank 2 in recv .*; "
    r"rank 2 waits for rank 0 in barrier\(\)",
}


@pytest.mark.parametrize("how", few(PLACES, "none"))
def test_a_deadlock_ends_with_both_places(how: str, jobs: Jobs) -> None:
    result = jobs.run("deadlock.py", args=[how], nproc=3 if how == "three" else 2)
    assert result.status == 1, result.tail()
    said = re.search(rf"Deadlock: no rank can continue, for (\d+) s \(.*\): {PLACES[how]}", result.stderr)
    assert said is not None and int(said[1]) < 10, result.tail()
    assert not result.kinds("failed"), result.tail()


def test_a_rank_that_is_late_is_waited_for(jobs: Jobs) -> None:
    result = jobs.run("deadlock.py", args=["computes"])
    assert result.status == 0 and "Deadlock" not in result.stderr, result.tail()


@pytest.mark.nightly
def test_a_job_with_checkpoints_goes_back_once(jobs: Jobs) -> None:
    checkpoints = ["--checkpoint-dir", str(jobs.folder("deadlock") / "checkpoints")]
    result = jobs.run("deadlock.py", args=["once"], launcher_args=checkpoints)
    assert result.status == 0 and len(result.kinds("restart")) == 1, result.tail()
    again = jobs.run("deadlock.py", args=["group"], launcher_args=[*checkpoints[:1], checkpoints[1] + "2"])
    assert again.status == 1 and len(again.kinds("restart")) == 1, again.tail()
    assert "Deadlock: no rank can continue" in again.stderr, again.tail()
