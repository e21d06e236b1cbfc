"""``swiftctl``: looks at jobs and what they left behind, asks a running one, and plans for the next."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from shared_core.cli import checkpoints, doctor, report, watch
from shared_core.cli.arguments import Parser, one_line
from shared_core.errors import ConfigError, SwiftError

#: The clone, where these files are in one.
ROOT = Path(__file__).resolve().parents[2]
COMMANDS = "plan, plan-logging, simulate, policy"


def _add_lab(commands: Any) -> None:
    """Add ``lab`` to the commands of ``swiftctl``: with those of ``benchmarks/lab`` in a clone; elsewhere each of them
    ends with one line that says what it needs.
    """
    lab = commands.add_parser(
        "lab",
        help="plan, compare and simulate: for who chooses options of large jobs, or checks the papers",
        description="Plan, compare and simulate, without a job. These commands need a clone of the repository.",
    )
    missing = f"COMMAND is missing: {COMMANDS}"
    if (ROOT / "benchmarks" / "lab" / "__init__.py").is_file():
        if sys.path[0] != str(ROOT):  # before a package of that name in the current folder
            sys.path.insert(0, str(ROOT))
        lab.set_defaults(run=lambda _: lab.error(missing))
        importlib.import_module("benchmarks.lab").add_commands(lab.add_subparsers(metavar="COMMAND"))
    else:
        lab.add_argument("words", metavar="COMMAND", nargs=argparse.REMAINDER, help=COMMANDS)
        lab.set_defaults(run=lambda options: _refuse(options.words[0]) if options.words else lab.error(missing))


def _refuse(command: str) -> NoReturn:
    raise ConfigError(
        f"swiftctl lab {command} needs a clone of the repository, and this is an installed package: run "
        "pip install -e . in a clone, and try again"
    )


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
    _add_lab(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
