"""What all survivors agree on after a failure, without processes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from shared_core.reroute.history import PlanHistory, StepProgress, text_of
from shared_core.reroute.planning import Plans
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import Action, Kind, PlannedWorker, Topology

TOPOLOGY = Topology(3, 2, 3)


def history(folder: Path) -> PlanHistory:
    return PlanHistory(Plans(TOPOLOGY, Variant.DECOUPLED, True, folder, 0))


def change(
    past: PlanHistory,
    number: int,
    failed: Collection[PlannedWorker],
    at: Mapping[PlannedWorker, tuple[int, int]],
    sums: Collection[tuple[int, PlannedWorker]] = (),
    behind: Mapping[PlannedWorker, int] | None = None,
) -> None:
    """As the executor.

    Args:
        past: to be changed.
        number: of the change.
        failed: all that are.
        at: step and place of the others.
        sums: steps and workers that have the sum.
        behind: what workers in step 1 have run of their rows of step 0.
    """
    begun = {worker: {0: place} for worker, place in (behind or {}).items()}
    past.change(
        {
            "number": number,
            "failed": [list(worker) for worker in failed],
            "ready": [],
            "until": None,
            "at": {text_of(w): StepProgress(*place, begun.get(w, {})).to_plain() for w, place in at.items()},
            "summed": sorted({(step, worker.stage) for step, worker in sums if worker in at}),
        }
    )


def test_who_had_the_sum_fails_after_the_one_whose_gradients_are_in_it(tmp_path: Path) -> None:
    past, workers = history(tmp_path), TOPOLOGY.workers()
    change(past, 0, (), dict.fromkeys(workers, (0, 0)))
    rows = past.begin(0).plan.schedule.rows
    summed, first, waits = PlannedWorker(0, 1), PlannedWorker(1, 1), PlannedWorker(2, 1)
    at = {worker: (0, len(rows[worker]) - 1) for worker in workers if worker != first}
    at[summed] = 0, len(rows[summed])
    change(past, 1, [first], at, {(0, summed)})
    assert not any(one.pipeline == 1 for one in past.begin(0).plan.schedule.rows[waits] if one.kind is not Kind.OPT)
    change(past, 2, [summed, first], {worker: (0, 0) for worker in at if worker != summed})
    again = {(one.pipeline, one.micro_batch) for one in past.begin(0).plan.schedule.rows[waits] if one.kind is Kind.F}
    assert again == {(d, j) for d in (0, 1) for j in range(3)}


class Walk:
    """Workers that run the rows of the plans in any order that is possible, through two steps.

    Attributes:
        at: step and place of those that are there.
        behind: what they have run of rows of the first step that they got in the second.
        sums: steps and workers that have the sum of their stage.
        again: actions that workers have run that had the sum.
    """

    def __init__(self, past: PlanHistory, topology: Topology) -> None:
        self.past, self.topology = past, topology
        self.at = dict.fromkeys(topology.workers(), (0, 0))
        self.behind: dict[PlannedWorker, int] = {}
        self.sums: set[tuple[int, PlannedWorker]] = set()
        self.again = 0

    def row(self, worker: PlannedWorker, number: int) -> tuple[Action, ...]:
        return self.past.begin(number).plan.schedule.rows[worker]

    def place(self, worker: PlannedWorker, number: int) -> int:
        """How much of its row of a step a worker has run."""
        step, place = self.at[worker]
        return self.behind.get(worker, len(self.row(worker, number))) if number < step else place * (number == step)

    def left(self, stage: int, number: int, *kinds: Kind) -> bool:
        """Whether workers of a stage have still such actions to run in a step."""
        there = [worker for worker in self.at if worker.stage == stage]
        return any(one.kind in kinds for w in there for one in self.row(w, number)[self.place(w, number) :])

    def done(self, number: int) -> dict[PlannedWorker, frozenset[Action]]:
        """What was executed of a step and counts."""
        step = self.past.steps[number]
        workers = {*step.done, *self.at}
        rows = {each: self.row(each, number)[: self.place(each, number)] for each in self.at}
        return {each: frozenset((*step.done.get(each, ()), *rows.get(each, ()))) for each in workers}

    def next(self, worker: PlannedWorker) -> tuple[int, int]:
        """Step and place of what a worker runs next: first what others need of the step before."""
        if self.at[worker][0] == 1 and self.place(worker, 0) < len(self.row(worker, 0)):
            return 0, self.place(worker, 0)
        return self.at[worker]

    def able(self) -> list[PlannedWorker]:
        """Whose next action can run, as the executor has it."""
        return [worker for worker in self.at if self._is_able(worker)]

    def _is_able(self, worker: PlannedWorker) -> bool:
        (number, place), stage, last = self.next(worker), worker.stage, self.topology.stages - 1
        row = self.row(worker, number)
        if place == len(row):  # the losses of all come before the next step
            return number == 0 and not self.left(last, 0, Kind.F)
        action = row[place]
        if action.kind is Kind.OPT:
            if stage and self.left(stage - 1, number, Kind.I, Kind.B):
                return False
            return (number, worker) in self.sums or not self.left(stage, number, Kind.F, Kind.I, Kind.B, Kind.W)
        if action.kind is Kind.F:
            return stage == 0 or self._there(action._replace(stage=stage - 1), number)
        if action.kind is Kind.W or stage == last:
            return True
        return any(self._there(action._replace(stage=stage + 1, kind=kind), number) for kind in (Kind.I, Kind.B))

    def _there(self, action: Action, number: int) -> bool:
        """Whether a worker that is there has made what another needs: of the failed, it is gone."""
        return any(action in done for worker, done in self.done(number).items() if worker in self.at)

    def advance(self, worker: PlannedWorker) -> None:
        """Run a worker's next action. Who sums first at its stage has all gradients, each of them once."""
        (number, place), stage = self.next(worker), worker.stage
        row, done = self.row(worker, number), self.done(number)
        if place == len(row):
            self.at[worker] = 1, 0
            self.past.begin(1)
            return
        if number < self.at[worker][0]:
            self.behind[worker] = place + 1
        else:
            self.at[worker] = number, place + 1
        summed = any((number, each) in self.sums for each in self.at if each.stage == stage)
        if row[place].kind is not Kind.OPT:
            assert not summed or (number, worker) in self.sums
            self.again += summed
            return
        self.sums.add((number, worker))
        if summed:
            return
        counts = Counter[tuple[int, int]]()
        for one in itertools.chain(*done.values()):
            if one.stage == stage:
                weight = {Kind.F: 1, Kind.I: 2, Kind.W: 4, Kind.B: 6, Kind.OPT: 0}[one.kind]
                counts[one.pipeline, one.micro_batch] += weight
        assert counts == {(d, j): 7 for d in range(self.topology.pipelines) for j in range(self.topology.micro_batches)}

    def lose(self, number: int, *workers: PlannedWorker) -> None:
        """Workers fail at once; the others continue. Who has the sum gives it to its peers."""
        for worker in workers:
            del self.at[worker]
            self.behind.pop(worker, None)
        self.sums = {(step, worker) for step, worker in self.sums if worker in self.at}
        gone = set(self.topology.workers()) - set(self.at)
        change(self.past, number, gone, self.at, self.sums, self.behind)
        stages = {(step, worker.stage) for step, worker in self.sums}
        self.sums |= {(step, worker) for step, stage in stages for worker in self.at if worker.stage == stage}
        fresh = self.past.changed_since(number - 1)
        if 0 in fresh:
            self.behind = {each: 0 for each, (step, _) in self.at.items() if step == 1}
        elif 0 not in self.past.steps:
            self.behind.clear()
        self.at = {each: (step, 0 if step in fresh else place) for each, (step, place) in self.at.items()}


