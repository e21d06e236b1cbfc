"""Schedules of three pipelines with four stages and six micro-batches, worker (1, 2) failed, that others have found.

``golden_3x4x6.json`` holds proven optima: start slots (from 1) and operations, micro-batches numbered through all
pipelines from 1 and starred where another pipeline's worker computes them. ``DRAWN`` are the orders in ReCycle's
slides, with 15's W and 10's F, which the drawings leave out.
"""

from __future__ import annotations

import json
from pathlib import Path

from shared_core.schedule.schedule import Action, Kind, PlannedWorker, Schedule, Topology
from shared_core.schedule.timing import Slot

TOPOLOGY = Topology(3, 4, 6)
FAILED = PlannedWorker(1, 2)
_FILE = Path(__file__).with_name("golden_3x4x6.json")

DRAWN = {
    "W0_0": "F1 F2 F3 F4 B1 F5 B2 F6 B3 B4 B5 B6",
    "W0_1": "F1 F2 F3 B1 F4 B2 F5 B3 F6 B4 B5 B6",
    "W0_2": "F1 F7 F2 F3 I1 I7 F9 B2 F4 I3 I9 F5 F11 I4 F6 I5 I11 W1 B6 W7 W3 W9 W4 W11 W5",
    "W0_3": "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6",
    "W1_0": "F7 F8 F9 F10 B7 F11 B8 F12 B9 B10 B11 B12",
    "W1_1": "F7 F8 F9 B7 F10 B8 F11 B9 F12 B10 B11 B12",
    "W1_3": "F7 B7 F8 B8 F9 B9 F10 B10 F11 B11 F12 B12",
    "W2_0": "F13 F14 F15 F16 B13 F17 B14 F18 B15 B16 B17 B18",
    "W2_1": "F13 F14 F15 B13 F16 B14 F17 B15 F18 B16 B17 B18",
    "W2_2": "F13 F14 F8 B13 F15 I14 I8 F16 F10 I15 F17 I16 I10 F18 F12 B17 W14 I18 I12 W16 W8 W18 W10 W15 W12",
    "W2_3": "F13 B13 F14 B14 F15 B15 F16 B16 F17 B17 F18 B18",
}


def drawn() -> Schedule:
    """The schedule of the slides."""
    return Schedule({_worker(name): tuple(_action(name, one) for one in row.split()) for name, row in DRAWN.items()})


def optimum(variant: str) -> dict[PlannedWorker, tuple[Slot, ...]]:
    """The proven optimum with its times, ``decoupled`` or ``staggered``."""
    rows = {}
    for name, row in json.loads(_FILE.read_text())[variant].items():
        slots = []
        for entry in row.split():
            start, operation = entry.split(":")
            action = _action(name, operation)
            begin = float(start) - 1
            slots.append(Slot(action, begin, begin + (2 if action.kind is Kind.B else 1)))
        rows[_worker(name)] = tuple(slots)
    return rows


def untimed(rows: dict[PlannedWorker, tuple[Slot, ...]]) -> Schedule:
    """The orders alone."""
    return Schedule({worker: tuple(slot.action for slot in row) for worker, row in rows.items()})


def _worker(name: str) -> PlannedWorker:
    pipeline, stage = name.removeprefix("W").split("_")
    return PlannedWorker(int(pipeline), int(stage))


def _action(name: str, operation: str) -> Action:
    pipeline, index = divmod(int(operation[1:].rstrip("*")) - 1, TOPOLOGY.micro_batches)
    return Action(_worker(name).stage, Kind(operation[0]), index, pipeline)
