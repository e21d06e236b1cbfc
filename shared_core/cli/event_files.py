"""Which run of an event file a command is about."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared_core.errors import ConfigError, NoEvents
from shared_core.events import Event, by_run, read_events
from shared_core.report.timeline import NO_ID, format_runs


@dataclass(frozen=True)
class Chosen:
    """One run of a file.

    Attributes:
        events: of it, at least one.
        others: a line about the other runs; empty if there are none.
    """

    run: str
    events: list[Event]
    others: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``FILE`` and ``--run``."""
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        nargs="?",
        default=Path("events.jsonl"),
        help="of the job's events; events.jsonl by default",
    )
    parser.add_argument(
        "--run",
        dest="wanted",
        metavar="ID",
        help="the run to show, or how its id begins; the newest one by default",
    )


def read_run(path: Path, wanted: str | None) -> Chosen:
    """The run that is meant; says on stderr how many lines cannot be read. ``wanted``: beginning of the run's id; the
    newest run if None.

    Raises:
        NoEvents: the file cannot be read, or holds no event.
        ConfigError: no run is meant, or several are.
    """
    torn: list[str] = []
    try:
        runs = by_run(read_events(path, torn))
    except OSError as error:
        raise NoEvents(f"cannot read {path}: {error}; it must be the events.jsonl of a job") from error
    if not runs:
        raise NoEvents(f"cannot read {path}: it holds no event; it must be the events.jsonl of a job")
    if torn:
        lines = "1 line" if len(torn) == 1 else f"{len(torn)} lines"
        print(f"swiftctl: {lines} of {path} cannot be read in full", file=sys.stderr)
    run = _chosen(list(runs), wanted)
    return Chosen(run, runs[run], format_runs(run, [(each, events[0].time) for each, events in runs.items()]))


def _chosen(runs: Sequence[str], wanted: str | None) -> str:
    """The id of the run to show. Raises ConfigError if no run is meant, or several are."""
    if wanted is None:
        return runs[-1]
    meant = [""] if wanted == NO_ID and "" in runs else [run for run in runs if run and run.startswith(wanted)]
    if wanted in meant:
        meant = [wanted]
    if len(meant) != 1:
        which = "is several" if meant else "is none"
        raise ConfigError(f"--run {wanted} {which} of the file's runs: {', '.join(run or NO_ID for run in runs)}")
    return meant[0]
