"""What all survivors agree on after a loss, without processes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from shared_core.reroute.history import PlanHistory
from shared_core.reroute.planning import Plans
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import Action, Kind, Topology, Worker

TOPOLOGY = Topology(3, 2, 3)


def history(folder: Path) -> PlanHistory:
    return PlanHistory(Plans(TOPOLOGY, Variant.DECOUPLED, True, folder, 0))


def change(past: PlanHistory, number: int, lost: Collection[Worker], at: Mapping[Worker, tuple[int, int]]) -> None:
    places = {f"{worker.pipeline}:{worker.stage}": list(place) for worker, place in at.items()}
    gone = [list(worker) for worker in lost]
    past.change({"number": number, "lost": gone, "ready": [], "until": None, "at": places})


def test_who_had_the_sum_is_lost_after_the_one_whose_gradients_are_in_it(tmp_path: Path) -> None:
    past, workers = history(tmp_path), TOPOLOGY.workers()
    change(past, 0, (), dict.fromkeys(workers, (0, 0)))
    rows = past.begin(0).plan.schedule.rows
    summed, first, waits = Worker(0, 1), Worker(1, 1), Worker(2, 1)
    at = {worker: (0, len(rows[worker]) - 1) for worker in workers if worker != first}
    at[summed] = 0, len(rows[summed])
    change(past, 1, [first], at)
    assert not any(one.pipeline == 1 for one in past.begin(0).plan.schedule.rows[waits] if one.kind is not Kind.OPT)
    change(past, 2, [summed, first], {worker: (0, 0) for worker in at if worker != summed})
    again = {(one.pipeline, one.micro_batch) for one in past.begin(0).plan.schedule.rows[waits] if one.kind is Kind.F}
    assert again == {(d, j) for d in (0, 1) for j in range(3)}


class Walk:
    """Workers that run the rows of the plans in any order that is possible, through two steps."""

    def __init__(self, past: PlanHistory, topology: Topology) -> None:
        self.past, self.topology = past, topology
        self.at = dict.fromkeys(topology.workers(), (0, 0))

    def row(self, worker: Worker, number: int) -> tuple[Action, ...]:
        return self.past.begin(number).plan.schedule.rows[worker]

    def place(self, worker: Worker, number: int) -> int:
        """How much of its row of a step a worker has run."""
        step, place = self.at[worker]
        return 0 if step < number else place if step == number else len(self.row(worker, number))

    def left(self, stage: int, number: int, *kinds: Kind) -> bool:
        """Whether workers of a stage have still such actions to run in a step."""
        there = [worker for worker in self.at if worker.stage == stage]
        return any(one.kind in kinds for w in there for one in self.row(w, number)[self.place(w, number) :])

    def done(self, number: int) -> dict[Worker, frozenset[Action]]:
        """What was executed of a step and counts."""
        step = self.past.steps[number]
        workers = {*step.done, *self.at}
        rows = {each: self.row(each, number)[: self.place(each, number)] for each in self.at}
        return {each: frozenset((*step.done.get(each, ()), *rows.get(each, ()))) for each in workers}

    def able(self) -> list[Worker]:
        """Whose next action can run, as the executor has it."""
        return [worker for worker in self.at if self._is_able(worker)]

    def _is_able(self, worker: Worker) -> bool:
        (number, place), stage, last = self.at[worker], worker.stage, self.topology.stages - 1
        row = self.row(worker, number)
        if place == len(row):  # the losses of all come before the next step
            return number == 0 and not self.left(last, 0, Kind.F)
        action = row[place]
        if action.kind is Kind.OPT:
            return not (
                self.left(stage, number, Kind.F, Kind.I, Kind.B, Kind.W)
                or (stage and self.left(stage - 1, number, Kind.I, Kind.B))
            )
        done = frozenset().union(*self.done(number).values())
        if action.kind is Kind.F:
            return stage == 0 or action._replace(stage=stage - 1) in done
        if action.kind is Kind.W or stage == last:
            return True
        return any(action._replace(stage=stage + 1, kind=kind) in done for kind in (Kind.I, Kind.B))

    def advance(self, worker: Worker) -> None:
        """Run a worker's next action. Who sums first at its stage has all gradients, each of them once."""
        (number, place), stage = self.at[worker], worker.stage
        row, done = self.row(worker, number), self.done(number)
        if place == len(row):
            self.at[worker] = 1, 0
            self.past.begin(1)
            return
        self.at[worker] = number, place + 1
        if row[place].kind is not Kind.OPT:
            return
        if any(one.kind is Kind.OPT for each in done if each in self.at for one in done[each] if one.stage == stage):
            return
        summed = Counter[tuple[int, int]]()
        for one in itertools.chain(*done.values()):
            if one.stage == stage:
                weight = {Kind.F: 1, Kind.I: 2, Kind.W: 4, Kind.B: 6, Kind.OPT: 0}[one.kind]
                summed[one.pipeline, one.micro_batch] += weight
        assert summed == {(d, j): 7 for d in range(self.topology.pipelines) for j in range(self.topology.micro_batches)}

    def lose(self, number: int, worker: Worker) -> None:
        """A worker is lost; the others go on."""
        del self.at[worker]
        change(self.past, number, set(self.topology.workers()) - set(self.at), self.at)
        fresh = self.past.changed_since(number - 1)
        self.at = {each: (step, 0 if step in fresh else place) for each, (step, place) in self.at.items()}


@pytest.mark.parametrize("topology", [TOPOLOGY, Topology(2, 4, 5), Topology(4, 3, 2)])
@pytest.mark.parametrize("variant", list(Variant))
@pytest.mark.parametrize("seed", range(8))
def test_losses_one_after_the_other_anywhere(seed: int, variant: Variant, topology: Topology, tmp_path: Path) -> None:
    """In whatever order workers got to where they are, a rest of the steps is found that can be run to its end."""
    choice, last = random.Random(seed), topology.stages - 1
    walk = Walk(PlanHistory(Plans(topology, variant, choice.random() < 0.5, tmp_path, 0)), topology)
    change(walk.past, 0, (), walk.at)
    for number in range(1, 4):
        for _ in range(choice.randrange(60)):
            if able := walk.able():
                walk.advance(choice.choice(able))
        peers = Counter(worker.stage for worker in walk.at)
        data = [w for w in walk.at if w.stage not in (0, last) or Worker(w.pipeline, last - w.stage) in walk.at]
        if can := [worker for worker in data if peers[worker.stage] > 1]:
            walk.lose(number, choice.choice(can))
    while able := walk.able():
        walk.advance(choice.choice(able))
    assert all(step == 1 and place == len(walk.row(worker, 1)) for worker, (step, place) in walk.at.items())
