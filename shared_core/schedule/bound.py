"""The least that any plan can take: what every worker must compute, between the first input it gets and what follows.

Of each worker three jobs are looked at: its forwards, its gradients of inputs, its gradients of weights. A job cannot
begin before its first input is there (its head), and something must follow at other workers when it has ended (its
tail). For any set of jobs of one worker the plan takes at least the least head, all their work and the least tail
(Carlier, "The one-machine sequencing problem", 1982). Memory and the order of messages are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import NamedTuple

from shared_core.schedule.problem import Problem, Variant
from shared_core.schedule.schedule import Kind, PlannedWorker
from shared_core.schedule.timing import StageTimes


class _Job(NamedTuple):
    head: float
    work: float
    tail: float


class _Stage(NamedTuple):
    """Least durations of a stage: forward, until the input's gradient is there, and what is then left of backward."""

    forward: float
    gradient: float
    rest: float

    @classmethod
    def of(cls, times: StageTimes, coupled: bool) -> _Stage:
        whole, halves = times.of(Kind.B), times.backward_input + times.backward_weight
        if coupled:
            return cls(times.forward, whole, 0.0)
        gradient = min(times.backward_input, whole)
        return cls(times.forward, gradient, min(halves, whole) - gradient)


def lower_bound(problem: Problem) -> float:
    """The least slots without optimizer (staggered: the least period) of any plan with the problem's route.

    Backwards of all workers may be split, unless the variant is coupled. Of an iteration under way it is the most work
    that a worker has left.
    """
    topology, times = problem.topology, problem.times
    coupled = problem.variant is Variant.COUPLED
    own = {worker: _Stage.of(times.at(worker), coupled) for worker in topology.workers()}
    most: dict[tuple[int, _Stage], int] = {}
    best = 0.0
    for worker, count in _counts(problem).items():
        here = own[worker]
        if problem.done:
            done = [one for one in problem.done.get(worker, ()) if one.kind is not Kind.OPT]
            left = count * sum(here) - sum(times.at(worker).of(one.kind) for one in done)
            best = max(best, left)
        most[worker.stage, here] = max(most.get((worker.stage, here), 0), count)
    if problem.done:
        return best
    # Other stages are passed at their fastest worker.
    there = [[w for w in own if w.stage == s and w not in problem.failed] for s in range(topology.stages)]
    stages = [_fastest(own[worker] for worker in workers) for workers in there]
    for (stage, here), count in most.items():
        jobs = _jobs(stages, here, times.communication, stage, count, alone=problem.staggered)
        spans = (
            min(one.head for one in some) + sum(one.work for one in some) + min(one.tail for one in some)
            for size in range(1, len(jobs) + 1)
            for some in combinations(jobs, size)
        )
        optimizer = max(times.at(worker).optimizer for worker in there[stage])
        best = max(best, max(spans) + (optimizer if problem.staggered else 0.0))
    return best


def _fastest(some: Iterable[_Stage]) -> _Stage:
    return _Stage(*map(min, zip(*some, strict=True)))


def _counts(problem: Problem) -> dict[PlannedWorker, int]:
    topology = problem.topology
    counts = {worker: topology.micro_batches for worker in topology.workers() if worker not in problem.failed}
    for worker in problem.route.values():
        if worker in counts:  # else it failed later, after its stage had stepped
            counts[worker] += 1
    return counts


def _jobs(
    stages: list[_Stage], here: _Stage, communication: float, stage: int, count: int, *, alone: bool
) -> list[_Job]:
    """The jobs of a worker; ``alone``: between the first start and the last end of its stage, not of all stages."""
    head = 0.0 if alone else sum(one.forward + communication for one in stages[:stage])
    answer = sum(one.forward + one.gradient + 2 * communication for one in stages[stage + 1 :])
    tail, way = here.rest, 0.0
    for one in () if alone else reversed(stages[:stage]):
        way += communication + one.gradient
        tail = max(tail, way + one.rest)
    came = head + here.forward + answer
    return [
        _Job(head, count * here.forward, answer + here.gradient + tail),
        _Job(came, count * here.gradient, tail),
        _Job(came + here.gradient, count * here.rest, 0.0),
    ]
