"""When a job goes by new times: what one worker decides from what all report, as pure functions of that.

In every :data:`EVERY`-th step each worker reports its medians to the first worker of the last stage. If the times that
come out have drifted from those in use in :data:`STEADY` reports in a row, that worker proposes them to all, with its
losses of micro-batches. Plans for them are made in the background, and reports say who has the one that is needed. When
all have it, the word goes out, again with the losses, that the new times hold from the next step on. Nobody begins that
step without having heard it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from shared_core.reroute.times import Medians, agree, drifts
from shared_core.schedule.schedule import Worker
from shared_core.schedule.timing import Times

#: Steps from one report to the next, and steps of which medians are taken.
EVERY = 4
#: Reports in a row that must show a drift.
STEADY = 2


class Word(IntEnum):
    """What goes out with the losses of a step."""

    NOTHING = 0
    PROPOSAL = 1  # new times, for which plans are to be made; they follow
    SWITCH = 2  # the times of the last proposal hold from the next step on


@dataclass(frozen=True)
class Reported:
    """What a worker reports.

    Attributes:
        medians: of its durations; empty if it has just come.
        ready: number of the proposal for which it has the plan that is needed, -1 for none.
    """

    medians: Medians
    ready: int = -1


@dataclass(frozen=True)
class Deliberation:
    """How far the worker that decides is; starts from scratch when workers come or go.

    Attributes:
        number: of the last proposal, which is the step in which it was made; -1 before one.
        proposed: its times, None when they hold.
        seen: reports in a row that have shown a drift.
    """

    number: int = -1
    proposed: Times | None = None
    seen: int = 0


def decide(
    before: Deliberation, step: int, reports: Mapping[Worker, Reported], used: Times, stages: int
) -> tuple[Deliberation, Word]:
    """What to say after the reports of a step.

    Args:
        before: where deliberation stands.
        step: number of the step.
        reports: of all workers that are there.
        used: times in use.
        stages: how many there are.
    """
    if before.proposed is not None and all(one.ready == before.number for one in reports.values()):
        return Deliberation(before.number), Word.SWITCH
    found = agree(((worker, one.medians) for worker, one in reports.items()), stages, used)
    if found is None or not drifts(found, before.proposed or used, reports):
        return replace(before, seen=0), Word.NOTHING
    if before.seen + 1 < STEADY:
        return replace(before, seen=before.seen + 1), Word.NOTHING
    return Deliberation(step, found), Word.PROPOSAL
