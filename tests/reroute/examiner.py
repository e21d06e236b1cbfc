"""Examines plans as JSON. It shares no code with the planner, so that a mistake there is not made here again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_ACTION = re.compile(r"(\d+)([FIWB])(\d+)(?:@(\d+))?")
#: Iterations after which a staggered plan counts as steady; as many again are measured.
_STEADY = 24

#: Stage, kind, micro-batch, home pipeline.
Step = tuple[int, str, int, int]


class Wrong(AssertionError):
    """What a plan has wrong."""


@dataclass(frozen=True)
class Case:
    """What a plan was asked for.

    Attributes:
        durations: of F, I, W, B and OPT at each stage.
        own: of workers, as text, that differ from their stage.
        transfer: between stages.
        apart: the data of a failed first stage come from the last one.
        room: micro-batches that each worker, as text, can hold.
        done: what each worker has run already of an iteration under way.
    """

    durations: Sequence[Mapping[str, float]]
    own: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    transfer: float = 0.0
    apart: bool = False
    room: Mapping[str, float] = field(default_factory=dict)
    done: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def takes(self, name: str, kind: str) -> float:
        """What an action of that kind takes at a worker."""
        return self.own.get(name, self.durations[_place(name)[1]])[kind]


def parsed(row: Sequence[str], home: int) -> list[Step]:
    """A row without the optimizer, which must be its last entry if it is there."""
    steps = []
    for at, text in enumerate(row):
        if text.endswith("OPT"):
            if at != len(row) - 1:
                raise Wrong(f"{text} is not the last")
            continue
        match = _ACTION.fullmatch(text)
        if match is None:
            raise Wrong(f"{text!r} is no action")
        stage, kind, index, at_home = match.groups()
        steps.append((int(stage), kind, int(index), home if at_home is None else int(at_home)))
    return steps


def examine(plan: Mapping[str, Any], case: Case) -> dict[str, int]:
    """Everything that must hold of a plan.

    Returns:
        The most micro-batches that each worker holds at once.

    Raises:
        Wrong: something does not.
    """
    rows, before = _rows(plan["workers"]), _rows(case.done)
    _covers(plan, rows, before)
    held = {name: _most_held(before.get(name, []), row) for name, row in rows.items()}
    for name, most in held.items():
        if most > case.room.get(name, most):
            raise Wrong(f"{name} holds {most}, and has room for {case.room[name]:g}")
    if plan["ordered"]:
        _in_order(rows, before)
    starts, ends = _run(plan, rows, before, case, {})
    _one_at_a_time(rows, starts, ends)
    begin = min((starts[name, 0] for name, row in rows.items() if row), default=0.0)
    slots = max(ends.values(), default=0.0) - begin
    if not case.done:
        period = _period(plan, rows, case)
        _same(plan["period"], period, "period")
        if plan["variant"] != "staggered":
            _same(plan["slots"], slots, "slots")
        if (period if plan["variant"] == "staggered" else slots) < plan["bound"] * (1 - 1e-9):
            raise Wrong(f"{period:g} or {slots:g} is less than the bound {plan['bound']:g}")
    return held


def _rows(named: Mapping[str, Sequence[str]]) -> dict[str, list[Step]]:
    return {name: parsed(row, _place(name)[0]) for name, row in named.items()}


def _place(name: str) -> tuple[int, int]:
    pipeline, stage = name[1:].split("_")
    return int(pipeline), int(stage)


def _same(said: float, found: float, what: str) -> None:
    if abs(said - found) > 1e-6 * max(1.0, found):
        raise Wrong(f"it says {said:g} for the {what}, which is {found:g}")


def _covers(plan: Mapping[str, Any], rows: Mapping[str, list[Step]], before: Mapping[str, list[Step]]) -> None:
    """Every micro-batch passes every stage at one worker: its own, or the one of the route."""
    failed = {tuple(map(int, text.split(":"))) for text in plan["failed"]}
    if any(_place(name) in failed for name in rows):
        raise Wrong("a failed worker has a row")
    ran: dict[tuple[int, int, int], list[tuple[str, str]]] = {}
    for part in (before, rows):
        for name, row in part.items():
            for stage, kind, index, home in row:
                if stage != _place(name)[1]:
                    raise Wrong(f"{name} runs stage {stage}")
                ran.setdefault((home, stage, index), []).append((kind, name))
    wanted = {
        (d, s, j) for d in range(plan["pipelines"]) for s in range(plan["stages"]) for j in range(plan["micro_batches"])
    }
    if set(ran) != wanted:
        raise Wrong(f"missing or too many: {sorted(set(ran) ^ wanted)}")
    for (d, s, j), those in ran.items():
        if sorted(kind for kind, _ in those) not in (["B", "F"], ["F", "I", "W"]):
            raise Wrong(f"micro-batch {j} of pipeline {d} at stage {s} has {those}")
        host = f"W{plan['route'][f'{d}:{s}'][j]}_{s}" if (d, s) in failed else f"W{d}_{s}"
        names = {name for _, name in those}
        if len(names) != 1 or (host not in names and not before):
            raise Wrong(f"micro-batch {j} of pipeline {d} at stage {s} is at {names}, not at {host}")


def _most_held(before: list[Step], row: list[Step]) -> int:
    """From the start of F to the end of W, or of B."""
    held = most = 0
    for _, kind, _, _ in [*before, *row]:
        held += {"F": 1, "I": 0, "W": -1, "B": -1}[kind]
        most = max(most, held)
    return most


def _in_order(rows: Mapping[str, list[Step]], before: Mapping[str, list[Step]]) -> None:
    for name, row in rows.items():
        last: dict[int, int] = {}
        for _, kind, index, home in [*before.get(name, []), *row]:
            if kind in "WB":
                if index < last.get(home, -1):
                    raise Wrong(f"{name} adds micro-batch {index} of pipeline {home} too late")
                last[home] = index


def _run(
    plan: Mapping[str, Any],
    rows: Mapping[str, list[Step]],
    before: Mapping[str, list[Step]],
    case: Case,
    ready: Mapping[int, float],
) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
    """Starts and ends by worker and place in its row: passes over all rows until nothing can continue."""
    ends_of: dict[tuple[str, int, int, int], float] = {}
    for row in before.values():
        for stage, kind, index, home in row:
            ends_of["G" if kind in "IB" else kind, stage, index, home] = -case.transfer
    starts: dict[tuple[str, int], float] = {}
    ends: dict[tuple[str, int], float] = {}
    position = dict.fromkeys(rows, 0)
    free = {name: ready.get(_place(name)[1], 0.0) for name in rows}
    last, going = plan["stages"] - 1, True
    while going:
        going = False
        for name, row in rows.items():
            while position[name] < len(row):
                stage, kind, index, home = row[position[name]]
                inputs: list[tuple[tuple[str, int, int, int], float]] = []
                if kind == "F" and stage > 0:
                    inputs = [(("F", stage - 1, index, home), case.transfer)]
                elif kind in "IB":
                    inputs = [(("F", stage, index, home), 0.0)]
                    inputs += [(("G", stage + 1, index, home), case.transfer)] if stage < last else []
                elif kind == "W":
                    inputs = [(("G", stage, index, home), 0.0)]
                if any(key not in ends_of for key, _ in inputs):
                    break
                start = max([free[name], *(ends_of[key] + way for key, way in inputs)])
                if kind == "F" and stage == 0 and case.apart and home != _place(name)[0]:
                    start = max(start, ready.get(last, 0.0) + case.transfer)
                starts[name, position[name]] = start
                free[name] = ends[name, position[name]] = start + case.takes(name, kind)
                ends_of["G" if kind in "IB" else kind, stage, index, home] = free[name]
                position[name] += 1
                going = True
    stuck = [name for name, row in rows.items() if position[name] < len(row)]
    if stuck:
        raise Wrong(f"{stuck} wait for ever")
    return starts, ends


def _one_at_a_time(
    rows: Mapping[str, list[Step]], starts: Mapping[tuple[str, int], float], ends: Mapping[tuple[str, int], float]
) -> None:
    for name, row in rows.items():
        for at in range(1, len(row)):
            if starts[name, at] < ends[name, at - 1]:
                raise Wrong(f"{name} runs {row[at - 1]} and {row[at]} at once")


def _period(plan: Mapping[str, Any], rows: Mapping[str, list[Step]], case: Case) -> float:
    """Run iterations one after the other, and see how long one takes once they repeat."""
    ready, marks = dict.fromkeys(range(plan["stages"]), 0.0), []
    for _ in range(2 * _STEADY if plan["variant"] == "staggered" else 2):
        marks.append(max(ready.values()))
        _, ends = _run(plan, rows, {}, case, ready)
        over = {s: ready[s] for s in ready}
        for (name, _), end in ends.items():
            stage = _place(name)[1]
            over[stage] = max(over[stage], end)
        if plan["variant"] != "staggered":
            over = dict.fromkeys(over, max(over.values()))
        ready = {
            s: end + max(case.takes(name, "OPT") for name in rows if _place(name)[1] == s) for s, end in over.items()
        }
    if plan["variant"] != "staggered":
        return marks[1] - marks[0]
    return (marks[-1] - marks[_STEADY - 1]) / _STEADY
