"""The communication of a process, as the rest of the worker sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

from shared_core.worker.comm.connections import Connections
from shared_core.worker.comm.generations import Generations
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.comm.groups import Groups, GroupState
from shared_core.worker.comm.listener import Listener
from shared_core.worker.comm.op import Op
from shared_core.worker.comm.operations import Operations
from shared_core.worker.comm.results import Results
from shared_core.worker.comm.state import SharedState
from shared_core.worker.comm.suspicion import Suspicion
from shared_core.worker.comm.top_marks import TopMarks
from shared_core.worker.messages.disk_log import DiskLog
from shared_core.worker.messages.group_log import BufferPool, Logged

#: Longest that an operation of a side group may take, unless something else is said: a loss ends it at once.
_FOREVER = timedelta(days=10)


class Runtime(SharedState):
    """One per process.

    Args:
        rank: logical rank.
        world_size: number of logical ranks.
        listener: what is told, and asked, the rest of the worker.
        disk: the log on disk.
        connect_timeout_s: longest time to connect the sockets of a group.
        wait_timeout_s: longest wait for a member of a group in a recovery.
        checksums: whether inputs are summed and published.
        log_spill_bytes: memory above which results are spilled; 0: a default, until it is known what is trained.
        marks: which batch tops the ranks have published; None where they are on several machines.

    Attributes:
        results: the logs.
        groups: by name.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        listener: Listener,
        disk: DiskLog,
        *,
        connect_timeout_s: float,
        wait_timeout_s: float,
        checksums: bool,
        log_spill_bytes: int = 0,
        marks: TopMarks | None = None,
    ) -> None:
        super().__init__(
            rank,
            world_size,
            listener,
            connect_timeout_s=connect_timeout_s,
            wait_timeout_s=wait_timeout_s,
            checksums=checksums,
        )
        groups = self._groups = Groups(self)
        self.groups: Mapping[str, GroupState] = groups.by_name
        self.disk = disk
        self.results = Results(self, groups, disk, BufferPool(), log_spill_bytes or 64 << 20, marks)
        self._suspicion = Suspicion(self, groups)
        self._operations = Operations(self, groups, self.results, self._suspicion)
        self._connections = Connections(self, groups)
        self._generations = Generations(self, groups, self._connections, self._operations)

    # -- groups ------------------------------------------------------------------------------------

    @property
    def world(self) -> GroupState | None:
        """The default group; None before it is made."""
        return self._groups.world

    def new_group(self, name: str, rank: int, size: int, ranks: Sequence[int], timeout: timedelta) -> GroupState:
        """A group that is not known to others yet; see :meth:`add_group`."""
        suspect, pool = self._suspicion.suspect, self.results.pool
        return GroupState(
            name, rank, size, tuple(ranks), timeout, state=self, disk=self.disk, pool=pool, suspect=suspect
        )

    def add_group(self, group: GroupState) -> None:
        """Register a group and, when a generation is live, connect it."""
        self._generations.add_group(group)

    def called(self, group: GroupState) -> str:
        """The group in the user's words."""
        return self._groups.called(group)

    def longest_s(self, group: GroupState) -> float:
        """How long a member that was never lost is waited for, in seconds: as long as torch does, at least."""
        return self._groups.longest_s(group)

    def inner_backend(self, group: GroupState) -> Any:
        """The inner gloo backend, waiting for one while a recovery runs."""
        return self._connections.backend(group)

    def side_group(
        self,
        name: str,
        ranks: Sequence[int],
        generation: int,
        *,
        attempt: int | None = None,
        operation_timeout: timedelta = _FOREVER,
    ) -> InnerGroup:
        """A group of some ranks beside those of the program; see :meth:`Connections.side_group`."""
        return self._connections.side_group(
            name, ranks, generation, attempt=attempt, operation_timeout=operation_timeout
        )

    def drop_side(self, inner: InnerGroup) -> None:
        """Cut a side group and forget it."""
        self._connections.drop_side(inner)

    # -- operations --------------------------------------------------------------------------------

    def submit(self, group: GroupState, op: Op, inputs: Sequence[torch.Tensor]) -> None:
        """Issue, serve or queue an operation; see :meth:`Operations.submit`."""
        self._operations.submit(group, op, inputs)

    def scripted(self, results: Iterable[list[torch.Tensor]]) -> AbstractContextManager[None]:
        """The next operations in here get these results, whatever their place."""
        return self._operations.scripted(results)

    def logged(self, group: GroupState, seq: int) -> Logged:
        """What was called as operation ``seq`` and what it gave; see :meth:`Results.logged`."""
        return self.results.logged(group, seq)

    def overdue(self, error: Exception, group: GroupState, call: str) -> Exception:
        """What to raise for an operation that failed although nobody was lost."""
        return self._suspicion.overdue(error, group, call)

    # -- generations -------------------------------------------------------------------------------

    def new_inner(self, group: GroupState, generation: int, attempt: int) -> InnerGroup:
        """Fresh connections for a group, not yet used by it; see :meth:`Connections.new_inner`."""
        return self._connections.new_inner(group, generation, attempt)

    def break_off(self) -> None:
        """A rank is lost: cut every connection; see :meth:`Generations.break_off`."""
        self._generations.break_off()

    def go_live(
        self,
        generation: int,
        world_inner: InnerGroup | None,
        redo: Mapping[str, set[int]],
        received: Mapping[str, dict[str, int]],
    ) -> None:
        """Begin a generation; see :meth:`Generations.go_live`."""
        self._generations.go_live(generation, world_inner, redo, received)

    def under_way(self) -> str:
        """An operation among several ranks that is not finished, in words; empty if there is none."""
        return self._operations.under_way()

    def withdraw(self) -> tuple[GroupState, Op] | None:
        """Take back the only operation under way; see :meth:`Operations.withdraw`."""
        return self._operations.withdraw()

    def call_again(self, group: GroupState, op: Op) -> None:
        """Issue an operation that was withdrawn."""
        self._operations.call_again(group, op)

    # -- figures -----------------------------------------------------------------------------------

    @property
    def served_operations(self) -> int:
        """How many operations were served from logs."""
        return self._operations.served

    def log_bytes(self) -> int:
        """Bytes of memory that the logs hold now."""
        return self._groups.log_bytes()
