"""How the plans of the steps under way change with each failure: the same at every survivor, from what all have told.

Two steps can be under way at once, because a stage steps when its own gradients are complete. Changes are plain data: a
worker that missed the last one gets another's record of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shared_core.reroute.planning import Plans
from shared_core.schedule.planner import IterationPlan, Remainder, replan
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import Action, Kind, PlannedWorker


class StepProgress(NamedTuple):
    """How far a worker is.

    Attributes:
        step: the one that it is in. If it has finished one and begun no other, the next.
        behind: places in its rows of earlier steps that it has not run to the end, by step.
    """

    step: int
    place: int
    behind: Mapping[int, int]

    def to_plain(self) -> list[Any]:
        return [self.step, self.place, [list(each) for each in sorted(self.behind.items())]]

    @classmethod
    def from_plain(cls, data: Sequence[Any]) -> StepProgress:
        step, place, behind = data
        return cls(step, place, dict(behind))

    def after(self, changed: Collection[int]) -> StepProgress:
        """Of a worker that only now learns that the ``changed`` steps have other rows."""
        new = {number: 0 for number in changed if number < self.step}
        return StepProgress(self.step, 0 if self.step in changed else self.place, {**self.behind, **new})

    def progress(self, number: int, row: Sequence[Action]) -> int:
        if number < self.step:
            return self.behind.get(number, len(row))
        return self.place if number == self.step else 0


def progresses(
    workers: Mapping[int, PlannedWorker], views: Mapping[int, Any], changed: Mapping[int, Collection[int]]
) -> dict[str, list[Any]]:
    """How far all are, by worker as text. ``changed``: by rank, steps with rows of which it learns only now."""
    return {
        text_of(workers[rank]): StepProgress.from_plain(view["at"]).after(changed[rank]).to_plain()
        for rank, view in views.items()
    }


def summed_stages(workers: Mapping[int, PlannedWorker], views: Mapping[int, Any]) -> list[list[int]]:
    """Pairs of a step and a stage whose sum of gradients somebody has, from where each rank computes and has told."""
    found = {
        (int(number), workers[rank].stage)
        for rank, view in views.items()
        for number, facts in view["steps"].items()
        if facts["reduced"]
    }
    return [list(pair) for pair in sorted(found)]


def change_entry(
    number: int,
    vacant: Collection[PlannedWorker],
    views: Mapping[int, Any],
    at: Mapping[str, list[Any]],
    summed: Sequence[list[int]] = (),
    until: int | None = None,
) -> dict[str, Any]:
    """What :meth:`~shared_core.reroute.history.PlanHistory.change` takes, the same at every worker."""
    ready = sorted(set.intersection(*(set(view["ready"]) for view in views.values())))  # all have these plans
    failed = [list(worker) for worker in sorted(vacant)]
    return {"number": number, "failed": failed, "ready": ready, "at": at, "summed": summed, "until": until}


def text_of(worker: PlannedWorker) -> str:
    return f"{worker.pipeline}:{worker.stage}"


def worker_of(text: str) -> PlannedWorker:
    return PlannedWorker(*map(int, text.split(":")))


#: Records of changes that are kept for workers that missed them.
_KEPT = 8


@dataclass
class StepPlan:
    """The plan of one step, the same at all survivors: rows from the last change on, and what was done before it."""

    plan: IterationPlan
    done: dict[PlannedWorker, tuple[Action, ...]] = field(default_factory=dict)

    def awaits(self, action: Action) -> PlannedWorker | None:
        """Who has ``action`` in its row, a whole backward counting as its input gradients; None if nobody has."""
        if action.kind is Kind.OPT:
            return None
        host = self.plan.host(action.pipeline, action.stage, action.micro_batch)
        row = self.plan.schedule.rows.get(host, ())
        return host if any(_same(one, action) for one in row) else None


def _same(one: Action, other: Action) -> bool:
    kinds = {Kind.B: (Kind.B, Kind.I), Kind.I: (Kind.B, Kind.I)}.get(other.kind, (other.kind,))
    return one.kind in kinds and (one.stage, one.pipeline, one.micro_batch) == (
        other.stage,
        other.pipeline,
        other.micro_batch,
    )


class PlanHistory:
    """Plans of the steps under way.

    Attributes:
        number: of the last change; -1 before one.
        failed: places at which nobody computes, as of that change.
        entries: plain data of the last changes, oldest first.
        steps: plans by number of the step.
        extra: by step that the last change has planned again: by how much longer its work takes, as predicted.
        rest: by such a step: predicted time until all stages have made their update of it.
    """

    def __init__(self, planner: Plans) -> None:
        self._planner = planner
        self.extra: dict[int, float] = {}
        self.rest: dict[int, float] = {}
        self.number = -1
        self.failed: frozenset[PlannedWorker] = frozenset()
        self.entries: list[dict[str, Any]] = []
        self._changed: dict[int, frozenset[int]] = {}
        self.steps: dict[int, StepPlan] = {}

    def begin(self, step: int) -> StepPlan:
        """The plan of a step that this worker begins; plans of steps before the last one are dropped."""
        if step not in self.steps:
            self.steps[step] = StepPlan(self._planner.plan(self.failed, step))
        for old in [number for number in self.steps if number < step - 1]:
            del self.steps[old]
        return self.steps[step]

    def changed_since(self, number: int) -> frozenset[int]:
        """Steps that changes after number ``number`` have planned again."""
        return frozenset().union(*(steps for when, steps in self._changed.items() if when > number))

    def change(self, entry: Mapping[str, Any]) -> frozenset[int]:
        """A survivor group was formed: plan the steps under way again.

        Args:
            entry: plain data, the same at every worker: ``number``, which rises with each change; ``failed``, all
                places at which nobody computes, as (pipeline, stage); ``ready``, names of the times for which all have
                the plan for these failures; ``at``: for each worker that is there, as text, its :class:`StepProgress`;
                ``summed``: pairs of a step and a stage whose sum of gradients somebody has; ``until``, the first step
                that nobody can make as yet, or None: what was begun of it is begun again.

        Returns steps that have new rows, in which every worker is at place 0. Raises ConfigError if no worker can
        compute what a failed one had.
        """
        self.number = entry["number"]
        self.entries = [*self.entries, dict(entry)][-_KEPT:]
        failed = frozenset(PlannedWorker(*each) for each in entry["failed"])
        self._planner.choose(failed, entry["ready"])
        at = {worker_of(text): StepProgress.from_plain(data) for text, data in entry["at"].items()}
        summed: dict[int, set[int]] = {}
        for step, stage in entry["summed"]:
            summed.setdefault(step, set()).add(stage)
        fresh: set[int] = set()
        self.extra, self.rest = {}, {}
        first, newest = min(one.step for one in at.values()), max(one.step for one in at.values())
        if entry["until"] is not None:
            newest = min(newest, entry["until"] - 1)
        for number in range(first, newest + 1):
            if number not in self.steps:
                self.steps[number] = StepPlan(self._planner.plan(self.failed, number))
            before = self.steps[number]
            self.steps[number] = self._again(before, number, failed, at, summed.get(number, set()))
            if self.steps[number] is not before:
                fresh.add(number)
        for other in [number for number in self.steps if not first <= number <= newest]:
            del self.steps[other]  # it is over everywhere, nobody has begun it, or it is begun again
        self.failed = failed
        self._changed[self.number] = frozenset(fresh)
        self._changed = dict(list(self._changed.items())[-_KEPT:])
        return frozenset(fresh)

    def _again(
        self,
        step: StepPlan,
        number: int,
        failed: frozenset[PlannedWorker],
        at: Mapping[PlannedWorker, StepProgress],
        summed: set[int],
    ) -> StepPlan:
        rows = step.plan.schedule.rows
        progress = {worker: one.progress(number, rows.get(worker, ())) for worker, one in at.items()}
        # Whoever had the sum with the gradients of an earlier failed worker may have failed, too.
        again = {worker for worker in step.done if worker in failed and worker.stage not in summed}
        done = {worker: actions for worker, actions in step.done.items() if worker not in again}
        now = (failed - set(step.plan.failed)) | again
        if all(progress[worker] == len(rows.get(worker, ())) for worker in progress):
            return step  # nobody there has anything left to do
        if not any(progress.values()) and not done:
            fresh, staggered = self._planner.plan(failed, number), step.plan.variant is Variant.STAGGERED
            seconds = [self._planner.seconds(one.schedule, staggered) for one in (fresh, step.plan)]
            self.extra[number] = seconds[0] - seconds[1]
            self.rest[number] = self._planner.rest(fresh.schedule, staggered, ())
            return StepPlan(fresh)
        for worker in now:
            if worker.stage in summed:
                progress[worker] = len(rows.get(worker, ()))  # its gradients are in the sum that this peer has
            else:  # not known; a guess, for the prediction alone
                progress[worker] = max((progress[w] for w in at if w.stage == worker.stage), default=0)
        planner = self._planner
        rest: Remainder = replan(
            step.plan,
            progress,
            now,
            times=planner.planned_times(number),
            measured=planner.times,
            before=step.done,
            summed=summed,
            memory=planner.memory,
        )
        self.extra[number] = rest.extra
        there = [one for actions in rest.done.values() for one in actions]
        self.rest[number] = planner.rest(rest.plan.schedule, rest.plan.variant is Variant.STAGGERED, there)
        return StepPlan(rest.plan, dict(rest.done))
