"""``swiftctl``: looks at jobs and what they left behind, asks a running one, and plans for the next."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from shared_core.cli import checkpoints, doctor, drain, lab, report, watch
from shared_core.cli.arguments import Parser, one_line
from shared_core.cli.event_files import add_arguments, read_run
from shared_core.errors import ConfigError, SwiftError
from shared_core.report.timeline import ended, format_recoveries, format_timeline, recoveries


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; the exit status: 0, 1 if it cannot be done, 2 for wrong usage."""
    parser = _parser()
    options = parser.parse_args(argv)
    if "run" not in options:
        parser.error("COMMAND is missing: status, watch, doctor, events, drain, report, checkpoints, lab")
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
    drain.add_command(commands)
    report.add_command(commands)
    checkpoints.add_command(commands)
    lab.add_command(commands)
    return parser


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


if __name__ == "__main__":
    sys.exit(main())
