"""Good plans without a solver: the best of many list schedules, and how good any can be."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import combinations, product
from typing import NamedTuple

from shared_core.errors import InvalidSchedule
from shared_core.schedule.problem import Problem, Variant, held_after
from shared_core.schedule.schedule import Action, Kind, PlannedWorker, Schedule
from shared_core.schedule.timing import ROUNDS, SimulatedTimes, Simulation, StageTimes, Timeline, codes

# -- the least that any plan can take ---------------------------------------------------------------------------------
#
# Of each worker three jobs are looked at: its forwards, its gradients of inputs, its gradients of weights. A job cannot
# begin before its first input is there (its head), and something must follow at other workers when it has ended (its
# tail). For any set of jobs of one worker the plan takes at least the least head, all their work and the least tail
# (Carlier, "The one-machine sequencing problem", 1982). Memory and the order of messages are left out.


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


# -- list scheduling: whenever a worker is free it takes the most urgent thing that it can do now ---------------------


#: Codes of what an operation is; four times its number is added (see ``Arrays``).
F, I, W, B = 0, 1, 2, 3  # noqa: E741
_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)


@dataclass(frozen=True)
class Rule:
    """How ties are broken; every choice gives a valid schedule.

    Attributes:
        hosted: micro-batches of others come this many places before a worker's own of the same index.
        ahead: forwards that a pipeline may be ahead at a stage beyond 1F1B's (stages - stage).
        lead: where both can be run, take a forward before a backward that is at most so many micro-batches before it.
        frees: run a W before a backward where a forward waits for memory.
        arrival: what came first goes first.
        noise: seed of small random changes of the order; 0 for none.
        width: their size, in micro-batches.
    """

    hosted: float = 0.0
    ahead: int = 0
    lead: float = -math.inf
    frees: bool = False
    arrival: bool = False
    noise: int = 0
    width: float = 1.0


class Arrays:
    """A problem in flat lists, built once and scheduled with many rules.

    The operation of micro-batch j of pipeline d at stage s has the number (d * stages + s) * micro-batches + j; the
    worker at that place has the number d * stages + s.
    """

    def __init__(self, problem: Problem) -> None:
        topology = problem.topology
        self.problem = problem
        self.pipelines, self.stages, self.count = topology.pipelines, topology.stages, topology.micro_batches
        self.places = topology.workers()
        self.size = len(self.places) * self.count
        at = [problem.times.at(place) for place in self.places]
        self.lengths = [tuple(one.of(kind) for kind in _KINDS) for one in at]
        self.host = [w for w in range(len(self.places)) for _ in range(self.count)]
        for (d, s, j), worker in problem.route.items():
            self.host[(d * self.stages + s) * self.count + j] = worker.pipeline * self.stages + worker.stage
        self.split = [problem.splits(d, s, j) for d, s in self.places for j in range(self.count)]
        self.limit = [problem.memory.at(place) + 1e-9 for place in self.places]  # parts add up to wholes with rounding
        self.held = [held_after(problem.done.get(place, ())) for place in self.places]
        self.done = [code for actions in problem.done.values() for code in codes(actions, self.stages, self.count)]
        self.ran = bytearray(self.size)  # bits: F, I, W as they were executed before
        for code in self.done:
            self.ran[code >> 2] |= (1, 2, 4, 6)[code & 3]

        self.room = [0] * len(self.places)  # F without I, as executed before
        for q, bits in enumerate(self.ran):
            self.room[q // self.count] += bits & 3 == 1
        hosting: dict[int, set[int]] = {}
        for (d, s, _), worker in problem.route.items():
            hosting.setdefault(d * self.stages + s, set()).add(worker.pipeline * self.stages + worker.stage)
        self.hosting = {place: sorted(workers) for place, workers in hosting.items()}

    def schedule(self, rule: Rule) -> list[list[int]]:
        """Codes of what every place runs, in order. InvalidSchedule where no order fits into the memory."""
        return _Pass(self, rule).run()

    def measure(self, rows: list[list[int]], rounds: int) -> SimulatedTimes:
        return self._simulation(rows).measure(self.problem.staggered, rounds)

    def timeline(self, rows: list[list[int]], schedule: Schedule, measured: SimulatedTimes) -> Timeline:
        return self._simulation(rows).timeline(measured, schedule)

    def _simulation(self, rows: list[list[int]]) -> Simulation:
        alive = [w for w, place in enumerate(self.places) if place not in self.problem.failed]
        shape = (self.pipelines, self.stages, self.count)
        return Simulation(
            [self.places[w] for w in alive], [rows[w] for w in alive], shape, self.problem.times, self.done
        )

    def schedule_of(self, rows: list[list[int]]) -> Schedule:
        """Codes as the rows of workers that have not failed."""
        names = [(place.pipeline, place.stage) for place in self.places]
        count, kinds, make = self.count, _KINDS, Action
        named = {}
        for place, row in zip(self.places, rows, strict=True):
            if place in self.problem.failed:
                continue
            actions = []
            for code in row:
                home, j = divmod(code >> 2, count)
                pipeline, stage = names[home]
                actions.append(make(stage, kinds[code & 3], j, pipeline))
            actions.append(Action(place.stage, Kind.OPT, -1, place.pipeline))
            named[place] = tuple(actions)
        return Schedule(named)


class _Pass:
    def __init__(self, arrays: Arrays, rule: Rule) -> None:
        self.a, self.rule = arrays, rule
        size, workers = arrays.size, len(arrays.places)
        self.events: dict[float, list[int]] = {}  # codes by time
        self.instants: list[float] = []  # heap of these times
        self.forwards: list[list[tuple[float, int]]] = [[] for _ in range(workers)]
        self.backwards: list[list[tuple[float, int]]] = [[] for _ in range(workers)]
        self.weights: list[list[tuple[float, int]]] = [[] for _ in range(workers)]
        self.room = [arrays.stages - place.stage + rule.ahead - arrays.room[i] for i, place in enumerate(arrays.places)]
        self.held = list(arrays.held)
        self.inputs = bytearray(size)  # what the backward still needs: its forward, the gradient
        self.ready = [0.0] * size  # when the first of these two is there
        self.wake = 4 * size  # codes from here on: a worker may be free
        # ``ordered``: index of the next F, and of the next W or B, of each place; and what waits for its turn.
        self.turns: tuple[list[int], list[int]] | None = None
        self.early: set[int] = set()
        if arrays.problem.ordered:
            self.turns = ([0] * workers, [0] * workers)
            for place in range(workers):
                self._pass_done(place, 0, 1)
                self._pass_done(place, 1, 4)
        base = [
            float(q % arrays.count) - (rule.hosted if arrays.host[q] != q // arrays.count else 0.0) for q in range(size)
        ]
        self.keys = (base, base)
        if rule.noise:
            draw = random.Random(rule.noise).random
            self.keys = ([key + rule.width * draw() for key in base], [key + rule.width * draw() for key in base])
        self._begin()

    def _pass_done(self, place: int, which: int, bit: int) -> None:
        assert self.turns is not None
        turn, count = self.turns[which], self.a.count
        while turn[place] < count and self.a.ran[place * count + turn[place]] & bit:
            turn[place] += 1

    def _begin(self) -> None:
        """Events of what can be run at once."""
        a, count, stages = self.a, self.a.count, self.a.stages
        first: set[int] = set()  # pipelines whose first forward at stage 0 is known; each F brings the next
        for q in range(a.size):
            stage, bits = q // count % stages, a.ran[q]
            if not bits & 1:
                if stage == 0:
                    if q // count not in first:
                        first.add(q // count)
                        self._at(0.0, 4 * q)
                elif a.ran[q - count] & 1:
                    self._at(0.0, 4 * q)
            waits = (not bits & 1) + (stage < stages - 1 and not a.ran[q + count] & 2)
            self.inputs[q] = waits
            if not bits & 2 and not waits:
                self._at(0.0, 4 * q + (I if a.split[q] else B))
            if bits & 6 == 2:
                self._at(0.0, 4 * q + W)

    def _at(self, time: float, code: int) -> None:
        """Something can be run, or a worker is free, at a time."""
        there = self.events.get(time)
        if there is None:
            self.events[time] = [code]
            heappush(self.instants, time)
        else:
            there.append(code)

    def _next_at_first(self, q: int) -> int:
        """The next forward of a pipeline at stage 0 that was not executed before; -1 if there is none."""
        q += 1
        while q % self.a.count and self.a.ran[q] & 1:
            q += 1
        return q if q % self.a.count else -1

    def run(self) -> list[list[int]]:
        """Codes of every place in the order in which they start."""
        a, events, instants, wake, host = self.a, self.events, self.instants, self.wake, self.a.host
        forwards, backwards, weights, limit, held = self.forwards, self.backwards, self.weights, self.a.limit, self.held
        arrival, lead, frees, (forward_keys, backward_keys) = (
            self.rule.arrival,
            self.rule.lead,
            self.rule.frees,
            self.keys,
        )
        in_turn = self.turns is not None
        free = [0.0] * len(a.places)
        rows: list[list[int]] = [[] for _ in a.places]
        while instants:
            now = heappop(instants)
            touched: set[int] = set()
            for code in events.pop(now):
                if code >= wake:
                    touched.add(code - wake)
                    continue
                q, kind = code >> 2, code & 3
                if in_turn and kind != I and self._too_early(code):
                    continue
                w = host[q]
                touched.add(w)
                if kind == F:
                    heappush(forwards[w], (now if arrival else forward_keys[q], q))
                elif kind == W:
                    heappush(weights[w], (backward_keys[q], q))
                else:
                    heappush(backwards[w], (now if arrival else backward_keys[q], q))
            for w in sorted(touched):
                if free[w] > now:
                    continue
                code = -1
                fits = held[w] + 1.0 <= limit[w]
                if forwards[w] and fits and (not backwards[w] or forwards[w][0][0] <= backwards[w][0][0] + lead):
                    code = self._forward(w, now)
                if code < 0:
                    if backwards[w] and not (frees and not fits and forwards[w] and weights[w]):
                        code = self._backward(w, now)
                    elif weights[w]:
                        code = self._weight(w, now)
                    else:
                        continue
                rows[w].append(code)
                free[w] = end = now + a.lengths[w][code & 3]
                self._at(end, wake + w)
        self._all_ran(rows)
        return rows

    def _forward(self, w: int, now: float) -> int:
        """Start the most urgent forward whose pipeline has room; -1 if none has."""
        a, waiting, count = self.a, self.forwards[w], self.a.count
        blocked, q = [], -1
        while waiting:
            entry = heappop(waiting)
            if self.room[entry[1] // count] > 0:
                q = entry[1]
                break
            blocked.append(entry)
        for entry in blocked:
            heappush(waiting, entry)
        if q < 0:
            return -1
        self.held[w] += 1.0
        self.room[q // count] -= 1
        end, stage = now + a.lengths[w][F], w % a.stages
        if stage < a.stages - 1 and not a.ran[q + count] & 1:
            self._at(end + a.problem.times.communication, 4 * (q + count))
        if stage == 0 and (following := self._next_at_first(q)) >= 0:
            self._at(now, 4 * following)
        if not a.ran[q] & 2:
            self._input(q, end)
        if self.turns is not None:
            self._advance(q, 0, 1, now)
        return 4 * q

    def _input(self, q: int, time: float) -> None:
        """One of the inputs of a backward arrives."""
        self.inputs[q] -= 1
        if self.inputs[q]:
            self.ready[q] = time
        else:
            self._at(max(time, self.ready[q]), 4 * q + (I if self.a.split[q] else B))

    def _backward(self, w: int, now: float) -> int:
        a, count = self.a, self.a.count
        q = heappop(self.backwards[w])[1]
        place = q // count
        self.room[place] += 1
        if self.room[place] == 1:  # its pipeline may go forward again, perhaps at other hosts
            for other in a.hosting.get(place, ()):
                self._at(now, self.wake + other)
        if a.split[q]:
            code, end = 4 * q + I, now + a.lengths[w][I]
            self._at(end, 4 * q + W)
        else:
            code, end = 4 * q + B, now + a.lengths[w][B]
            self.held[w] -= 1.0
            if self.turns is not None:
                self._advance(q, 1, 4, now)
        if w % a.stages and not a.ran[q - count] & 2:
            self._input(q - count, end + a.problem.times.communication)
        return code

    def _weight(self, w: int, now: float) -> int:
        q = heappop(self.weights[w])[1]
        self.held[w] -= 1.0
        if self.turns is not None:
            self._advance(q, 1, 4, now)
        return 4 * q + W

    def _too_early(self, code: int) -> bool:
        assert self.turns is not None
        q = code >> 2
        place, j = divmod(q, self.a.count)
        if self.turns[1 if code & 3 else 0][place] == j:
            return False
        self.early.add(code)
        return True

    def _advance(self, q: int, which: int, bit: int, now: float) -> None:
        """After F (``which`` 0) or W or B (1) of an operation it is the turn of the next one."""
        assert self.turns is not None
        place, count = q // self.a.count, self.a.count
        self.turns[which][place] += 1
        self._pass_done(place, which, bit)
        following = 4 * (place * count + self.turns[which][place])
        for code in (following,) if which == 0 else (following + W, following + B):
            if code in self.early:
                self.early.remove(code)
                self._at(now, code)

    def _all_ran(self, rows: list[list[int]]) -> None:
        a = self.a
        need = a.size * 3 - sum(bits.bit_count() for bits in a.ran)
        if sum(2 if code & 3 == B else 1 for row in rows for code in row) == need:
            return
        bits = bytearray(a.ran)
        for row in rows:
            for code in row:
                bits[code >> 2] |= (1, 2, 4, 6)[code & 3]
        q = next(q for q, ran in enumerate(bits) if ran != 7)
        place, j = divmod(q, a.count)
        kind = Kind.F if not bits[q] & 1 else Kind.W if bits[q] & 2 else Kind.I
        action, worker = Action(a.places[place].stage, kind, j, a.places[place].pipeline), a.places[a.host[q]]
        raise InvalidSchedule(
            f"{action} of {worker} can never run: {worker} has room for {a.limit[a.host[q]]:g} micro-batches and holds "
            f"{self.held[a.host[q]]:g}; raise its memory limit"
        )


# -- the best of many -------------------------------------------------------------------------------------------------


#: Actions that all passes together may place.
EFFORT = 100_000
_SAME = 1e-9


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule and its cost; no schedule of the problem costs less than ``bound``."""

    problem: Problem
    schedule: Schedule
    timeline: Timeline
    bound: float

    @property
    def cost(self) -> float:
        return objective(self.problem, self.timeline)

    @property
    def optimal(self) -> bool:
        return self.cost <= self.bound * (1 + _SAME)


