"""``swiftctl``: looks at what a job left behind, and plans for the next one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shared_core.cli import checkpoints, doctor, plan, policy, report, simulate, watch
from shared_core.cli.arguments import Parser, number, one_line
from shared_core.cli.event_files import add_arguments, read_run
from shared_core.errors import ConfigError, SwiftError
from shared_core.kinds import open_regular
from shared_core.pipeline.grouping import Budget, ChainProfile, GroupPlan, plan_groups, trade_off
from shared_core.report.plans import format_plans
from shared_core.report.timeline import ended, format_recoveries, format_timeline, recoveries


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; the exit status: 0, 1 if it cannot be done, 2 for wrong usage."""
    parser = _parser()
    options = parser.parse_args(argv)
    if "run" not in options:
        parser.error("COMMAND is missing: status, watch, doctor, events, report, checkpoints, lab")
    try:
        status: int = options.run(options)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        return 0
    except ConfigError as error:
        print(f"swiftctl: {one_line(error)}", file=sys.stderr)
        return 2
    except (SwiftError, OSError, ValueError) as error:  # what a file holds, or that it cannot be read or written
        print(f"swiftctl: {one_line(error)}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="swiftctl", description="Look at what a swiftrun job left behind, and plan.")
    parser.tell_version()
    commands: Any = parser.add_subparsers(metavar="COMMAND")
    watch.add_command(commands)
    doctor.add_command(commands)
    events = commands.add_parser(
        "events",
        help="print the failures and recoveries of a job",
        description="Print one row for each recovery of a job's newest run.",
    )
    add_arguments(events)
    events.add_argument("--all", action="store_true", help="print every event too")
    events.add_argument("--json", action="store_true", help="print the recoveries as JSON instead")
    events.set_defaults(run=_events)
    report.add_command(commands)
    checkpoints.add_command(commands)
    lab = commands.add_parser(
        "lab",
        help="plan, compare and simulate: for who chooses options of large jobs, or checks the papers",
        description="Plan, compare and simulate, without a job.",
    )
    lab.set_defaults(run=lambda _: lab.error("COMMAND is missing: plan, plan-logging, simulate, policy"))
    studies: Any = lab.add_subparsers(metavar="COMMAND")
    plan.add_command(studies)
    _add_plan_logging(studies)
    simulate.add_command(studies)
    policy.add_command(studies)
    return parser


def _add_plan_logging(commands: Any) -> None:
    logging = commands.add_parser(
        "plan-logging",
        help="which machines of a pipeline restart together, so that messages between them need no log",
        description="Print the plan that keeps within a budget or, without one, the trade-off of storage and time.",
    )
    logging.add_argument(
        "file", metavar="PROFILE.json", type=Path, help="what was measured; see docs/design/plan_logging.md"
    )
    logging.add_argument(
        "--storage", metavar="BYTES", type=number(most=1e300), help="most that all logs together may take"
    )
    logging.add_argument(
        "--bandwidth", metavar="BYTES", type=number(most=1e300), help="most that they may grow by in a second"
    )
    logging.add_argument("--curve", action="store_true", help="print the trade-off too, with the plan marked by a star")
    logging.add_argument("--json", action="store_true", help="print JSON instead")
    logging.set_defaults(run=_plan_logging)


def _events(options: argparse.Namespace) -> int:
    chosen = read_run(options.file, options.wanted)
    grouped = recoveries(chosen.events)
    if options.json:
        print(json.dumps([one.to_dict() for one in grouped], indent=2), flush=True)
        if chosen.others:
            print(f"swiftctl: {chosen.others}", file=sys.stderr)
        return 0
    print(format_recoveries(grouped, chosen.events[0].time))
    if options.all:
        print(f"\n{format_timeline(chosen.events, color=sys.stdout.isatty())}", flush=True)
    else:
        print(f"\n{ended(chosen.events)}; --all prints all {len(chosen.events)} events", flush=True)
    if chosen.others:
        print(f"\n{chosen.others}", flush=True)
    return 0


def _plan_logging(options: argparse.Namespace) -> int:
    try:
        with open_regular(options.file) as file:
            profile = ChainProfile.from_dict(json.loads(file.read()))
    except (OSError, ValueError, RecursionError) as error:
        print(
            f"swiftctl: cannot read {options.file}: {one_line(error)}; see docs/design/plan_logging.md", file=sys.stderr
        )
        return 1
    chosen = plan_groups(profile, Budget(options.storage, options.bandwidth))
    budgeted = options.storage is not None or options.bandwidth is not None
    plans = trade_off(profile) if options.curve or not budgeted else [chosen]
    if options.json:
        print(json.dumps([_plan_to_dict(one) for one in plans], indent=2), flush=True)
    else:
        print(format_plans(plans, chosen if budgeted else None), flush=True)
    return 0


def _plan_to_dict(plan: GroupPlan) -> dict[str, object]:
    return asdict(plan) | {"logged": plan.logged}


if __name__ == "__main__":
    sys.exit(main())
