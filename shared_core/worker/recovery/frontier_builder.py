"""This rank's frontiers, and waits for keys that ranks set in a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shared_core.protocol.frontier import Frontier, GroupFrontier, StepBoundary
from shared_core.protocol.generation import generation_key
from shared_core.transport.store import Store
from shared_core.waiting import wait_for
from shared_core.worker.comm.groups import GroupState
from shared_core.worker.messages.archive import Archive
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.donor import Donor
from shared_core.worker.recovery.listener import RecoveryListener


class FrontierBuilder:
    """Makes this rank's frontiers, and waits for keys that ranks set. In a replacement ``boundaries`` are the step
    boundaries that the failed worker has published, or that are in a checkpoint.
    """

    def __init__(self, context: Context, donor: Donor, listener: RecoveryListener) -> None:
        self._env, self._runtime, self._lifecycle = context.env, context.runtime, context.lifecycle
        self._donor, self._listener = donor, listener
        self.boundaries: tuple[StepBoundary, ...] = ()

    def front(self, boundaries: Sequence[StepBoundary] | None = None) -> Frontier:
        """Where this rank stands. Where replacements are admitted, with the step ``boundaries`` that it has passed."""
        front = self._of_replacement() if self._lifecycle.joins else self._of_survivor()
        return front if boundaries is None else replace(front, boundaries=tuple(boundaries))

    def wait_limit(self, generation: int) -> tuple[float, str]:
        """How long others are waited for in a generation, in seconds, and the name of that bound."""
        limit_s, world = self._runtime.wait_timeout_s, self._runtime.world
        if generation == 0 and world is not None and self._runtime.groups.longest_s(world) > limit_s:
            # Nobody failed: the scripts come here when they do, as without this product.
            return self._runtime.groups.longest_s(world), "time-out of the process group"
        return limit_s, "detection.wait_timeout_s"

    def collect(self, store: Store, name: str, ranks: Sequence[int], generation: int, what: str) -> list[bytes]:
        """Block until ``ranks`` have set ``name`` in a generation. Returns the values in their order. ``what``: the
        ranks are to do, for the line that a long wait prints.

        Raises:
            GenerationAbandoned: if the generation ends meanwhile.
            WaitTimeout: if one does not come.
        """
        keys = {rank: f"{generation_key(generation)}/{name}/{rank}" for rank in ranks}
        limit_s, bound = self.wait_limit(generation)
        given_up = lambda: self._lifecycle.ended(generation)  # noqa: E731
        wait_for(store, keys, given_up, limit_s, self._env.rank, what, bound=bound)
        return store.multi_get(list(keys.values()))

    def _of_replacement(self) -> Frontier:
        return Frontier(
            rank=self._env.rank,
            incarnation=self._env.incarnation,
            replacement=True,
            version=0,
            boundaries=self.boundaries,
        )

    def _of_survivor(self) -> Frontier:
        with self._runtime.lock:
            groups = {
                name: _group_front(group, self._runtime.disk.archive) for name, group in self._runtime.groups.items()
            }
        return Frontier(
            rank=self._env.rank,
            incarnation=self._env.incarnation,
            replacement=False,
            version=self._donor.version,
            boundaries=(),
            groups=groups,
            together=list(self._listener.together()),
            **self._donor.keeps,
        )


def _group_front(group: GroupState, archive: Archive | None) -> GroupFrontier:
    received, sent = group.channels.watermarks()
    entries = group.log.entries
    on_disk = archive.indices(group.name) if archive is not None else ()
    return GroupFrontier(
        ranks=group.members,
        next=group.next,
        done=group.done.to_json(),
        log=sorted({*(seq for seq, entry in entries.items() if entry.redo is None), *group.replay, *on_disk}),
        exclusive=[seq for seq, entry in entries.items() if entry.redo is not None],
        received=received,
        sent=sent,
        held=group.channels.held(),
        over=group.over,
    )
