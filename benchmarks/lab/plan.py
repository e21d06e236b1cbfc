"""``swiftctl lab plan``: what the survivors compute while workers fail."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.lab.draw import draw_file, draw_text
from shared_core.cli.arguments import number, whole
from shared_core.errors import ConfigError
from shared_core.schedule.normalise import Move, normalise
from shared_core.schedule.optimal import MISSING, has_solver
from shared_core.schedule.planner import IterationPlan, parse_worker, plan
from shared_core.schedule.problem import Memory, Variant
from shared_core.schedule.schedule import Topology
from shared_core.schedule.timing import StageTimes, Times, simulate

#: Workers and columns up to which the schedule is printed.
_ROWS, _COLUMNS = 64, 200


def add_command(commands: Any) -> None:
    """Add the command to the parsers of ``swiftctl``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="what the survivors compute while workers of a pipeline fail",
        description="Plan an iteration in which data-parallel peers compute a failed worker's micro-batches.",
    )
    parser.add_argument("--dp", type=whole(1), required=True, metavar="N", help="data-parallel pipelines")
    parser.add_argument("--pp", type=whole(1), required=True, metavar="N", help="stages of each pipeline")
    parser.add_argument(
        "--micro-batches", type=whole(1), required=True, metavar="N", help="of each pipeline in an iteration"
    )
    parser.add_argument(
        "--failed",
        action="append",
        default=[],
        metavar="D:S",
        help="a failed worker: pipeline:stage, from 0; repeatable",
    )
    parser.add_argument(
        "--variant", choices=[one.value for one in Variant], default=Variant.STAGGERED.value, help="default: staggered"
    )
    parser.add_argument(
        "--times",
        default="1,1,1,3,0",
        metavar="F,I,W,OPT,COMM",
        help="durations of forward, backward of input and of weights, optimizer, transfer (default: 1,1,1,3,0)",
    )
    parser.add_argument(
        "--memory", type=number(1.0), metavar="N", help="micro-batches that a worker can hold from F to W"
    )
    parser.add_argument(
        "--ordered", action="store_true", help="sums can be equal bit for bit: one peer for each failed worker"
    )
    parser.add_argument(
        "--normalise", action="store_true", help="survivors may take failed places of other stages first"
    )
    parser.add_argument(
        "--time-limit",
        type=number(),
        default=10.0,
        metavar="S",
        help="of the exact solver; 0: greedy only (default: 10)",
    )
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write a picture: .svg, .png or .txt")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        ConfigError: an option is wrong.
        InvalidSchedule: no order fits into the memory.
        MissingExtra, OSError: it cannot be drawn.
    """
    topology = Topology(options.dp, options.pp, options.micro_batches)
    times, memory, variant = _times(options.times), Memory(options.memory), Variant(options.variant)
    try:
        failed = tuple(sorted({parse_worker(text) for text in options.failed}))
    except ConfigError as error:
        raise ConfigError(f"--failed: {error}") from error
    moves: tuple[Move, ...] = ()
    if options.normalise:
        normalised = normalise(topology, failed, times=times, variant=variant)
        failed, moves = normalised.failed, normalised.moves
    found = plan(
        topology,
        failed,
        times=times,
        variant=variant,
        memory=memory,
        ordered=options.ordered,
        time_limit=_time_limit(options.time_limit),
    )
    timeline = simulate(found.schedule, times, staggered=variant is Variant.STAGGERED)
    if options.draw is not None:
        draw_file(timeline, options.draw, _summary(found))
    if options.json:
        named = [{"from": f"{one.source.pipeline}:{one.source.stage}", "to": _place(one)} for one in moves]
        print(json.dumps(found.to_dict() | {"moves": named}, indent=2), flush=True)
        return 0
    for move in moves:
        print(f"{move.source} takes the place of {move.target}")
    print(_summary(found))
    if len(timeline.rows) <= _ROWS and max(len(row) for row in timeline.rows.values()) <= _COLUMNS:
        print()
        print(draw_text(timeline), flush=True)
    return 0


def _place(move: Move) -> str:
    return f"{move.target.pipeline}:{move.target.stage}"


def _time_limit(seconds: float) -> float:
    """0 where OR-tools is not installed, said in one line."""
    if seconds > 0 and not has_solver():
        print(f"swiftctl: the plan is the greedy's: {MISSING}", file=sys.stderr)
        return 0.0
    return max(0.0, seconds)


def _times(text: str) -> Times:
    try:
        forward, first, second, optimizer, communication = map(float, text.split(","))
    except ValueError as error:
        raise ConfigError(f"--times needs five numbers F,I,W,OPT,COMM, got {text!r}") from error
    for value in (forward, first, second, optimizer, communication):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"--times needs five numbers of at least 0, got {text!r}")
    return Times((StageTimes(forward, first, second, optimizer),), communication)


def _summary(found: IterationPlan) -> str:
    failed = ", ".join(str(worker) for worker in found.failed) or "none"
    best = "optimal for this route" if found.optimal else f"at least {found.bound:g}"
    measure = "period" if found.variant is Variant.STAGGERED else "slots"
    return (
        f"{found.variant.value}, failed: {failed}; {found.slots:g} slots, period {found.period:g} "
        f"({measure} {best}; {found.solver})"
    )
