"""``swiftctl lab policy``: when each checkpoint policy would make checkpoints in a given job, and what that costs."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lab.policies import draw_policies, format_policies, policy_to_dict
from shared_core.checkpoint import history
from shared_core.checkpoint.cost import Cost
from shared_core.checkpoint.curve import Curve
from shared_core.checkpoint.history import RunEnding, from_history
from shared_core.checkpoint.policy import POLICIES
from shared_core.cli.arguments import number, whole
from shared_core.errors import ConfigError, MissingExtra
from shared_core.kinds import LONGEST_S, MOST

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from benchmarks.simulate.policies import PolicyResult

_NUMBERS = (
    ("--hours", 24.0, "useful hours of the job"),
    ("--step-s", 1.0, "a step with all workers"),
    ("--epoch-s", 600.0, "an epoch, after which `fixed` makes a checkpoint"),
    ("--stall-s", 1.0, "stall of a checkpoint"),
    ("--slowdown-s", 0.0, "time by which steps take longer in all while it is written"),
    ("--persist-s", 0.0, "until it is durable"),
    ("--restart-s", 60.0, "from a fault until training continues"),
    ("--mtbf-h", 8.0, "hours between faults of the whole job that roll back"),
    ("--abrupt", 0.0, "share of early ends that leave only a durable checkpoint"),
    ("--price", 0.0, "of a checkpoint beyond time, in units of the loss"),
    ("--power", 0.5, "of the loss, which falls like (step + shift)^-power from 1"),
    ("--shift", 500.0, "in steps"),
)
_MAY_BE_ZERO = frozenset({"--stall-s", "--slowdown-s", "--persist-s", "--restart-s", "--abrupt", "--price", "--shift"})


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``policy`` to the commands of ``swiftctl``."""
    command = commands.add_parser(
        "policy",
        help="compare checkpoint policies for a job",
        description="Show when each policy makes checkpoints and, with --simulate, what that costs; see "
        "docs/checkpoints.md.",
    )
    for flag, value, text in _NUMBERS:
        kind = number(above=flag not in _MAY_BE_ZERO, most=1.0 if flag == "--abrupt" else LONGEST_S)
        command.add_argument(flag, metavar="X", type=kind, default=value, help=f"{text} ({value:g})")
    command.add_argument(
        "--end-h", metavar="H", type=number(above=True), help="mean hours until an early end (there is none)"
    )
    command.add_argument("--history", metavar="FILE", type=Path, help="job history that tells of early ends instead")
    command.add_argument("--curve", metavar="FILE", type=Path, help="recorded losses, as CSV rows step,loss, instead")
    command.add_argument(
        "--workers", metavar="H:N,...", default="0:1", help="from which useful hour on there are how many (0:1)"
    )
    command.add_argument("--policies", metavar="NAME", nargs="+", default=list(POLICIES), help="which (all)")
    command.add_argument("--simulate", action="store_true", help="simulate many lives of the job")
    command.add_argument("--lives", metavar="N", type=whole(1), default=4000, help="how many (4000)")
    command.add_argument("--seed", metavar="N", type=whole(-MOST), default=0, help="for everything that is drawn (0)")
    command.add_argument("--json", action="store_true", help="print JSON instead")
    command.add_argument("--plot", metavar="FILE", type=Path, help="draw it, as PNG, SVG or PDF")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    results = _compare(options)
    if options.plot is not None:
        draw_policies(results, options.plot)
    if options.json:
        print(json.dumps([policy_to_dict(one) for one in results], indent=2), flush=True)
    else:
        print(format_policies(results), flush=True)
    return 0


def _compare(options: argparse.Namespace) -> list[PolicyResult]:
    if options.stall_s + options.slowdown_s <= 0:
        raise ConfigError("a checkpoint must cost something: give --stall-s or --slowdown-s")
    try:
        from benchmarks.simulate.placing import Recorded, SimulatedJob
        from benchmarks.simulate.policies import compare
    except ImportError as error:
        raise MissingExtra("simulating needs NumPy: pip install 'swift-recovery[all]'") from error
    job = SimulatedJob(
        Recorded.from_csv(options.curve)
        if options.curve is not None
        else Curve(0.0, (options.shift + 1) ** options.power, options.power, options.shift),
        options.hours,
        Cost(options.stall_s, options.slowdown_s, options.persist_s),
        options.mtbf_h,
        _ending(options),
        restart_s=options.restart_s,
        step_s=options.step_s,
        epoch_s=options.epoch_s,
        workers=_workers(options.workers),
        price=options.price,
    )
    return compare(job, options.policies, options.lives if options.simulate else 0, options.seed)


def _ending(options: argparse.Namespace) -> RunEnding:
    if options.history is None:
        return RunEnding.constant(1 / (options.end_h * 3600) if options.end_h is not None else 0.0, options.abrupt)
    if not options.history.exists():
        raise FileNotFoundError(f"--history {options.history}: there is no such file")
    found = from_history(history.read(options.history))
    if found is None:
        raise ConfigError(f"the job history {options.history} holds no run that has trained")
    return found


def _workers(text: str) -> tuple[tuple[float, int], ...]:
    try:
        pairs = [each.split(":") for each in text.split(",")]
        found = tuple((float(hour) * 3600, int(count)) for hour, count in pairs)
    except ValueError as error:
        raise ConfigError(f"--workers must look like 0:8,2:4, not {text!r}") from error
    hours = [hour for hour, _ in found]
    if (
        not all(map(math.isfinite, hours))
        or hours[0] != 0
        or hours != sorted(set(hours))
        or min(count for _, count in found) < 1
    ):
        raise ConfigError(f"--workers must begin at hour 0, ascend, and have at least one worker, not {text!r}")
    return found
