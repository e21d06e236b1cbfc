"""``swiftctl drain``: a worker, or all of a machine, gives its place to others at a step boundary."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shared_core.cli.watch import JOB, job_folder
from shared_core.errors import SwiftError
from shared_core.protocol.leaving import AGREED, ANSWER_BYTES, LEAVE
from shared_core.system.jobdir import AGENT
from shared_core.transport import local


def add_command(commands: Any) -> None:
    drain = commands.add_parser(
        "drain",
        help="have a worker, or all of a machine, leave a running job, and others take over",
        description="Have a rank, or all ranks of a host, leave a job at the next step boundary; others take over.",
    )
    drain.add_argument("who", metavar="RANK|HOST", help="a rank, or the name or address of a machine")
    drain.add_argument("job", metavar="JOB", nargs="?", help=JOB)
    drain.set_defaults(run=_drain)


def _drain(options: argparse.Namespace) -> int:
    print(ask(job_folder(options.job), options.who), flush=True)
    return 0


def ask(job_dir: Path, who: str) -> str:
    """Ask the launcher on this machine. Returns what will be. Raises SwiftError if it refuses, or does not answer."""
    try:
        with local.connect(job_dir / AGENT) as link:
            link.send(LEAVE, data=[who.encode()])
            answer = link.receive(lambda _: ANSWER_BYTES)
    except OSError as error:
        raise SwiftError(f"the launcher of the job does not answer ({error}); is swiftrun alive?") from error
    text = answer.data.decode(errors="replace")
    if answer.kind != AGREED:
        raise SwiftError(text)
    return text
