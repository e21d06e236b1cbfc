"""The groups of a process, with their logs and channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta

from shared_core.errors import ConfigError
from shared_core.protocol.frontier import Done, StepBoundary
from shared_core.waiting import ranks_text
from shared_core.worker.comm.membership import Membership
from shared_core.worker.comm.op import Op
from shared_core.worker.comm.other_threads import OtherThreads
from shared_core.worker.comm.p2p import Channels
from shared_core.worker.comm.state import SharedState
from shared_core.worker.messages.disk_log import DiskLog
from shared_core.worker.messages.group_log import BufferPool, GroupLog, Logged


class GroupState(Membership):
    """What this rank knows of one group. The runtime's lock guards it.

    Attributes:
        next: sequence number of the next collective.
        done: finished collectives.
        pending: issued and not finished, by sequence number.
        replay: results to serve instead of running, by sequence number.
        destroyed_at: step boundary before the program destroyed it; -1 while it has not.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        ranks: tuple[int, ...],
        timeout: timedelta,
        *,
        state: SharedState,
        disk: DiskLog,
        pool: BufferPool,
        suspect: Callable[[Exception], None],
        others: OtherThreads,
    ) -> None:
        super().__init__(name, rank, size, ranks, timeout)
        self.channels = Channels(self, state, disk, suspect, others)
        self._pool = pool
        self.destroyed_at = -1
        self._begin()

    def _begin(self) -> None:
        self.log = GroupLog(self._pool)
        self.next = 0
        self.done = Done()
        self.pending: dict[int, Op] = {}
        self.replay: dict[int, Logged] = {}

    def begin_again(self) -> None:
        """In a forked copy of the process: nothing was called here, and nobody is connected."""
        inner, self.inner = self.inner, None
        if inner is not None:
            inner.abandon()
        self.inflight = 0
        self._begin()
        self.channels.begin_again()

    @property
    def over(self) -> bool:
        """The program has destroyed it and waits for nothing in it. Others may still need its log."""
        return self.destroyed_at >= 0 and not self.pending and not self.channels.awaited()

    def destroy(self, boundary: int) -> None:
        self.destroyed_at = boundary

    def start_from(self, boundary: StepBoundary) -> None:
        """Take the failed worker's counts at its step boundary."""
        self.next = boundary.groups.get(self.name, 0)
        self.done.upto = self.next
        self.channels.start_from(boundary.received.get(self.name, {}), boundary.sent.get(self.name, {}))


class Groups(dict[str, GroupState]):
    """By name, in the order they were made. Callers hold the lock where others may add one.

    Attributes:
        world: the default group; None before it is made.
        given: how often the program has given each name.
    """

    def __init__(self, state: SharedState) -> None:
        super().__init__()
        self._state = state
        self.given: Counter[str] = Counter()
        self.world: GroupState | None = None

    def all(self) -> list[GroupState]:
        return list(self.values())

    def add(self, group: GroupState) -> None:
        """Take in a new group. The first one is the default group. A name that was given before gets an apostrophe for
        each time. Raises ConfigError if the first one has not all ranks.
        """
        self.given[group.name] += 1  # destroyed and made again: others may still have the first one, or have it no more
        group.rename(group.name + "'" * (self.given[group.name] - 1))
        self[group.name] = group
        if self.world is not None:
            return
        if group.size != self._state.world_size:
            raise ConfigError(
                f"the first process group has {group.size} ranks, but the job has {self._state.world_size}; create "
                "the default group first"
            )
        self.world = group

    def drop(self, group: GroupState) -> None:
        """Let go of a group that was destroyed. Callers hold the lock."""
        del self[group.name]
        group.cut()

    def called(self, group: GroupState) -> str:
        """The group in the user's words."""
        return "the default group" if group is self.world else f"group {group.name!r} of {ranks_text(group.ranks)}"

    def longest_s(self, group: GroupState) -> float:
        """How long a member that never failed is waited for, in seconds: as long as torch does, at least."""
        return max(self._state.wait_timeout_s, group.timeout.total_seconds())

    def log_bytes(self) -> int:
        return sum(group.log.nbytes + group.channels.nbytes for group in self.values())
