"""``swiftctl status``, ``watch`` and ``drain``: a job on this machine, while it runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared_core.cli.arguments import number
from shared_core.errors import ConfigError, SwiftError
from shared_core.events import by_run, read_events
from shared_core.protocol.leaving import AGREED, ANSWER_BYTES, LEAVE
from shared_core.system.jobdir import AGENT, Card, jobs_here
from shared_core.transport import local
from shared_core.watch.follower import Follower
from shared_core.watch.text import format_jobs, format_view

#: Before each view: the screen is cleared on a terminal, elsewhere a line divides them.
_CLEAR, _LINE = "\x1b[H\x1b[J", "\n" + "-" * 72 + "\n"
JOB = (
    "how the run's id begins, the --rdzv-id, the pid of swiftrun, or the job's events.jsonl; may be left out where one "
    "job runs on this machine"
)


def add_command(commands: Any) -> None:
    status = commands.add_parser(
        "status",
        help="how a running job is: workers, failures, stalls, the last checkpoint",
        description="Print how a job on this machine is.",
    )
    status.add_argument("job", metavar="JOB", nargs="?", help=JOB)
    status.add_argument("--json", action="store_true", help="print JSON instead")
    status.set_defaults(run=_status)
    watch = commands.add_parser(
        "watch",
        help="the same again and again, until the job ends",
        description="Show how a job on this machine is, until it ends or Ctrl-C is pressed.",
    )
    watch.add_argument("job", metavar="JOB", nargs="?", help=JOB)
    watch.add_argument(
        "--every",
        metavar="SECONDS",
        type=number(0.1, 3600.0),
        default=1.0,
        help="seconds between two looks. Default: 1.",
    )
    watch.set_defaults(run=_watch)


def _status(options: argparse.Namespace) -> int:
    view = _follower(options.job).view()
    print(json.dumps(view.to_dict(), indent=2) if options.json else format_view(view), flush=True)
    return 0


def _watch(options: argparse.Namespace) -> int:
    follower, before = _follower(options.job), _CLEAR if sys.stdout.isatty() else ""
    with suppress(KeyboardInterrupt):  # which is how it is meant to be ended
        while True:
            view = follower.view()
            print(before + format_view(view), flush=True)
            if view.over:
                break
            before = before or _LINE
            time.sleep(options.every)
    return 0


def _follower(job: str | None) -> Follower:
    """Follows the job that is meant. Raises as :func:`job_folder`; OSError if the file of events cannot be read."""
    if job is not None and (path := Path(job)).exists():
        return _of_file(path, list(jobs_here()))
    return Follower(job_folder(job))


def job_folder(job: str | None) -> Path:
    """The private folder of the job that is meant, on this machine. Raises ConfigError if none is meant, or several
    are; SwiftError if no job runs here.
    """
    here = list(jobs_here())
    meant = [(folder, card) for folder, card in here if job is None or _is_meant(card, job)]
    if len(meant) == 1:
        if job is None:
            print("swiftctl: the only job of this user that runs on this machine", file=sys.stderr)
        return meant[0][0]
    if not here:
        what = "no job of this user runs on this machine"
        raise SwiftError(
            f"{what}; to see one that has ended, name its events.jsonl" if job is None else f"{job}: {what}"
        )
    if job is None:
        print(
            format_jobs([(card.run, card.script, card.agent, card.begun) for _, card in here], time.time()),
            file=sys.stderr,
        )
        example = here[0][1].run[:4] or str(here[0][1].agent)
        raise ConfigError(f"{len(meant)} jobs run on this machine: name one of them, as in 'swiftctl status {example}'")
    runs = ", ".join(card.run[:12] for _, card in meant or here)
    raise ConfigError(f"{job} is {'several' if meant else 'none'} of the jobs on this machine: {runs}")


def _of_file(path: Path, here: list[tuple[Path, Card]]) -> Follower:
    """Follows the newest run in a file; where it runs here, its processes too."""
    if not path.is_file():
        raise OSError(f"{path} is not a regular file; it must be the events.jsonl of a job")
    runs = by_run(read_events(path))
    if not runs:
        raise OSError(f"cannot read {path}: it must be the events.jsonl of a job")
    newest = next(reversed(runs))
    folder = next((folder for folder, card in here if card.run == newest), None)
    return Follower(folder) if folder is not None else Follower(None, path, newest)


def _is_meant(card: Card, job: str) -> bool:
    return card.run.startswith(job) or job in (card.name, str(card.agent))


def add_drain(commands: Any) -> None:
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
