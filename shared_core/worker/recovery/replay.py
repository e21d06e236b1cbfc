"""What pipelines without replicas need: replacements run on from a checkpoint with logged messages, and others help.

The ranks agree on the newest checkpoint that all know to be committed, by a collective that each batch has. With
``log.budget_bytes`` it also says what each rank keeps of the budget and what it has logged, so that the ranks share it,
and rank 0 knows when their logs need a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shared_core.events import console_once
from shared_core.system import threads
from shared_core.worker.comm import Runtime
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.comm.op import ComputeLock
from shared_core.worker.messages import log_budget
from shared_core.worker.messages.disk_log import DiskLog
from shared_core.worker.messages.log_budget import Advice
from shared_core.worker.recovery.exchange import Replaying


class Replays:
    """Replays of this worker, and of others that it helps; and the log on disk for them, which is cut back and kept
    within its budget.

    Args:
        newest_boundary: step boundary of the newest checkpoint that this rank knows to be committed; 0 for none.
        due_boundary: the newest step boundary at which a checkpoint was due; 0 for none.
        budget: ``log.budget_bytes``; 0 is no limit.

    Attributes:
        own: set in a replacement that runs from a checkpoint, or from the beginning, until its replay has ended.
        presses: in rank 0: the logs since the last checkpoint take their part of the budget, so one is to be made.
        pressed: in rank 0: the last checkpoint was made for that reason.
    """

    def __init__(
        self,
        runtime: Runtime,
        log: DiskLog,
        newest_boundary: Callable[[], int],
        due_boundary: Callable[[], int],
        budget: int,
    ) -> None:
        self._runtime, self._log = runtime, log
        self._newest_boundary, self._due_boundary, self._budget = newest_boundary, due_boundary, budget
        self._rank, self._world_size = runtime.rank, runtime.world_size
        self._helper: Callable[[Replaying], None] | None = None
        self.own: Replaying | None = None
        self._mark: tuple[Any, torch.Tensor, int] | None = None
        self._seen_due = 0
        self.presses = self.pressed = False

    def begin(self, replaying: Replaying | None) -> None:
        """This replacement replays what the failed worker did; None: nothing is to be replayed."""
        self.own = replaying

    def end(self) -> None:
        self.own = None

    def regroup(self, together: Sequence[int]) -> None:
        """From now on these ranks, this one among them, start again together: messages between them are not logged."""
        self._log.regroup(together, self._runtime.boundary)

    def note_messages(self, note: dict[str, Any]) -> None:
        """Set the note in the log on disk of the messages sent from now on; plain data."""
        self._log.describe(note)

    def help(self, helper: Callable[[Replaying], None]) -> None:
        """``helper`` is called, on a thread, when others replay. To be called on the program's thread."""
        self._runtime.compute_lock.begin()
        self._helper = helper

    def begun(self, replaying: Replaying) -> None:
        if self._helper is not None:
            threads.start(self._helper, (replaying,), name="swift-help")

    @property
    def compute_lock(self) -> ComputeLock:
        return self._runtime.compute_lock

    def side_group(self, replaying: Replaying, name: str, ranks: Sequence[int]) -> InnerGroup:
        """A group of some ranks for the time of a replay; see :meth:`Generations.side_group`."""
        return self._runtime.generations.side_group(name, ranks, replaying.generation)

    def drop_side(self, inner: InnerGroup) -> None:
        self._runtime.generations.drop_side(inner)

    # -- what the ranks agree to keep of the log ----------------------------------------------------

    def mark(self) -> None:
        """Tell all ranks, by an all-reduce on the default group, that this one has published a step boundary, and which
        checkpoint it knows to be committed. Call it right after the boundary. Its result is awaited in the next call
        only, which drops from the logs what all ranks have left behind.
        """
        if self._mark is not None:
            work, said, boundary = self._mark
            work.wait()
            values = said.tolist()
            self._log.committed(values[0])
            if self._budget:
                self._share(values[1 : 1 + self._world_size], values[1 + self._world_size :], boundary)
        newest = torch.tensor([self._newest_boundary(), *self._report()])
        with self._runtime.unchecked():  # a replacement may know of a newer one, and has logged something else
            work = dist.all_reduce(newest, op=dist.ReduceOp.MAX, async_op=True)
        self._mark = work, newest, self._runtime.boundary

    def _report(self) -> list[int]:
        """What every rank keeps and has logged in bytes, as far as this one knows: its own, 0 for others."""
        if not self._budget:
            return []
        if (due := self._due_boundary()) > self._seen_due:
            self._seen_due = due
            self._log.checkpoint_due()
            self.pressed, self.presses = self.presses, False
        kept, logged = [0] * self._world_size, [0] * self._world_size
        kept[self._rank], logged[self._rank] = self._log.keep()
        return kept + logged

    def _share(self, kept: list[int], logged: list[int], boundary: int) -> None:
        """Take this rank's lease; see whether logs, measured at ``boundary``, need a checkpoint."""
        self._log.lease(log_budget.leases(kept, self._budget)[self._rank])
        if self._rank or boundary < self._due_boundary():
            return
        batches = boundary - self._seen_due
        advice = log_budget.advice(sum(logged), batches, self._budget)
        self.presses = advice is Advice.CHECKPOINT
        if advice is Advice.MORE:
            least = sum(logged) * log_budget.PARTS * log_budget.FEWEST_BATCHES // max(1, batches)
            console_once(
                "log budget",
                f"log.budget_bytes={self._budget} is too small: {batches} batch(es) log a third of it, and no "
                "checkpoint is written so soon. When it is full, messages wait in memory, up to log.ring_bytes; then "
                f"nothing is logged until the next checkpoint. Set it to {least} at least, or log less (log.groups)",
            )