def continues_and_loses(walk: Walk, choice: random.Random, most: int, number: int) -> None:
    """Workers advance, fewer than ``most`` times in all; then one fails whose stage keeps another."""
    for _ in range(choice.randrange(most)):
        if able := walk.able():
            walk.advance(choice.choice(able))
    if can := survivable(walk):
        walk.lose(number, choice.choice(can))


@pytest.mark.parametrize("topology", [TOPOLOGY, Topology(2, 4, 5)])
@pytest.mark.parametrize("variant", list(Variant))
@pytest.mark.parametrize("seed", range(2))
def test_failures_one_after_the_other_anywhere(seed: int, variant: Variant, topology: Topology, tmp_path: Path) -> None:
    """In whatever order workers got to where they are, a rest of the steps is found that can be run to its end."""
    choice = random.Random(seed)
    walk = Walk(PlanHistory(Plans(topology, variant, choice.random() < 0.5, tmp_path, 0)), topology)
    change(walk.past, 0, (), walk.at)
    for number in range(1, 4):
        continues_and_loses(walk, choice, 60, number)
    ends(walk, choice)


@pytest.mark.parametrize("variant", list(Variant))
def test_neighbors_fail_while_only_one_stage_has_its_sum(variant: Variant, tmp_path: Path) -> None:
    """That stage makes again what the other one needs; then somebody else fails, where each stage has another."""
    topology, again = Topology(2, 2, 4), 0
    for seed in range(12):
        choice = random.Random(seed)
        walk = Walk(PlanHistory(Plans(topology, variant, choice.random() < 0.5, tmp_path / str(seed), 0)), topology)
        change(walk.past, 0, (), walk.at)
        first, d = choice.randrange(topology.stages - 1), choice.randrange(topology.pipelines)
        ahead, other = choice.sample((first, first + 1), 2)
        while not any(worker.stage == ahead for _, worker in walk.sums):
            able = [worker for worker in walk.able() if not _sums(walk, worker, other)]
            walk.advance(choice.choice(able))
        for _ in range(choice.randrange(8)):
            if able := [worker for worker in walk.able() if not _sums(walk, worker, other)]:
                walk.advance(choice.choice(able))
        walk.lose(1, PlannedWorker(d, first), PlannedWorker(d, first + 1))
        for number in (2, 3):
            continues_and_loses(walk, choice, 12, number)
        ends(walk, choice)
        again += walk.again
    assert again


def survivable(walk: Walk) -> list[PlannedWorker]:
    """Who can fail: each stage keeps a worker."""
    peers = Counter(worker.stage for worker in walk.at)
    return [worker for worker in walk.at if peers[worker.stage] > 1]


def _sums(walk: Walk, worker: PlannedWorker, stage: int) -> bool:
    number, place = walk.next(worker)
    row = walk.row(worker, number)
    return number == 0 and worker.stage == stage and place < len(row) and row[place].kind is Kind.OPT


def ends(walk: Walk, choice: random.Random) -> None:
    while able := walk.able():
        walk.advance(choice.choice(able))
    assert all(step == 1 and place == len(walk.row(worker, 1)) for worker, (step, place) in walk.at.items())
