"""Checks of a schedule with times, for tests of those that make them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shared_core.errors import InvalidSchedule
from shared_core.schedule.schedule import Action, Kind, PlannedWorker
from shared_core.schedule.timing import Slot

#: Two times closer than this, relative to the larger, are the same.
_SAME = 1e-9


def check_times(rows: Mapping[PlannedWorker, Sequence[Slot]], communication: float = 0.0) -> None:
    """Nothing runs before its inputs are there, and no worker does two things at once.

    Raises:
        InvalidSchedule: names the first action that is wrong.
    """
    ends: dict[tuple[Kind, int, int, int], float] = {}
    stages = 1 + max((worker.stage for worker in rows), default=0)
    for row in rows.values():
        for action, _, end in row:
            made = Kind.I if action.kind is Kind.B else action.kind
            ends[made, action.pipeline, action.stage, action.micro_batch] = end
    for worker, row in rows.items():
        busy, holder = -math.inf, ""
        for action, start, end in sorted(row, key=lambda slot: slot.start):
            name = f"{action.text(worker)} of {worker}"
            if start < busy - _SAME * max(1.0, abs(busy)):
                raise InvalidSchedule(f"{name} starts at {start:g}, while {holder} runs until {busy:g}")
            busy, holder = end, action.text(worker)
            for kind, stage in _inputs(action, stages):
                needed = action._replace(kind=kind, stage=stage)
                arrival = ends.get((kind, action.pipeline, stage, action.micro_batch), math.inf)
                arrival += communication if stage != action.stage else 0.0
                if start < arrival - _SAME * max(1.0, abs(arrival)):
                    raise InvalidSchedule(f"{name} starts at {start:g}, but {needed} is there at {arrival:g} only")


def _inputs(action: Action, stages: int) -> list[tuple[Kind, int]]:
    if action.kind is Kind.F:
        return [(Kind.F, action.stage - 1)] if action.stage else []
    if action.kind is Kind.W:
        return [(Kind.I, action.stage)]
    if action.kind is Kind.OPT:
        return []
    inputs = [(Kind.F, action.stage)]
    return [*inputs, (Kind.I, action.stage + 1)] if action.stage + 1 < stages else inputs