def objective(problem: Problem, timeline: Timeline) -> float:
    """What is minimized: the period if staggered, else the slots."""
    return timeline.period if problem.staggered else timeline.slots


def greedy(problem: Problem, effort: int = EFFORT) -> FoundSchedule:
    """The best of the rules, then of random changes of the best ones, until nothing better can exist. Deterministic.

    Args:
        problem: what to schedule; ``split_last`` is chosen here.
        effort: actions that all passes together may place; the first pass is always made.

    Raises InvalidSchedule if no order fits into the memory.
    """
    topology = problem.topology
    passes = max(1, effort // (3 * topology.pipelines * topology.stages * topology.micro_batches))
    count, stages = topology.micro_batches, topology.stages
    lasts = sorted({0, 1, min(stages // 2, count), min(stages, count), count})
    if problem.variant is Variant.COUPLED:
        lasts = [0]
    elif passes == 1:
        lasts = [min(stages, count)]
    choices = [Arrays(replace(problem, split_last=last)) for last in lasts]
    goal = lower_bound(problem)
    tried: list[tuple[float, int, Rule]] = []
    best: tuple[float, int, list[list[int]], SimulatedTimes] | None = None
    attempts = _attempts(len(choices), problem, tried, hurry=passes < 50)
    rounds = 2 if passes == 1 else 8
    for _ in range(passes):
        which, rule = next(attempts)
        rows = choices[which].schedule(rule)
        measured = choices[which].measure(rows, rounds)
        cost = measured.period if problem.staggered else measured.slots
        tried.append((cost, which, rule))
        if best is None or cost < best[0] * (1 - _SAME):
            best = cost, which, rows, measured
        if cost <= goal * (1 + _SAME):
            break
    assert best is not None
    _, which, rows, measured = best
    arrays = choices[which]
    if passes > 1:
        measured = arrays.measure(rows, ROUNDS)
    schedule = arrays.schedule_of(rows)
    return FoundSchedule(arrays.problem, schedule, arrays.timeline(rows, schedule, measured), goal)


def _attempts(
    choices: int, problem: Problem, tried: list[tuple[float, int, Rule]], *, hurry: bool
) -> Iterator[tuple[int, Rule]]:
    """First every rule, then the five best with noise, again and again.

    Rules that take little memory come first; in a ``hurry`` those that take much, which are the better ones.
    """
    whiches, aheads = list(range(choices)), [0, 1, 2, problem.topology.stages]
    whole = problem.variant is Variant.COUPLED
    # Whole backwards lose less where forwards are ready for the next one; split ones continue with a W.
    first, second = (math.inf, -math.inf) if whole else (-math.inf, math.inf)
    if hurry:
        aheads.reverse()
        whiches = [*whiches[-2:], *reversed(whiches[:-2])]
    for hosted in (0.5, -0.5, 1.5, -1.5, 99.0, -99.0):
        for which in whiches:
            for ahead in aheads:
                for lead in (first, second):
                    yield which, Rule(hosted, ahead, lead)
                if hosted == 0.5:
                    yield which, Rule(0.0, ahead, first, arrival=True)
    limited = any(problem.memory.at(worker) < math.inf for worker in problem.topology.workers())
    for hosted, which, ahead in product((0.5, -0.5), whiches, aheads):
        for lead in (-1.0, 1.0):
            yield which, Rule(hosted, ahead, lead)
        if limited and not whole:
            for lead in (first, second):
                yield which, Rule(hosted, ahead, lead, frees=True)
    seed = 0
    while True:
        tried.sort(key=lambda one: one[0])
        for _, which, rule in tried[:5]:
            seed += 1
            yield which, replace(rule, noise=seed, width=(0.6, 1.5, 3.0)[seed % 3])
