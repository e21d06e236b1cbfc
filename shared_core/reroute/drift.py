"""When a job changes to new times: what one worker decides from the reports of all, as pure functions.

In every :data:`EVERY`-th step each worker reports its medians to the first worker of the last stage. When the times
that follow have drifted in :data:`STEADY` reports in a row, that worker proposes them to all, with its losses of
micro-batches. Plans for them are made in the background, and reports say who has the one that is needed. When all have
it, the worker tells all, again with the losses, that the new times hold from the next step on. Nobody begins that step
without having heard it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from shared_core.reroute.times import Medians, agree, drifts
from shared_core.schedule.schedule import PlannedWorker
from shared_core.schedule.timing import Times

#: Steps from one report to the next, and steps of which medians are taken.
EVERY = 4
#: Reports in a row that must show a drift.
STEADY = 2


class Word(IntEnum):
    NOTHING = 0
    PROPOSAL = 1  # new times, for which plans are to be made; they follow
    SWITCH = 2  # the times of the last proposal hold from the next step on


@dataclass(frozen=True)
class Reported:
    """Medians of a worker, empty from one that has just come, and the proposal that it has the plan for, or -1."""

    medians: Medians
    ready: int = -1


@dataclass(frozen=True)
class Deliberation:
    """The state of the worker that decides. It starts from scratch when workers come or go.

    Attributes:
        number: the step in which the last proposal was made; -1 before one.
        proposed: times of a proposal that do not hold yet; None when there is none.
        seen: reports in a row that have shown a drift.
    """

    number: int = -1
    proposed: Times | None = None
    seen: int = 0


def decide(
    before: Deliberation, step: int, reports: Mapping[PlannedWorker, Reported], used: Times, stages: int
) -> tuple[Deliberation, Word]:
    """What to say after the reports of ``step``, and the new state. ``reports`` are of all workers that are there."""
    if before.proposed is not None and all(one.ready == before.number for one in reports.values()):
        return Deliberation(before.number), Word.SWITCH
    found = agree(((worker, one.medians) for worker, one in reports.items()), stages, used)
    if found is None or not drifts(found, before.proposed or used, reports):
        return replace(before, seen=0), Word.NOTHING
    if before.seen + 1 < STEADY:
        return replace(before, seen=before.seen + 1), Word.NOTHING
    return Deliberation(step, found), Word.PROPOSAL
