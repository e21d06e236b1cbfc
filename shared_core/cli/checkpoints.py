"""``swiftctl checkpoints``: what lies in a folder of checkpoints, and what the next start of each command does."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared_core.checkpoint import lineage, store
from shared_core.checkpoint.command import Command
from shared_core.checkpoint.lineage import Contents, Next
from shared_core.checkpoint.storage import check_place, open_storage
from shared_core.cli import arguments
from shared_core.errors import ConfigError, SwiftError
from shared_core.report.text import columns, in_bytes


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoints",
        help="list and verify checkpoints, and say what the next start of each command does",
        description="Print one row for each checkpoint, then a line for each command: what its next start does. The "
        "exit status is 1 if none would continue from a checkpoint.",
    )
    parser.add_argument("dir", metavar="DIR", help="checkpoint.dir of the job: a folder or a URL")
    parser.add_argument(
        "--for",
        dest="command",
        metavar="SCRIPT ARG",
        nargs=argparse.REMAINDER,
        help="say only what the next start of this command does; comes last",
    )
    parser.add_argument(
        "--world-size", type=arguments.whole(1), metavar="N", help="consider only checkpoints of N workers"
    )
    parser.add_argument("--fast", action="store_true", help="do not read the parts to compare their checksums")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=_run)


@dataclass(frozen=True)
class _Row:
    """What lies in the folder of a step."""

    found: store.Found
    run: str
    ended: bool

    @property
    def whole(self) -> bool:
        return self.found.state in ("valid", "unchecked")


def _run(options: argparse.Namespace) -> int:
    if options.command is not None and not options.command:
        raise ConfigError("--for needs the command: SCRIPT ARG ...")
    try:
        storage = check_place("DIR", options.dir)
        if not storage.exists():
            raise FileNotFoundError("there is no such folder")
        contents = lineage.contents(storage)
        rows = _rows(options.dir, check=not options.fast, contents=contents)
    except (OSError, SwiftError) as error:
        print(f"swiftctl: cannot read {options.dir}: {arguments.one_line(error)}", file=sys.stderr)
        return 2
    following = _following(options, contents, rows)
    picked = [each.saved for each in following if each.saved is not None]
    if options.json:
        told = {"next": [_next_to_dict(each) for each in following], "pick": picked[-1].step if picked else None}
        print(json.dumps(told | {"found": [_to_dict(row) for row in rows]}, indent=2))
    else:
        _print(options, contents, rows, following)
    return 0 if picked else 1


def _rows(where: str, *, check: bool, contents: Contents) -> list[_Row]:
    rows = []
    for folder in lineage.folders(open_storage(where)):
        for found in store.survey(folder.storage, check=check):
            saved = found.checkpoint
            run = saved.run if saved is not None else folder.run
            ended = run in contents.ended_of(saved.command.key if saved is not None else folder.command)
            rows.append(_Row(found, run, ended))
    return sorted(rows, key=lambda row: (lineage.age_key(row.run), row.run, row.found.step))


def _following(options: argparse.Namespace, contents: Contents, rows: Sequence[_Row]) -> list[Next]:
    """What the next start of each command does, or of the one that was named."""
    whole = [row.found.checkpoint for row in rows if row.whole]

    def fits(each: store.Checkpoint) -> bool:
        return each in whole and options.world_size in (None, each.meta.get("world_size"))

    commands = contents.commands()
    if options.command:
        named = _named(options.command)
        commands = [each for each in commands if each.key in {one.key for one in named}][-1:] or named[:1]
    return [lineage.next_start(contents, each, fits) for each in commands]


def _named(words: Sequence[str]) -> list[Command]:
    """A command as ``swiftrun`` knows it, and as a script with a Checkpointer does."""
    target, args = words[0], list(words[1:])
    path = os.path.abspath(target)
    if target == "-m" and args:
        return [Command.of(args[0], args[1:], "module")]
    return [Command.of(path, args, "script"), Command.of(path, args)]


def _print(options: argparse.Namespace, contents: Contents, rows: Sequence[_Row], following: Sequence[Next]) -> None:
    picked = {(each.saved.run, each.saved.step) for each in following if each.saved is not None and not each.reason}
    table = [["", "run", "step", "time", "workers", "size", "state", "ended", "command"]]
    for row in rows:
        saved = row.found.checkpoint
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved.time)) if saved is not None else ""
        count = saved.meta.get("world_size", "") if saved is not None else ""
        mark = "*" if (row.run, row.found.step) in picked and row.whole else ""
        command = saved.command.short if saved is not None else ""
        cells = [mark, row.run, row.found.step, when, count, in_bytes(row.found.bytes), row.found.state]
        table.append([*map(str, cells), "yes" if row.ended else "no", command])
    if rows:
        print(columns(table))
        for row in rows:
            if row.found.reason:
                print(f"run {row.run or 'unknown'}, step {row.found.step}: {row.found.reason}")
        print()
    else:
        print(f"nothing in {options.dir}")
    unsure = " (if its parts are whole: they were not read)" if options.fast else ""
    for each in following:
        print(_line(options, contents, each) + (unsure if each.saved is not None else ""))
    if not following:
        print("every command starts from scratch: there is no checkpoint")
    sys.stdout.flush()


def _line(options: argparse.Namespace, contents: Contents, following: Next) -> str:
    """What the next start does; of a command that has nothing here, in the words in which it will say so itself."""
    key = following.command.key
    if any(each.command.key == key for each in contents.saved):
        return str(following)
    said = lineage.left_behind(options.dir, key, "--resume-from", continues=True, again="--resume")
    return said or str(following)


def _to_dict(row: _Row) -> dict[str, Any]:
    saved = row.found.checkpoint
    return {
        "run": row.run,
        "step": row.found.step,
        "time": saved.time if saved is not None else None,
        "state": row.found.state,
        "ended": row.ended,
        "reason": row.found.reason,
        "bytes": row.found.bytes,
        "path": str(saved.path) if saved is not None else None,
        "meta": dict(saved.meta) if saved is not None else None,
        "parts": dict(saved.parts) if saved is not None else None,
    }


def _next_to_dict(following: Next) -> dict[str, Any]:
    saved = following.saved
    return {
        "command": following.command.words,
        "key": following.command.key,
        "step": saved.step if saved is not None else None,
        "run": saved.run if saved is not None else None,
        "continues": saved is not None and not following.reason,
        "why": following.reason,
    }
