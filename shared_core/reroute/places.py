"""Which worker computes at which place of a pipeline: its own, or that of a failed worker of another stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from shared_core.schedule.normalise import Move
from shared_core.schedule.schedule import PlannedWorker, Topology


class StagePlaces:
    """Who is where, the same at all workers that are there.

    A worker that has moved computes at the place of a failed one, and its own place counts as failed: so plans know
    failed places and no moves. ``home_rank`` gives the rank to which a place belongs.
    """

    def __init__(self, topology: Topology, rank_of: Callable[[PlannedWorker], int]) -> None:
        self.topology, self.home_rank = topology, rank_of
        self.moves: tuple[Move, ...] = ()

    def move(self, moves: Iterable[Move]) -> None:
        """From now on these workers, and no others, compute elsewhere."""
        self.moves = tuple(moves)

    def rank(self, place: PlannedWorker) -> int:
        return self.home_rank(next((move.source for move in self.moves if move.target == place), place))

    def workers(self) -> dict[int, PlannedWorker]:
        """The place at which each rank computes; of a failed rank whose place is taken, that same place."""
        homes = {self.home_rank(place): place for place in self.topology.workers()}
        return homes | {self.home_rank(move.source): move.target for move in self.moves}

    def vacant(self, ranks: Collection[int]) -> frozenset[PlannedWorker]:
        """Places at which none of ``ranks``, which are there, computes."""
        held = {place for rank, place in self.workers().items() if rank in ranks}
        return frozenset(place for place in self.topology.workers() if place not in held)

    def still(self, moves: Sequence[Move], ranks: Collection[int]) -> tuple[Move, ...]:
        """The moves that hold: of workers that are there, to places of workers that are not."""
        rank = self.home_rank
        return tuple(move for move in moves if rank(move.source) in ranks and rank(move.target) not in ranks)

    def vacant_after(self, moves: Sequence[Move], ranks: Collection[int]) -> frozenset[PlannedWorker]:
        after = StagePlaces(self.topology, self.home_rank)
        after.move(moves)
        return after.vacant(ranks)

    def gone(self, vacant: Collection[PlannedWorker]) -> frozenset[PlannedWorker]:
        """Places whose own workers have failed, from those at which nobody computes."""
        sources, targets = ({move.source for move in self.moves}, {move.target for move in self.moves})
        return (frozenset(vacant) - sources) | targets


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker is in a job. ``me`` is the place at which it computes, not the one that belongs to it."""

    me: PlannedWorker
    places: StagePlaces

    @property
    def topology(self) -> Topology:
        return self.places.topology

    @property
    def last(self) -> bool:
        return self.me.stage == self.topology.stages - 1
