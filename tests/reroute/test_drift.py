"""When times have drifted, who decides it, and that all switch at the same step: without a job."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared_core.reroute.planning import Plans, Proposal, TimesInUse
from shared_core.reroute.reports import EVERY, Deliberation, Reported, Word, decide
from shared_core.reroute.times import agree
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import PlannedWorker, Topology
from shared_core.schedule.timing import Times

TOPOLOGY = Topology(3, 2, 4)
WORKERS = TOPOLOGY.workers()
USUAL = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0, "OPT": 3.0, "communication": 0.1}
SLOW = USUAL | {"F": 3.0}
USED = agree([(worker, USUAL) for worker in WORKERS], 2)
ROOM = (8, 8)


def reports(ready: int = -1, **slow: dict[str, float]) -> dict[PlannedWorker, Reported]:
    return {worker: Reported(slow.get(str(worker), USUAL), ready) for worker in WORKERS}


def test_only_a_drift_that_stays_is_proposed_and_only_what_all_can_plan_holds() -> None:
    assert USED is not None
    at, word = decide(Deliberation(), 4, reports(W1_0=SLOW), USED, 2)
    assert word is Word.NOTHING and at.seen == 1
    at, word = decide(at, 8, reports(), USED, 2)
    assert word is Word.NOTHING and at.seen == 0, "it was one long step"
    for step in (12, 16):
        at, word = decide(at, step, reports(W1_0=SLOW), USED, 2)
    assert word is Word.PROPOSAL and at.number == 16 and at.proposed is not None and at.proposed.own
    some = reports(16, W1_0=SLOW) | {PlannedWorker(2, 1): Reported(USUAL, -1)}
    at, word = decide(at, 20, some, USED, 2)
    assert word is Word.NOTHING, "one has no plan yet"
    at, word = decide(at, 24, reports(16, W1_0=SLOW), USED, 2)
    assert word is Word.SWITCH and at.proposed is None


@dataclass
class Member:
    """A worker of a simulated job.

    Attributes:
        plans: its own.
        step: under way.
        slow: whether its forwards take long.
    """

    plans: Plans
    step: int
    slow: bool = False


class SimulatedJob:
    """Workers of a job that report, decide and hear by the real rules, with messages that come late, and losses.

    A step's losses reach each worker some time after they were told, in any order. Nobody begins the next step without
    them, so workers are at most one step apart. A failure of anybody keeps what is under way from coming, and comes
    before or after the others have heard. Plans for new times take some time.
    """

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rng, self.folder = rng, folder
        self.begun: dict[int, int] = {}  # step: first step of the times with which it was begun
        self.deliberation, self.told, self.word = Deliberation(), 3, Word.NOTHING
        self.members = {worker: Member(self.plans(), 4) for worker in WORKERS}
        for member in self.members.values():
            member.plans.adopt(TimesInUse(4, USED or Times()), ROOM)

    def plans(self) -> Plans:
        return Plans(TOPOLOGY, Variant.STAGGERED, False, self.folder, 0)

    def turn(self) -> None:
        """Somebody fails and another one comes, or a worker hears the losses of its step and begins the next."""
        if self.rng.random() < 0.02:
            self.lose(self.rng.choice(WORKERS))
            return
        last = min(member.step for member in self.members.values())
        if self.told < last:
            self.decide(last)
        member = self.rng.choice([member for member in self.members.values() if member.step == last])
        self.hear(member)
        self.begin(member, last + 1)
        member.slow ^= self.rng.random() < 0.004

    def begin(self, member: Member, step: int) -> None:
        """All begin a step with the same times."""
        member.step = step
        assert member.plans.since <= step
        assert self.begun.setdefault(step, member.plans.since) == member.plans.since, (step, self.begun)

    def decide(self, step: int) -> None:
        """What the worker that decides tells with the losses of a step."""
        self.told, self.word = step, Word.NOTHING
        used = self.members[PlannedWorker(0, 1)].plans.times
        if step % EVERY or used is None:
            return
        rows = {
            worker: Reported(
                SLOW if member.slow else USUAL,
                member.plans.ready_for(frozenset()) if self.rng.random() < 0.9 else -1,
            )
            for worker, member in self.members.items()
        }
        self.deliberation, self.word = decide(self.deliberation, step, rows, used, 2)

    def hear(self, member: Member) -> None:
        """A worker hears what was told."""
        if self.word is Word.PROPOSAL and self.deliberation.proposed is not None:
            member.plans.proposal = Proposal(self.told, self.deliberation.proposed)
        elif self.word is Word.SWITCH:
            assert member.plans.proposal is not None
            member.plans.adopt(TimesInUse(self.told + 1, member.plans.proposal.times, frozenset()), ROOM)

    def lose(self, worker: PlannedWorker) -> None:
        """The others tell each other how far they are. Those that have finished the step give the rest its losses."""
        del self.members[worker]
        newest = max(member.step for member in self.members.values())
        views = [member.plans.view() for member in self.members.values()]
        for member in self.members.values():
            member.plans.learn(views)
            member.plans.proposal = None
            if member.step < newest:
                self.begin(member, newest)
        self.members[worker] = Member(self.plans(), newest)
        self.members[worker].plans.learn(views)
        self.deliberation, self.told, self.word = Deliberation(), newest - 1, Word.NOTHING


@pytest.mark.parametrize("seed", range(5))
def test_all_begin_a_step_with_the_same_times_whatever_comes_late_or_is_lost(tmp_path: Path, seed: int) -> None:
    job = SimulatedJob(tmp_path, random.Random(seed))
    for _ in range(6000):
        job.turn()
    assert len(set(job.begun.values())) > 4, "times did change"
