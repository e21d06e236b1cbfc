"""When survivors move to other stages, and which: a pure function of what all have told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared_core.reroute.places import StagePlaces
from shared_core.reroute.planning import Plans
from shared_core.reroute.room import spare_bytes
from shared_core.reroute.step import HomeModel
from shared_core.reroute.times import second_updates
from shared_core.schedule.normalise import Move, iteration_cost, normalise, steps_to_wait
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import PlannedWorker, Topology
from shared_core.schedule.timing import Times

#: Multiple of the bytes of the other stage's state that a mover needs: for its gradients, and while they come.
_ROOM = 2


@dataclass(frozen=True)
class Due:
    """A change of who computes where: the step before which it is made, and all moves, those made already included."""

    step: int
    moves: tuple[Move, ...]


def due(
    topology: Topology,
    variant: Variant,
    ordered: bool,
    times: Times | None,
    gone: frozenset[PlannedWorker],
    moved: Sequence[Move],
    facts: Mapping[PlannedWorker, Mapping[str, int | None]],
    newest: int,
) -> Due | None:
    """Which change of who computes where is to be made, and when; None for no change.

    It is made where it pays, after as many steps as it takes to lose what it costs: nobody knows how long the failures
    last. It costs the copies, and a step's time, because all stand at the same step boundary. Who moves makes two
    updates in each step.

    Args:
        ordered: all micro-batches of a failed worker go to one peer.
        times: measured durations in seconds; None until there are some.
        facts: what each worker has told, by the place that belongs to it; see :func:`tell`.
        newest: newest step that anybody may have begun.
    """
    sizes = {worker.stage: told["state_bytes"] for worker, told in facts.items()}
    if times is None or not gone or len(sizes) < topology.stages or any(size is None for size in sizes.values()):
        return None
    state = [sizes[stage] or 0 for stage in range(topology.stages)]
    sent = max(told["sent_bytes"] or 0 for told in facts.values())
    copies = [size * times.communication / sent if sent else 0.0 for size in state]
    able = {worker for worker, told in facts.items() if (told["spare_bytes"] or 0) >= _ROOM * max(state)}
    found = normalise(
        topology, gone, times=times, variant=variant, moving=copies, ordered=ordered, able=able, moved=moved
    )
    if set(found.moves) == set(moved):
        return None
    vacant = (gone - {move.target for move in moved}) | {move.source for move in moved}
    second, later = (max(second_updates(times, some).values(), default=0.0) for some in (moved, found.moves))
    before = iteration_cost(topology, vacant, times, variant, ordered) + second
    new = sum(copies[move.target.stage] for move in found.moves if move not in moved)
    steps = steps_to_wait(before, found.cost + later, new + before)
    return None if steps is None else Due(newest + 1 + steps, found.moves)


def next_change(
    places: StagePlaces, planner: Plans, vacant: frozenset[PlannedWorker], views: Mapping[int, Any], newest: int
) -> Due | None:
    """:func:`due` for what all have told, by rank, with what :func:`tell` says as ``moving``."""
    homes = {places.home_rank(worker): worker for worker in places.topology.workers()}
    facts = {homes[rank]: view["moving"] for rank, view in views.items()}
    return due(
        places.topology,
        planner.variant,
        planner.ordered,
        planner.times,
        places.gone(vacant),
        places.moves,
        facts,
        newest,
    )


def tell(model: HomeModel, allowed: bool, sent_bytes: int) -> dict[str, int | None]:
    """What a worker tells the others for :func:`due`; ``sent_bytes`` of an activation that it sends, 0 for none."""
    size = model.state_bytes if allowed else None
    return {"state_bytes": size, "sent_bytes": sent_bytes, "spare_bytes": spare_bytes() if size is not None else 0}


def as_plain(moves: Sequence[Move]) -> list[list[list[int]]]:
    return [[list(move.source), list(move.target)] for move in moves]


def from_plain(data: Any) -> tuple[Move, ...]:
    return tuple(Move(PlannedWorker(*source), PlannedWorker(*target)) for source, target in data)
