"""Which survivor takes another stage's place, so that losses are spread as they cost least.

Two losses of one stage can cost far more than one loss in each of two stages. A survivor of a stage that can do without
it copies the state of the poorer stage from a peer there and takes a lost place. The published system does this by
dynamic programming ("failure normalization"); its recurrence is not public, this one is ours:

    best[s][f] = min over k of  combine(best[s - 1][f - k], cost(s, k), moves(s, k)),     k <= pipelines - 1

where f losses are put into stages 0..s, k of them into stage s, the costs combine by their maximum and moves add up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shared_core.errors import ConfigError
from shared_core.schedule.problem import Variant
from shared_core.schedule.routing import survivors
from shared_core.schedule.schedule import Kind, Topology, Worker
from shared_core.schedule.timing import Times


@dataclass(frozen=True)
class Move:
    """A survivor that takes a lost place of another stage.

    Attributes:
        source: its place until now, which is then lost.
        target: its place from now on.
    """

    source: Worker
    target: Worker


@dataclass(frozen=True)
class Normalised:
    """Losses after the moves.

    Attributes:
        lost: places without a worker after the moves, in order.
        moves: who moves.
        cost: expected slots or period after the moves, by the closed forms.
        before: the same without moves.
        moving: time that the moves take, one after the other.
    """

    lost: tuple[Worker, ...]
    moves: tuple[Move, ...]
    cost: float
    before: float
    moving: float


def normalise(
    topology: Topology,
    lost: Collection[Worker],
    *,
    times: Times | None = None,
    variant: Variant = Variant.STAGGERED,
    moving: Sequence[float] = (0.0,),
    iterations: float = math.inf,
) -> Normalised:
    """The moves with the least total time.

    Args:
        topology: shape of the job.
        lost: places without a worker.
        times: durations.
        variant: of the plan that will be run.
        moving: time to copy the state of each stage; a single entry holds for all.
        iterations: how many will be run until newcomers come. The total time is that of these iterations and of the
            moves; infinite: the fastest iteration, and among those the cheapest moves.

    Raises:
        ConfigError: a stage has nobody left, or ``moving`` has a wrong length.
    """
    times = Times() if times is None else times
    gone = set(lost)
    survivors(topology, gone)
    if len(moving) not in (1, topology.stages):
        raise ConfigError(f"moving needs 1 value or one for each of {topology.stages} stages, got {len(moving)}")
    copy = [moving[0 if len(moving) == 1 else s] for s in range(topology.stages)]
    have = [sum(worker.stage == s for worker in gone) for s in range(topology.stages)]
    most = min(topology.pipelines - 1, len(gone))
    costs = [[stage_cost(topology, times, variant, s, k) for k in range(most + 1)] for s in range(topology.stages)]

    # States: losses put so far -> those choices (highest cost, time of moves, moves, losses a stage) no other beats.
    states: dict[int, list[tuple[float, float, int, tuple[int, ...]]]] = {0: [(0.0, 0.0, 0, ())]}
    for s in range(topology.stages):
        following: dict[int, list[tuple[float, float, int, tuple[int, ...]]]] = {}
        for put, choices in states.items():
            for k in range(min(most, len(gone) - put) + 1):
                filled = max(0, have[s] - k)
                following.setdefault(put + k, []).extend(
                    (max(worst, costs[s][k]), spent + filled * copy[s], moves + filled, (*chosen, k))
                    for worst, spent, moves, chosen in choices
                )
        states = {put: _undominated(choices) for put, choices in following.items()}
    if math.isinf(iterations):
        best = min(states[len(gone)])
    else:
        best = min(states[len(gone)], key=lambda choice: (choice[0] * iterations + choice[1], choice))
    before = max(costs[s][have[s]] for s in range(topology.stages))
    after, moves = _places(topology, gone, have, best[3])
    return Normalised(after, moves, best[0], before, best[1])


def stage_cost(topology: Topology, times: Times, variant: Variant, stage: int, losses: int) -> float:
    """Slots, or the period if staggered, with so many losses at one stage and none at others, by the closed forms.

    With r micro-batches at the survivor that has most of them: the way to the stage, r forwards and backwards, and
    (coupled) the way back. Staggered: r forwards and backwards and the optimizer. Never less than without a loss.
    """
    at = [times.at(Worker(0, s)) for s in range(topology.stages)]
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
    if not losses:
        return healthy
    share = count + math.ceil(losses * count / (topology.pipelines - losses))
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
    topology: Topology, gone: set[Worker], have: Sequence[int], want: Sequence[int]
) -> tuple[tuple[Worker, ...], tuple[Move, ...]]:
    """Who moves where. Sources are taken from pipelines with the fewest losses, so that traffic is spread."""
    after = set(gone)
    targets = [
        worker
        for s in range(topology.stages)
        for worker in sorted(worker for worker in gone if worker.stage == s)[: max(0, have[s] - want[s])]
    ]
    moves = []
    for s in range(topology.stages):
        for _ in range(want[s] - have[s]):
            target = targets.pop(0)
            there = [Worker(d, s) for d in range(topology.pipelines) if Worker(d, s) not in after]
            source = min(there, key=lambda place: (sum(one.pipeline == place.pipeline for one in after), place))
            after.remove(target)
            after.add(source)
            moves.append(Move(source, target))
    return tuple(sorted(after)), tuple(moves)
