"""``swiftctl lab simulate``: what systems make of a job that loses workers as a trace says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lab.simulations import draw_results, format_results, result_to_dict
from benchmarks.simulate import choices
from benchmarks.simulate.engine import SimulationResult, simulate
from benchmarks.simulate.generators import FORMS
from benchmarks.simulate.rerouting import MeasuredStalls
from shared_core.cli.arguments import number, whole
from shared_core.errors import ConfigError
from shared_core.kinds import MOST

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``simulate`` to the commands of ``swiftctl``."""
    times, measured = choices.SystemTimes(), MeasuredStalls()
    command = commands.add_parser(
        "simulate",
        help="compare systems on a trace of failures",
        description="Simulate a job on a trace of failures; see docs/design/simulator.md for models and inputs.",
    )
    forms = ", ".join(f"{name}:{form}" for name, form in FORMS.items())
    command.add_argument("--trace", metavar="TRACE", default="gcp", help=f"a file, gcp (24 workers), {forms}")
    command.add_argument(
        "--workers", metavar="N", type=whole(1), help="number of workers, for a trace that does not name it"
    )
    command.add_argument("--stages", metavar="N", type=whole(1), default=4, help="pipeline stages (4)")
    command.add_argument(
        "--micro-batches",
        metavar="N",
        type=whole(1),
        help="micro-batches of each pipeline in a step (3 times --stages)",
    )
    command.add_argument(
        "--systems",
        metavar="NAME",
        nargs="+",
        default=list(choices.DEFAULT),
        help="systems to compare; an unknown name lists all",
    )
    command.add_argument(
        "--hours", metavar="H", type=number(above=True), help="length of the trace in hours (24, or the whole file)"
    )
    command.add_argument("--seed", metavar="N", type=whole(-MOST), default=0, help="seed of everything random (0)")
    command.add_argument(
        "--spares", metavar="N", type=whole(), default=0, help="spare workers, which take over at once"
    )
    seconds = (
        ("--step-s", 10.0, "a step without failures"),
        ("--write-s", times.write_s, "stall of a checkpoint"),
        ("--restart-s", times.restart_s, "restart from a checkpoint"),
        ("--copy-s", times.copy_s, "moving a worker's state"),
        ("--reconfigure-s", times.reconfigure_s, "stall of Oobleck"),
    )
    for flag, value, text in seconds:
        kind = number(above=flag in ("--step-s", "--write-s"))
        command.add_argument(flag, metavar="S", type=kind, default=value, help=f"{text} ({value:g})")
    command.add_argument(
        "--interval-s",
        metavar="S",
        type=number(above=True),
        help="seconds of work between checkpoints (Young's formula)",
    )
    command.add_argument(
        "--layers",
        metavar="N",
        type=whole(1),
        default=times.layers,
        help="layers of the model; only Oobleck uses it (32)",
    )
    command.add_argument(
        "--overhead",
        metavar="X",
        type=number(above=True),
        default=measured.overhead,
        help=f"step time with this system over that without ({measured.overhead:g}, measured on CPU)",
    )
    command.add_argument(
        "--fault-free", metavar="X", type=number(above=True), help="samples/s without failures: adds a column"
    )
    command.add_argument("--json", action="store_true", help="print JSON instead")
    command.add_argument("--plot", metavar="FILE", type=Path, help="draw it, as PNG, SVG or PDF")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    results = _simulate(options)
    if options.plot is not None:
        draw_results(results, options.plot)
    if options.json:
        print(json.dumps([result_to_dict(one) for one in results], indent=2), flush=True)
    else:
        print(format_results(results, options.fault_free), flush=True)
    return 0


def _simulate(options: argparse.Namespace) -> list[SimulationResult]:
    trace = choices.trace_of(options.trace, options.workers, options.hours, options.seed)
    if options.workers is not None and options.workers != trace.workers:
        raise ConfigError(f"the trace {options.trace} has {trace.workers} workers, not {options.workers}")
    trace = trace.with_spares(options.spares)
    micro_batches = options.micro_batches if options.micro_batches is not None else 3 * options.stages
    layout = choices.layout_of(trace.workers, options.stages, micro_batches, options.step_s)
    times = choices.SystemTimes(
        write_s=options.write_s,
        restart_s=options.restart_s,
        interval_s=options.interval_s,
        layers=options.layers,
        reconfigure_s=options.reconfigure_s,
        copy_s=options.copy_s,
    )
    measured = MeasuredStalls(overhead=options.overhead, copy_s=options.copy_s)
    known = choices.systems(layout, times, measured, choices.mtbf_of(trace))
    return [simulate(trace, system) for system in choices.choose(options.systems, known)]
