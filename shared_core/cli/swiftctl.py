"""``swiftctl``: looks at jobs and what they left behind, asks a running one, and plans for the next."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from shared_core.cli import checkpoints, doctor, lab, report, watch
from shared_core.cli.arguments import Parser, one_line
from shared_core.errors import ConfigError, SwiftError


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
    report.add_events(commands)
    watch.add_drain(commands)
    report.add_command(commands)
    checkpoints.add_command(commands)
    lab.add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
