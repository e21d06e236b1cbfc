"""How far each worker is when a survivor group is formed, and the change of plans that follows, as plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from shared_core.schedule.schedule import Action, PlannedWorker


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
