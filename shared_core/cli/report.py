"""``swiftctl events`` and ``report``: what happened in a job, as a table, as an HTML page and as a trace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_core.cli.arguments import whole
from shared_core.errors import ConfigError, NoEvents
from shared_core.events import Event, by_run, read_events
from shared_core.report.history import history_of
from shared_core.report.metrics import read_curve
from shared_core.report.page import to_page
from shared_core.report.timeline import NO_ID, ended, format_recoveries, format_runs, format_timeline, recoveries
from shared_core.report.trace import to_trace


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
    newest run if None. Raises NoEvents for a file without events, ConfigError if no run is meant, or several are.
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


def add_events(commands: Any) -> None:
    events = commands.add_parser(
        "events",
        help="print the failures and recoveries of a job",
        description="Print one row for each recovery of a job's newest run.",
    )
    add_arguments(events)
    events.add_argument("--all", action="store_true", help="print every event too")
    events.add_argument("--json", action="store_true", help="print the recoveries as JSON instead")
    events.set_defaults(run=_events)


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
        print(f"\n{format_timeline(chosen.events)}", flush=True)
    else:
        print(f"\n{ended(chosen.events)}; --all prints all {len(chosen.events)} events", flush=True)
    if chosen.others:
        print(f"\n{chosen.others}", flush=True)
    return 0


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="write what happened in a job as one HTML file",
        description="Write a job's newest run as one HTML file: timeline, recoveries, what was saved, environment.",
    )
    add_arguments(parser)
    parser.add_argument("--out", metavar="FILE.html", type=Path, help="where to (default: report.html)")
    parser.add_argument(
        "--trace", metavar="FILE.json", type=Path, help="write a trace for Perfetto (ui.perfetto.dev) too"
    )
    parser.add_argument(
        "--metrics",
        metavar="FILE",
        type=Path,
        help="CSV (such as metrics.csv of Lightning) or JSON lines, for the curve",
    )
    parser.add_argument("--metric", metavar="NAME", help="of the curve; by default the first with loss in its name")
    parser.add_argument(
        "--checkpoint-every",
        metavar="STEPS",
        type=whole(1),
        help="compare with restarts from checkpoints made so often; by default from those that the job made",
    )
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    chosen = read_run(options.file, options.wanted)
    metric, why_not = None, ""
    if options.metrics is not None:
        try:
            metric = read_curve(options.metrics, options.metric)
        except ConfigError as error:
            why_not = f"{error}. The page has no curve"
    found = history_of(chosen.events)
    written = [options.out or Path("report.html")]
    written[0].write_text(to_page(found, metric, options.checkpoint_every), encoding="utf-8")
    if options.trace is not None:
        options.trace.write_text(json.dumps(to_trace(found), separators=(",", ":")) + "\n", encoding="utf-8")
        written.append(options.trace)
    for path in written:
        print(path)
    for said in filter(None, (why_not, chosen.others)):
        print(f"swiftctl: {said}", file=sys.stderr)
    return 0
