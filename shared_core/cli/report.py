"""``swiftctl report``: what happened in a job, as an HTML page and as a trace."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from shared_core.cli.arguments import whole
from shared_core.cli.event_files import add_arguments, read_run
from shared_core.errors import ConfigError
from shared_core.report.history import history_of
from shared_core.report.metrics import read_curve
from shared_core.report.page import to_page
from shared_core.report.trace import to_trace


def add_command(commands: Any) -> None:
    """Add the command to the parser's."""
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
