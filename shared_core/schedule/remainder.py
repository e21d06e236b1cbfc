"""Re-planning inside a running iteration: survivors keep what they did, and peers repeat what failed workers did."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from shared_core.schedule.greedy import greedy
from shared_core.schedule.planner import IterationPlan
from shared_core.schedule.problem import NO_LIMIT, Memory, Problem
from shared_core.schedule.routing import Route, survivors
from shared_core.schedule.schedule import Action, Kind, PlannedWorker, Schedule
from shared_core.schedule.timing import Times, simulate

#: Actions that the greedy may place: this planning is on the way of a recovery.
EFFORT = 4_000

Executed = Mapping[PlannedWorker, tuple[Action, ...]]


@dataclass(frozen=True)
class Remainder:
    """The rest of an iteration in which workers failed.

    Attributes:
        plan: rows of the survivors from here on; its times are counted from the failure.
        done: what was executed before and need not be done again: by survivors, and by failed workers of stages that
            have their sum of gradients.
        extra: predicted time that the iteration takes longer than it would have without the failure.
    """

    plan: IterationPlan
    done: Executed
    extra: float


def replan(
    plan: IterationPlan,
    progress: Mapping[PlannedWorker, int],
    failed: Collection[PlannedWorker],
    *,
    times: Times | None = None,
    measured: Times | None = None,
    before: Executed | None = None,
    summed: Collection[int] = (),
    memory: Memory = NO_LIMIT,
    effort: int = EFFORT,
) -> Remainder:
    """Plan the rest of an iteration after a failure.

    What a failed worker had accumulated is gone: all its micro-batches, its own and those that it computed for others,
    pass its stage again at peers. A survivor that has not used a result of it yet waits for the peer's.

    Where a survivor has the stage's sum of gradients, the failed worker's are in it. Then a micro-batch passes that
    stage again only for the neighboring stages: where one of them needs a result that only the failed worker had.

    Args:
        plan: the plan under way; after an earlier failure of the same iteration, the plan of that ``Remainder``.
        progress: how many actions of its row each worker has finished.
        measured: durations that ``extra`` is computed with; ``times`` where left out.
        before: ``done`` of the earlier ``Remainder``, if there was one.
        summed: stages whose sum a survivor has; those at which one has stepped count anyway.

    Raises ConfigError if a stage has nobody left, InvalidSchedule if no order fits into the memory.
    """
    times = Times() if times is None else times
    gone = tuple(sorted({*plan.failed, *failed}))
    survivors(plan.topology, gone)
    rows, earlier = plan.schedule.rows, before or {}
    finished = dict(earlier) | {
        worker: (*earlier.get(worker, ()), *row[: progress.get(worker, 0)]) for worker, row in rows.items()
    }
    done = {worker: actions for worker, actions in finished.items() if worker not in gone}
    stepped = {*summed, *(worker.stage for worker, actions in done.items() if _has_stepped(actions))}
    again = _moved(plan, failed, stepped)
    left = [action for worker in done for action in rows.get(worker, ())[progress.get(worker, 0) :]]
    again += _for_neighbors(plan, again, left, stepped, gone)
    repeated = set(again)
    kept = {
        worker: tuple(one for one in actions if (one.pipeline, one.stage, one.micro_batch) not in repeated)
        for worker, actions in finished.items()
        if worker in gone and worker.stage in stepped
    }
    route = dict(plan.route) | _deal_again(plan, again, done, gone, times)
    problem = Problem(
        plan.topology, times, plan.variant, frozenset(gone), route, memory, plan.ordered, done={**done, **kept}
    )
    found = greedy(problem, effort)
    rest = {worker: row[:-1] if _has_stepped(done[worker]) else row for worker, row in found.schedule.rows.items()}
    schedule = Schedule(rest)
    old = Schedule({worker: row[progress.get(worker, 0) :] for worker, row in rows.items()})
    clock = times if measured is None else measured
    without = simulate(old, clock, done=[one for actions in finished.values() for one in actions])
    timeline = found.timeline
    there = [one for actions in (*done.values(), *kept.values()) for one in actions]
    slots = timeline.slots if measured is None else simulate(schedule, clock, done=there).slots
    new = replace(
        plan,
        failed=gone,
        schedule=schedule,
        route=route,
        slots=timeline.slots,
        period=timeline.period,
        bound=found.bound,
        solver="greedy",
        optimal=found.optimal,
    )
    return Remainder(new, {**done, **kept}, slots - without.slots)


def _moved(plan: IterationPlan, failed: Collection[PlannedWorker], stepped: set[int]) -> list[tuple[int, int, int]]:
    """(pipeline, stage, micro-batch) of everything that failed workers computed or were to compute."""
    topology = plan.topology
    return [
        (d, s, j)
        for s in sorted({worker.stage for worker in failed} - stepped)
        for d in range(topology.pipelines)
        for j in range(topology.micro_batches)
        if plan.host(d, s, j) in failed
    ]


def _for_neighbors(
    plan: IterationPlan,
    again: list[tuple[int, int, int]],
    left: Iterable[Action],
    summed: Collection[int],
    gone: Collection[PlannedWorker],
) -> list[tuple[int, int, int]]:
    """What passes ``summed`` stages again, because ``again`` and ``left`` need a result of failed workers."""
    found = set[tuple[int, int, int]]()
    waiting = [*left, *(Action(s, kind, j, d) for d, s, j in again for kind in (Kind.F, Kind.B))]
    steps = {Kind.F: -1, Kind.I: 1, Kind.B: 1}
    while waiting:
        stage, kind, j, d = waiting.pop()
        source = (d, stage + steps.get(kind, 0), j)
        if source[1] == stage or source[1] not in summed or source in found or plan.host(*source) not in gone:
            continue
        found.add(source)  # forward and backward: then who makes it again needs no other plan if more fails
        waiting += [Action(source[1], each, j, d) for each in (Kind.F, Kind.B)]
    return sorted(found, key=lambda place: (place[1], place[0], place[2]))


def _deal_again(
    plan: IterationPlan,
    again: list[tuple[int, int, int]],
    done: Executed,
    gone: tuple[PlannedWorker, ...],
    times: Times,
) -> Route:
    """Each to the peer that has least left to do; ``ordered``, all of a pipeline to one."""
    left: dict[PlannedWorker, float] = {}
    for worker, row in plan.schedule.rows.items():
        if worker not in gone:
            at, ran = times.at(worker), set(done[worker])
            left[worker] = sum(at.of(action.kind) for action in row if action not in ran)
    route: Route = {}
    hosts: dict[tuple[int, int], PlannedWorker] = {}
    for d, s, j in again:
        peers = [worker for worker in left if worker.stage == s]
        host = hosts.get((d, s)) if plan.ordered else None
        if host is None:
            host = min(peers, key=lambda worker: (left[worker], worker))
        route[d, s, j] = hosts[d, s] = host
        at = times.at(host)
        left[host] += at.forward + at.backward_input + at.backward_weight
    return route


def _has_stepped(actions: tuple[Action, ...]) -> bool:
    return any(one.kind is Kind.OPT for one in actions)
