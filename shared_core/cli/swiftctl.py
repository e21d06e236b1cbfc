"""``swiftctl``: looks at what a job left behind."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from shared_core.events import Event, read_events
from shared_core.report.timeline import format_recoveries, format_timeline, recoveries


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; the exit status: 0, 1 if a file cannot be read, 2 for wrong usage."""
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="swiftctl", description="Look at what a swiftrun job left behind.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    events = commands.add_parser(
        "events",
        help="print the timeline of a job: losses and recoveries",
        description="Print every event of a job, then one row for each recovery.",
    )
    events.add_argument("file", metavar="FILE", type=Path, help="events.jsonl of the job")
    events.add_argument("--json", action="store_true", help="print the recoveries as JSON instead")
    events.set_defaults(run=_events)
    return parser


def _events(options: argparse.Namespace) -> int:
    try:
        found = _read(options.file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"swiftctl: cannot read {options.file}: {error}; it must be the events.jsonl of a job", file=sys.stderr)
        return 1
    grouped = recoveries(found)
    if options.json:
        print(json.dumps([one.to_dict() for one in grouped], indent=2), flush=True)
        return 0
    print(format_timeline(found, color=sys.stdout.isatty()))
    print()
    print(format_recoveries(grouped, found[0].time if found else 0.0), flush=True)
    return 0


def _read(path: Path) -> list[Event]:
    return list(read_events(path))


if __name__ == "__main__":
    sys.exit(main())
