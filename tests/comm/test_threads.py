"""Workers fail while other threads than the program's are in collectives."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import Fault
from shared_core.worker.comm.op import ComputeLock, Op, SwiftWork
from tests.support.runner import compare

SCRIPT = str(Path(__file__).parent / "scripts" / "threads.py")


def test_what_ends_in_its_batch_is_done_again(jobs: Jobs) -> None:
    """By a thread of a pool, which lives on, and by that of each save."""
    faults = [
        Fault(1, 2, "collective.after", "SIGKILL"),
        Fault(0, 4, "collective.before", "SIGKILL", nth=4),
        Fault(1, 5, "collective.after", "SIGKILL", nth=5, incarnation=1),
        Fault(0, 7, "bucket", "SIGKILL", incarnation=1),
    ]
    result = jobs.check(SCRIPT, faults=faults, args=["joined"])
    assert not result.kinds("restart")


@pytest.mark.nightly
def test_what_reaches_across_a_step_boundary_sends_all_back(jobs: Jobs) -> None:
    """A replacement does not do it again: its peers would wait for it."""
    result = jobs.run(SCRIPT, faults=[Fault(1, 5, "collective.before", "SIGKILL")], args=["across"])
    assert result.status == 0 and result.struck, result.tail()
    [restart] = result.kinds("restart")
    why = restart.fields["reason"]
    assert "of the script is in all_reduce(int64[]) of group" in why and "async_save(...).result()" in why, why
    compare(result, jobs.reference(SCRIPT, args=["across"]))


def test_a_helper_computes_while_the_program_waits_with_a_time_limit() -> None:
    lock = ComputeLock()
    op = Op(("barrier", (), (), 0), lambda inner: None, [])

    def help_out() -> None:
        with lock.taken():
            op.future.set_result(None)

    lock.begin()
    helper = threading.Thread(target=help_out)
    helper.start()
    assert SwiftWork(op, lock).wait(timedelta(seconds=20))
    helper.join()
    assert lock._lock.locked(), "the program computes again"
