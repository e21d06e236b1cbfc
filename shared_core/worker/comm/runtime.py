"""The communication of a process, as the rest of the worker sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from shared_core.errors import SwiftError
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.comm.generations import Generations
from shared_core.worker.comm.groups import Groups, GroupState
from shared_core.worker.comm.op import Op
from shared_core.worker.comm.operations import Operations
from shared_core.worker.comm.other_threads import OtherThreads
from shared_core.worker.comm.places import GroupPlaces
from shared_core.worker.comm.results import BoundaryMarks, CollectiveResults
from shared_core.worker.comm.state import OperationListener, SharedState
from shared_core.worker.link import JobStore
from shared_core.worker.messages.disk_log import DiskLog
from shared_core.worker.messages.group_log import BufferPool
from shared_core.worker.state.publications import SharedMemoryPublisher

#: Memory above which results are spilled, in bytes, until it is known what is trained.
_LIMIT = 64 << 20


class Runtime(SharedState):
    """One per process.

    Args:
        marks: which step boundaries the ranks have published; None where they are on several machines.

    Attributes:
        others: collectives of other threads than the program's.
    """

    def __init__(
        self,
        env: WorkerEnv,
        listener: OperationListener,
        publisher: SharedMemoryPublisher,
        store: JobStore,
        disk: DiskLog,
        marks: BoundaryMarks | None,
    ) -> None:
        super().__init__(env, listener, publisher, store)
        groups = self.groups = Groups(self)
        self.disk = disk
        self._places = env.job_dir / f"places{env.restart}.{env.world_size}"
        limit = env.config.log.spill_bytes or _LIMIT
        self.results = CollectiveResults(self, groups, disk, BufferPool(), limit, marks)
        self.others = OtherThreads(self)
        self.operations = Operations(self, groups, self.results, self.others)
        self.generations = Generations(self, groups, self.operations, self.others, self.compare_places)

    def passed_boundary(self, boundary: int) -> None:
        with self.lock:
            self.others.at_boundary()
            super().passed_boundary(boundary)

    def in_copy(self) -> None:
        """In a forked copy of the process, which holds the lock: as in a replacement that has made these groups."""
        self.begin_again()
        for group in self.groups.all():
            group.begin_again()
        self.generations.begin_again()

    def computes_again(
        self,
        listener: OperationListener,
        answer: Callable[[GroupState, Op, Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> None:
        """In a forked copy that computes beside this worker: operations get ``answer(group, op, inputs)``, and nothing
        goes to other ranks.
        """
        self.listener = listener
        self.operations.answer_all(answer)
        self.ended = SwiftError("a copy of a worker sends nothing")

    @property
    def addresses(self) -> frozenset[str]:
        """Of the connections of all groups, at either end."""
        inners = [group.inner for group in self.groups.all() if group.inner is not None]
        return frozenset().union(*(inner.addresses for inner in inners))

    def compare_places(self, group: GroupState) -> None:
        """From now on members of this group on this machine see from where the others call its operations. Raises
        OutOfResources if there is no room for the shared memory.
        """
        if group.size > 1:
            self._places.mkdir(mode=0o700, exist_ok=True)
            group.places = GroupPlaces(self._places / f"{group.id:08x}", group.ranks, group.rank)

    @property
    def world(self) -> GroupState | None:
        return self.groups.world

    def destroyed(self, group: GroupState) -> None:
        """The program has destroyed a group. The default one stays as long as the worker."""
        with self.lock:
            if group is not self.world:
                group.destroy(self.boundary)

    def new_group(self, name: str, rank: int, size: int, ranks: Sequence[int], timeout: timedelta) -> GroupState:
        """A group that is not known to others yet; see :meth:`Generations.add_group`. ``ranks`` are global."""
        suspect, pool = self.operations.suspect, self.results.pool
        return GroupState(
            name,
            rank,
            size,
            tuple(ranks),
            timeout,
            state=self,
            disk=self.disk,
            pool=pool,
            suspect=suspect,
            others=self.others,
        )
