"""Re-planning inside a running iteration: survivors keep what they did, and peers do again what was lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from shared_core.errors import Unsupported
from shared_core.schedule.check import NO_LIMIT, Memory
from shared_core.schedule.greedy import greedy
from shared_core.schedule.planner import IterationPlan
from shared_core.schedule.problem import Problem
from shared_core.schedule.routing import Route, survivors
from shared_core.schedule.schedule import Action, Kind, Schedule, Worker
from shared_core.schedule.timing import Times, simulate

#: Actions that the greedy may place: this planning is on the way of a recovery.
EFFORT = 4_000

Executed = Mapping[Worker, tuple[Action, ...]]


@dataclass(frozen=True)
class Remainder:
    """The rest of an iteration in which workers were lost.

    Attributes:
        plan: rows of the survivors from here on; its times are counted from the loss.
        done: what was executed before and need not be done again: by survivors, and by lost workers of stages that have
            stepped.
        extra: predicted time that the iteration takes longer than it would have without the loss.
    """

    plan: IterationPlan
    done: Executed
    extra: float


def replan(
    plan: IterationPlan,
    progress: Mapping[Worker, int],
    lost: Collection[Worker],
    *,
    times: Times | None = None,
    measured: Times | None = None,
    before: Executed | None = None,
    memory: Memory = NO_LIMIT,
    effort: int = EFFORT,
) -> Remainder:
    """Plan the rest of an iteration after a loss.

    What a lost worker had accumulated is gone: all its micro-batches, its own and those that it computed for others,
    pass its stage again at peers. A result of it that a survivor has not used yet is waited for from the peer.

    Args:
        plan: the plan under way; after an earlier loss of the same iteration, the plan of that ``Remainder``.
        progress: how many actions of its row each worker has finished.
        lost: workers lost now.
        times: durations.
        measured: durations that ``extra`` is reckoned with; ``times`` where left out.
        before: ``done`` of the earlier ``Remainder``, if there was one.
        memory: limits of the workers; what survivors hold counts.
        effort: actions that the greedy may place.

    Raises:
        ConfigError: a stage has nobody left.
        InvalidSchedule: no order fits into the memory.
        Unsupported: the optimizer of a lost worker's stage has stepped, and a result of that worker is still needed.
    """
    times = Times() if times is None else times
    gone = tuple(sorted({*plan.lost, *lost}))
    survivors(plan.topology, gone)
    rows, earlier = plan.schedule.rows, before or {}
    finished = dict(earlier) | {
        worker: (*earlier.get(worker, ()), *row[: progress.get(worker, 0)]) for worker, row in rows.items()
    }
    done = {worker: actions for worker, actions in finished.items() if worker not in gone}
    stepped = {worker.stage for worker, actions in done.items() if _has_stepped(actions)}
    kept = {worker: actions for worker, actions in finished.items() if worker in gone and worker.stage in stepped}
    again = _moved(plan, lost, stepped)
    route = dict(plan.route) | _deal_again(plan, again, done, gone, times)
    problem = Problem(
        plan.topology, times, plan.variant, frozenset(gone), route, memory, plan.ordered, done={**done, **kept}
    )
    found = greedy(problem, effort)
    rest = {worker: row[:-1] if _has_stepped(done[worker]) else row for worker, row in found.schedule.rows.items()}
    schedule = Schedule(rest)
    _refuse_stepped(schedule, kept)
    old = Schedule({worker: row[progress.get(worker, 0) :] for worker, row in rows.items()})
    clock = times if measured is None else measured
    without = simulate(old, clock, done=[one for actions in finished.values() for one in actions])
    timeline = found.timeline
    there = [one for actions in (*done.values(), *kept.values()) for one in actions]
    slots = timeline.slots if measured is None else simulate(schedule, clock, done=there).slots
    new = replace(
        plan,
        lost=gone,
        schedule=schedule,
        route=route,
        slots=timeline.slots,
        period=timeline.period,
        bound=found.bound,
        solver="greedy",
        optimal=found.optimal,
    )
    return Remainder(new, {**done, **kept}, slots - without.slots)


def _moved(plan: IterationPlan, lost: Collection[Worker], stepped: set[int]) -> list[tuple[int, int, int]]:
    """(pipeline, stage, micro-batch) of everything that lost workers computed or were to compute."""
    topology = plan.topology
    return [
        (d, s, j)
        for s in sorted({worker.stage for worker in lost} - stepped)
        for d in range(topology.pipelines)
        for j in range(topology.micro_batches)
        if plan.host(d, s, j) in lost
    ]


def _deal_again(
    plan: IterationPlan, again: list[tuple[int, int, int]], done: Executed, gone: tuple[Worker, ...], times: Times
) -> Route:
    """Each to the peer that has least left to do; ``ordered``, all of a pipeline to one."""
    left: dict[Worker, float] = {}
    for worker, row in plan.schedule.rows.items():
        if worker not in gone:
            at, ran = times.at(worker), set(done[worker])
            left[worker] = sum(at.of(action.kind) for action in row if action not in ran)
    route: Route = {}
    for d, s, j in again:
        peers = [worker for worker in left if worker.stage == s]
        host = route.get((d, s, j - 1)) if plan.ordered and j else None
        if host is None:
            host = min(peers, key=lambda worker: (left[worker], worker))
        route[d, s, j] = host
        at = times.at(host)
        left[host] += at.forward + at.backward_input + at.backward_weight
    return route


def _has_stepped(actions: tuple[Action, ...]) -> bool:
    return any(one.kind is Kind.OPT for one in actions)


def _refuse_stepped(schedule: Schedule, kept: Executed) -> None:
    """A stage that has stepped cannot compute a lost result again: its parameters are of the next iteration."""
    for worker in kept:
        for reader, row in schedule.rows.items():
            for action in row:
                gave = action.kind is Kind.F and reader.stage == worker.stage + 1
                gave |= action.kind in (Kind.I, Kind.B) and reader.stage == worker.stage - 1
                if gave and any(
                    one.micro_batch == action.micro_batch and one.pipeline == action.pipeline for one in kept[worker]
                ):
                    raise Unsupported(
                        f"stage {worker.stage} has stepped, and {reader} still needs a result of the lost {worker} for "
                        f"{action}: undo that step first, then plan again without it"
                    )
