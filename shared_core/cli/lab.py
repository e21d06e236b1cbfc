"""``swiftctl lab``: what a clone of the repository has for who plans and compares without a job."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any, NoReturn

from shared_core.errors import ConfigError

#: The clone, where these files are in one.
ROOT = Path(__file__).resolve().parents[2]
COMMANDS = "plan, plan-logging, simulate, policy"


def add_command(commands: Any) -> None:
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
