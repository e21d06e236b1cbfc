"""Which survivor takes another stage's place, so that failures are spread as they cost least.

Two failures of one stage can cost far more than one failure in each of two stages. A survivor of a stage that can spare
it copies the state of the poorer stage from a peer there and takes a failed place. ReCycle does this by dynamic
programming ("failure normalization"); its recurrence is not public, this one is ours:

    best[s][f] = min over k of  combine(best[s - 1][f - k], cost(s, k), moves(s, k)),     k <= pipelines - 1

where f failures are put into stages 0..s, k of them into stage s, the costs combine by their maximum and moves add up.
When to move is decided without knowing how long the failures last: see :func:`steps_to_wait`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shared_core.errors import ConfigError
from shared_core.schedule.problem import Variant, survivors
from shared_core.schedule.schedule import Kind, PlannedWorker, Topology
from shared_core.schedule.timing import EQUAL_SLOTS, Times

#: Least share by which a move must shorten an iteration: no measured time is better known.
LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Move:
    """A survivor that takes a failed place of another stage; nobody is at ``source`` then."""

    source: PlannedWorker
    target: PlannedWorker


@dataclass(frozen=True)
class Normalised:
    """Failures after the moves.

    Attributes:
        failed: places without a worker after the moves, in order.
        cost: expected slots or period after the moves, by the closed forms.
        before: the same without moves.
        moving: time that the moves take, one after the other.
    """

    failed: tuple[PlannedWorker, ...]
    moves: tuple[Move, ...]
    cost: float
    before: float
    moving: float


def normalise(
    topology: Topology,
    failed: Collection[PlannedWorker],
    *,
    times: Times = EQUAL_SLOTS,
    variant: Variant = Variant.STAGGERED,
    moving: Sequence[float] = (0.0,),
    ordered: bool = False,
    able: Collection[PlannedWorker] | None = None,
    moved: Sequence[Move] = (),
) -> Normalised:
    """The moves that make an iteration fastest, and among those the cheapest.

    Args:
        failed: places without a worker.
        moving: time to copy the state of each stage; a single entry holds for all.
        ordered: all micro-batches of a failed worker go to one peer.
        able: who may move; None for everybody.
        moved: moves made already for some of these failures; they stay where they are part of a best choice.

    Raises ConfigError if a stage has nobody left, or ``moving`` has a wrong length.
    """
    gone = set(failed)
    survivors(topology, gone)
    if len(moving) not in (1, topology.stages):
        raise ConfigError(f"moving needs 1 value or one for each of {topology.stages} stages, got {len(moving)}")
    copy = [moving[0 if len(moving) == 1 else s] for s in range(topology.stages)]
    have = [sum(worker.stage == s for worker in gone) for s in range(topology.stages)]
    most = min(topology.pipelines - 1, len(gone))
    costs = [
        [stage_cost(topology, times, variant, s, k, ordered) for k in range(most + 1)] for s in range(topology.stages)
    ]
    movable = {worker for worker in topology.workers() if worker not in gone and (able is None or worker in able)}
    limits = [min(most, have[s] + sum(worker.stage == s for worker in movable)) for s in range(topology.stages)]

    # States: failures put so far -> choices that no other beats (highest cost, time of moves, moves, failures a stage).
    states: dict[int, list[tuple[float, float, int, tuple[int, ...]]]] = {0: [(0.0, 0.0, 0, ())]}
    for s in range(topology.stages):
        following: dict[int, list[tuple[float, float, int, tuple[int, ...]]]] = {}
        for put, choices in states.items():
            for k in range(min(limits[s], len(gone) - put) + 1):
                filled = max(0, have[s] - k)
                following.setdefault(put + k, []).extend(
                    (max(worst, costs[s][k]), spent + filled * copy[s], moves + filled, (*chosen, k))
                    for worst, spent, moves, chosen in choices
                )
        states = {put: _undominated(choices) for put, choices in following.items()}
    best = min(states[len(gone)])
    before = iteration_cost(topology, gone, times, variant, ordered)
    after, moves = _places(gone, movable, best[3], moved)
    return Normalised(after, moves, best[0], before, best[1])


def iteration_cost(
    topology: Topology, failed: Collection[PlannedWorker], times: Times, variant: Variant, ordered: bool = False
) -> float:
    """Expected slots or period of an iteration without some places, by the closed forms."""
    have = [sum(worker.stage == s for worker in failed) for s in range(topology.stages)]
    return max(stage_cost(topology, times, variant, s, k, ordered) for s, k in enumerate(have))


def steps_to_wait(before: float, after: float, cost: float) -> int | None:
    """Iterations to wait before failures are spread; None for ever, where it does not pay.

    Nobody knows how long failures last. Whoever waits until it has lost what the moves cost, and moves then, never
    loses more than twice what it would with that knowledge (the ski-rental rule). ``before`` and ``after`` are times of
    an iteration without and with the moves, ``cost`` that of the moves, in the same unit.
    """
    gain = before - after
    return math.ceil(cost / gain) if gain > LEAST_GAIN * before else None


def stage_cost(
    topology: Topology, times: Times, variant: Variant, stage: int, failures: int, ordered: bool = False
) -> float:
    """Slots, or the period if staggered, with so many failures at one stage and none at others, by the closed forms.

    With r micro-batches at the survivor that has most of them: the way to the stage, r forwards and backwards, and
    (coupled) the way back. Staggered: r forwards and backwards and the optimizer. Never less than without a failure.
    """
    at = [times.of_stage(s) for s in range(topology.stages)]
    count = topology.micro_batches
    heads, tails = [0.0], [0.0]
    for one in at[:-1]:
        heads.append(heads[-1] + one.forward + times.communication)
        tails.append(tails[-1] + one.of(Kind.B) + times.communication)
    optimizer = max(one.optimizer for one in at)
    whole = [
        head + tail + count * (one.forward + one.of(Kind.B)) for head, tail, one in zip(heads, tails, at, strict=True)
    ]
    healthy = max(whole) + (optimizer if variant is Variant.STAGGERED else 0.0)
    if not failures:
        return healthy
    peers = topology.pipelines - failures
    share = count + (math.ceil(failures / peers) * count if ordered else math.ceil(failures * count / peers))
    one = at[stage]
    if variant is Variant.COUPLED:
        return max(healthy, heads[stage] + share * (one.forward + one.of(Kind.B)) + tails[stage])
    work = share * (one.forward + one.backward_input + one.backward_weight)
    return max(healthy, work + (one.optimizer if variant is Variant.STAGGERED else heads[stage]))


def _undominated(
    choices: list[tuple[float, float, int, tuple[int, ...]]],
) -> list[tuple[float, float, int, tuple[int, ...]]]:
    kept: list[tuple[float, float, int, tuple[int, ...]]] = []
    for choice in sorted(choices):
        if not kept or choice[1:3] < kept[-1][1:3]:
            kept.append(choice)
    return kept


def _places(
    gone: set[PlannedWorker], movable: set[PlannedWorker], want: Sequence[int], moved: Sequence[Move]
) -> tuple[tuple[PlannedWorker, ...], tuple[Move, ...]]:
    """Who moves where. Sources are taken from pipelines with the fewest failures, so that traffic is spread."""
    after, moves = set(gone), list[Move]()

    def excess(stage: int) -> int:
        return sum(worker.stage == stage for worker in after) - want[stage]

    def make(move: Move) -> None:
        after.remove(move.target)
        after.add(move.source)
        moves.append(move)

    for move in moved:
        fits = move.target in after and move.source in movable - after
        if fits and excess(move.target.stage) > 0 and excess(move.source.stage) < 0:
            make(move)
    for stage in range(len(want)):
        while excess(stage) < 0:
            there = [worker for worker in movable - after if worker.stage == stage]
            source = min(there, key=lambda place: (sum(one.pipeline == place.pipeline for one in after), place))
            make(Move(source, min(worker for worker in after if excess(worker.stage) > 0 and worker in gone)))
    return tuple(sorted(after)), tuple(moves)
