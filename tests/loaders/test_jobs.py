"""Jobs lose workers while they read loaders of each kind: the bits stay those of the stock run.

A replacement reads again only what docs/loops.md says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpointed import committed, continued_from, finished, options, running
from harness import Jobs
from kinds import ROWS, SIZE

from shared_core.faults import Fault
from tests.support.runner import JobResult, compare

EPOCHS = 3
#: Items of each batch of a stream in two parts, of 15 and 9 items.
PARTS = (2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 2, 2, 1)


@dataclass(frozen=True)
class Case:
    """One kind of loader under one framework.

    Attributes:
        framework: see the script.
        kind: of loader.
        batches: of each rank in an epoch.
        items: read by a rank in an epoch.
        again: what a replacement reads again: ``nothing``, the ``pass``, what was ``new`` to the failed worker in it,
            or empty where that is not counted.
        still: the model draws no random numbers.
        besides: most items that a replacement reads besides: Lightning fetches a batch of a stream before the
            replacement has its place, and of a pass that was fetched ahead by lasting loader workers the last batch is
            read again.
    """

    framework: str
    kind: str
    batches: int = SIZE // ROWS
    items: int = SIZE
    again: str = "nothing"
    still: bool = False
    besides: int = 0

    @property
    def name(self) -> str:
        return f"{self.framework}-{self.kind}"

    def used(self, batch: int) -> int:
        """Items of the batches before this one."""
        if self.batches == len(PARTS):
            return sum(PARTS[:batch])
        return batch * self.items // self.batches

    def step(self, epoch: int, batch: int) -> int:
        """Number of the step boundary of a batch, counted from 0."""
        boundaries = self.batches + (self.framework == "plain")  # there the end of a pass is a boundary, too
        return boundaries * epoch + batch + 1

    def fault(self, rank: int, epoch: int, batch: int, incarnation: int = 0) -> Fault:
        """The rank is killed in the backward pass of a batch."""
        return Fault(rank, self.step(epoch, batch), "bucket", "SIGKILL", incarnation=incarnation)


#: One batch, and those that two loader workers read ahead.
BEGUN = (1 + 2 * 2) * ROWS
#: Kinds whose batches are divided among the two ranks.
HALF = SIZE // ROWS // 2
CASES = [
    Case("plain", "lasting"),
    Case("plain", "workers_shaken"),
    Case("plain", "reading", again="pass", still=True),
    Case("plain", "restless"),
    Case("plain", "workers_eager"),
    Case("plain", "several", items=2 * SIZE),
    Case("plain", "kept", again="new", still=True),
    Case("plain", "stream", again="pass"),
    Case("plain", "parts"),
    Case("plain", "lasting_parts", batches=len(PARTS)),
    Case("plain", "workers_noisy_counter", batches=2 * SIZE // ROWS, items=2 * SIZE, again="pass"),
    Case("plain", "stateful", SIZE),
    Case("lightning", "lasting", HALF, SIZE // 2),
    Case("lightning", "workers_shaken", HALF, SIZE // 2),
    Case("lightning", "several", HALF, SIZE),
    Case("lightning", "stream", again="pass", besides=ROWS),
    Case("lightning", "lasting_parts", batches=len(PARTS), besides=BEGUN + ROWS),
    Case("lightning", "stateful", SIZE, besides=1),
    Case("accelerate", "plain", HALF, SIZE // 2),
    Case("accelerate", "lasting", HALF, SIZE // 2, besides=ROWS),
    Case("accelerate", "workers_shaken", HALF, SIZE // 2),
    Case("accelerate", "several", HALF, SIZE, besides=ROWS),
    Case("accelerate", "stream", HALF, again=""),
    Case("accelerate", "own_parts", HALF, again="pass"),
    Case("accelerate", "own_workers_stream", HALF, again="pass"),
]
#: By name: epoch and batch at which a rank fails, in this order; a rank that fails twice, the second time as the
#: replacement of the first.
FAILURES = {
    "middles": [(1, 0, 3), (0, 1, 2), (1, 2, 4)],
    "ends": [(0, 0, -1), (1, 1, 0), (0, 2, -1)],
    "again": [(1, 1, 2), (1, 1, 4), (0, 2, 0)],
}
#: In every run; all else is left to the night.
DAILY = ("accelerate-plain", "ends")


def cases() -> list[Any]:
    """Cases and failures."""
    found = []
    for case in CASES:
        for failures in FAILURES:
            marks = [] if (case.name, failures) == DAILY else [pytest.mark.nightly]
            found.append(pytest.param(case, failures, marks=marks, id=f"{case.name}-{failures}"))
    return found


@pytest.mark.parametrize("case, failures", cases())
def test_a_failure_changes_no_bit_and_reads_nothing_again(case: Case, failures: str, jobs: Jobs) -> None:
    args = [case.framework, case.kind, "--epochs", str(EPOCHS), *(["--still"] if case.still else [])]
    places = [(rank, epoch, batch % case.batches) for rank, epoch, batch in FAILURES[failures]]
    faults, failed = [], {0: 0, 1: 0}
    for rank, epoch, batch in places:
        faults.append(case.fault(rank, epoch, batch, failed[rank]))
        failed[rank] += 1
    result = jobs.check("read.py", faults=faults, args=args)
    for rank in {rank for rank, *_ in places}:  # replacements that failed again may have read ahead
        *before, (_, epoch, batch) = [place for place in places if place[0] == rank]
        # All items had been read in epoch 0, but by an earlier process than one that began in this pass.
        new = before[-1][2] if before and before[-1][1] == epoch else batch
        check_reads(result, case, rank, len(before) + 1, epoch, {"pass": 0, "new": new}.get(case.again, batch))


def check_reads(result: JobResult, case: Case, rank: int, incarnation: int, epoch: int, batch: int) -> None:
    """A worker has read from a batch on, to the end of the training."""
    path = result.out / f"reads-{rank}-0-{incarnation}.txt"
    reads = len(path.read_text().split()) if path.exists() else 0
    expected = (EPOCHS - epoch) * case.items - case.used(batch)
    right = expected <= reads <= expected + case.besides
    assert not case.again or right, (case.name, rank, reads, expected, result.tail())


#: Kinds of loader whose whole job is killed, and where.
RESTARTED = [
    ("plain", "lasting_parts", 1, 3),
    ("plain", "several", 2, 0),
    ("lightning", "workers_shaken", 1, 3),
    ("accelerate", "lasting", 1, 3),
]


@pytest.mark.nightly
@pytest.mark.parametrize("framework, kind, epoch, batch", RESTARTED)
def test_a_killed_job_continues_in_the_middle_of_an_epoch(
    framework: str, kind: str, epoch: int, batch: int, jobs: Jobs, tmp_path: Path
) -> None:
    """From the checkpoint at that batch; each sample that it had used is not read again."""
    case = next(case for case in CASES if (case.framework, case.kind) == (framework, kind))
    args = [case.framework, case.kind, "--epochs", str(EPOCHS)]
    boundary = case.step(epoch, batch)
    env = options(tmp_path, every=boundary, on_failure="restart", checkpoint_background="false")
    stop = {"STOP_AT": str(case.batches * epoch + batch)}
    with running(jobs, "read.py", args, env=env | stop) as job:
        job.until(lambda: committed(tmp_path) == [boundary])
        job.kill()
        job.end()
    with running(jobs, "read.py", args, env=env) as job:
        result = finished(job)
    assert continued_from(result) == {boundary}, result.tail()
    compare(result, jobs.reference("read.py", args=args))
    for rank in range(2):
        check_reads(result, case, rank, 0, epoch, batch)
