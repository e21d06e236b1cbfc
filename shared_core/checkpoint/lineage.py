"""The runs in a folder of checkpoints: which command each is of, and with which of them its next start goes on.

Each run has a folder of its own, so that nobody ever writes to, or removes, what is another's::

    DIR/train-3fa2b1c0-20261122T083801-9c01d2/step-0000000040/...   script, command, and the name of the run
    DIR/train-3fa2b1c0-20261122T083801-9c01d2/ended.json            it has ended well
    DIR/step-0000000040/..., DIR/ended/RUN                          as earlier versions left them

Names of runs begin with their time, so they sort by age; those of earlier versions do not, and count as the oldest.
Does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shared_core.checkpoint import store
from shared_core.checkpoint.command import Command
from shared_core.checkpoint.storage import Storage, open_storage
from shared_core.errors import CorruptFile, SwiftError
from shared_core.events import console

#: A file in a run's folder, and a folder of earlier versions: the run has ended well.
ENDED, _ENDED_BEFORE = "ended.json", "ended"
_STAMPED = r"\d{8}T\d{6}-[0-9a-f]{6}"
_FOLDER = re.compile(rf".+-(?P<command>[0-9a-f]{{8}})-(?P<run>{_STAMPED}|[0-9a-f]{{12}})")


def new_run() -> str:
    """A name that no other run has."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def age_key(run: str) -> str:
    """Sorts runs by age, the oldest first."""
    return run if re.fullmatch(_STAMPED, run) else ""


def folder_of(where: str, command: Command, run: str) -> str:
    """Where a run's checkpoints lie."""
    return f"{where.rstrip('/')}/{command.stem}-{command.key[:8]}-{run}"


def meta_of(
    top: int,
    version: int,
    *,
    session: str,
    run: str,
    command: Command,
    world_size: int,
    continues: bool,
    adopted: str,
    attempt: int = 0,
    job: str = "",
) -> dict[str, Any]:
    """What a checkpoint says of itself; equal on all ranks.

    Args:
        top: batch tops passed.
        version: updates made.
        session: a name that no other attempt has.
        run: a name that a run keeps over all restarts.
        command: the program and its arguments.
        world_size: ranks of the job.
        continues: the next start of the command goes on with it.
        adopted: what the run was told to begin with; empty for nothing.
        attempt: number of the session in its job.
        job: name of the launcher's job; none without one.
    """
    who = {"attempt": attempt, "session": session, "job": job, "run": run, "adopted": adopted}
    what = {"command": command.key, "words": command.words, "continues": continues}
    return who | what | {"world_size": world_size, "top": top, "version": version}


def command_of(meta: Mapping[str, Any]) -> Command:
    """The command that a checkpoint names."""
    return Command(str(meta.get("command", "")), str(meta.get("words", "")))


@dataclass(frozen=True)
class Folder:
    """A folder with the checkpoints of one run, or of several in the layout of earlier versions.

    Attributes:
        storage: where it lies.
        run: whose it is; empty for the layout of earlier versions.
        command: how the key of its command begins; empty likewise.
    """

    storage: Storage
    run: str = ""
    command: str = ""

    def ended(self) -> frozenset[str]:
        """Runs in it that have ended well.

        Raises:
            OSError: the storage cannot be read.
        """
        if not self.run:
            return frozenset(self.storage.names(_ENDED_BEFORE))
        return frozenset({self.run} if ENDED in self.storage.names() else ())

    def saved(self) -> list[Saved]:
        """Its committed checkpoints, oldest first.

        Raises:
            OSError: the storage cannot be read.
        """
        return [Saved(found) for found in store.committed(self.storage)]


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint of a run.

    Attributes:
        checkpoint: itself; its parts were not looked at.
    """

    checkpoint: store.Checkpoint

    @property
    def step(self) -> int:
        """Batch tops passed."""
        return self.checkpoint.step

    @property
    def run(self) -> str:
        """Whose it is."""
        return str(self.checkpoint.meta.get("run", ""))

    @property
    def command(self) -> Command:
        """Of the run."""
        return command_of(self.checkpoint.meta)

    @property
    def time(self) -> float:
        """When it was committed, in seconds since the epoch; 0 where nobody knows."""
        if self.checkpoint.time:
            return self.checkpoint.time
        path = self.checkpoint.storage.local(f"{self.checkpoint.folder}/{store.MANIFEST}")
        with suppress(OSError):
            return path.stat().st_mtime if path is not None else 0.0
        return 0.0


@dataclass(frozen=True)
class Contents:
    """What a folder of checkpoints holds.

    Attributes:
        saved: committed checkpoints.
        ended: by the beginning of a command's key (empty: unknown), its runs that have ended well.
    """

    saved: tuple[Saved, ...] = ()
    ended: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def ended_of(self, key: str) -> frozenset[str]:
        """Runs of a command that have ended well."""
        return self.ended.get(key[:8], frozenset()) | self.ended.get("", frozenset())

    def commands(self) -> list[Command]:
        """Those that have checkpoints here, in the order of their newest runs."""
        newest: dict[str, tuple[str, Command]] = {}
        for each in self.saved:
            found = age_key(each.run), each.command
            newest[each.command.key] = max(newest.get(each.command.key, found), found, key=lambda pair: pair[0])
        return [command for _, command in sorted(newest.values(), key=lambda pair: (pair[0], pair[1].key))]


def folders(where: store.Where, key: str | None = None) -> Iterator[Folder]:
    """The folders of all runs (or of those of one command), the oldest layout first; only their names are read.

    Raises:
        OSError: the storage cannot be read.
    """
    storage = open_storage(where) if isinstance(where, str | os.PathLike) else where
    own = _FOLDER.fullmatch(storage.root.rstrip("/").rpartition("/")[2])
    if own is not None:  # somebody has named the folder of one run
        yield Folder(storage, own["run"], own["command"])
        return
    yield Folder(storage)
    for name in storage.names():
        match = _FOLDER.fullmatch(name)
        if match is not None and (key is None or match["command"] == key[:8]):
            yield Folder(open_storage(f"{storage.root.rstrip('/')}/{name}"), match["run"], match["command"])


def contents(where: store.Where, key: str | None = None) -> Contents:
    """What a folder holds (of one command, or of all); only manifests are read.

    Raises:
        OSError: the storage cannot be read.
        SwiftError: nobody knows such storage.
    """
    saved: list[Saved] = []
    ended: dict[str, frozenset[str]] = {}
    for each in folders(where, key):
        saved += [one for one in each.saved() if key is None or one.command.key == key]
        ended[each.command] = ended.get(each.command, frozenset()) | each.ended()
    return Contents(tuple(saved), ended)


def goes_on(run: str, ended: Iterable[str]) -> bool:
    """Whether the next start of a command may go on with one of its runs: neither it nor a later one has ended.

    Args:
        run: of the command.
        ended: runs of the command that have ended well.
    """
    ends = set(ended)
    return run not in ends and all(age_key(run) >= age_key(other) for other in ends)


def candidates(found: Contents, key: str) -> list[Saved]:
    """With what the next start of a command may go on: of its newest run first, and of that the newest first."""
    ended = found.ended_of(key)
    mine = [each for each in found.saved if each.command.key == key and goes_on(each.run, ended)]
    return sorted(mine, key=lambda each: (age_key(each.run), each.step), reverse=True)


def adoptable(where: str) -> list[Saved]:
    """What ``--resume-from`` may mean, the newest first: the checkpoint whose folder is named, or all in a folder.

    Raises:
        OSError: the storage cannot be read.
        SwiftError: nobody knows such storage.
    """
    parent, _, name = where.rstrip("/").rpartition("/")
    step = store.step_of(name)
    if step is not None:
        with suppress(CorruptFile):
            return [Saved(store.load_manifest(parent or "/", step))]
        return []
    return sorted(contents(where).saved, key=lambda each: (each.time, each.step), reverse=True)


def first_whole(found: Iterable[Saved], say: Callable[[str], None] = console) -> Saved | None:
    """The first one all of whose checksums hold; others are passed over with a line each."""
    for each in found:
        try:
            store.verify(each.checkpoint)
        except (CorruptFile, OSError) as error:
            say(f"checkpoint {each.checkpoint.path} is passed over: {error}")
        else:
            return each
    return None


# -- what is said ---------------------------------------------------------------------------------


def left_behind(where: str, key: str, how: str, *, goes_on: bool, again: str) -> str:
    """Why a start of a command starts from scratch, although there are checkpoints; empty if there are none.

    Args:
        where: the folder.
        key: of the command.
        how: the option that adopts what is another's.
        goes_on: it would have gone on with a checkpoint of its own.
        again: the option that has it do so.
    """
    try:
        found = contents(where, key)
        other = _newest(where) if not found.saved else None
    except (OSError, SwiftError):
        return ""  # said where it is read or written
    if other is not None:
        whose = f"of another command ({other.command.short})"
        return f"{where} holds step {other.step} {whose}; this run starts from scratch; {how} adopts it"
    rest = candidates(found, key)
    if found.saved and not rest:
        newest = max(found.saved, key=lambda each: (age_key(each.run), each.step))
        ended = "of this command, which has ended"
        return f"{where} holds step {newest.step} {ended}; this run starts from scratch; {how} adopts it"
    if rest and not goes_on:
        return f"{where} holds step {rest[0].step} of this command; this run starts from scratch; {again} continues it"
    return ""


def _newest(where: str) -> Saved | None:
    """The newest checkpoint of the newest run that has any, of whatever command."""
    for each in sorted(folders(where), key=lambda each: age_key(each.run), reverse=True):
        if saved := each.saved():
            return max(saved, key=lambda one: (one.time, one.step))
    return None


def next_start(found: Contents, command: Command, whole: Callable[[Saved], bool] = lambda each: True) -> Next:
    """What the next start of a command does.

    Args:
        found: what the folder holds.
        command: which one.
        whole: whether a checkpoint can be read.
    """
    rest = candidates(found, command.key)
    picked = next((each for each in rest if whole(each)), None)
    if picked is not None:
        asked = bool(picked.checkpoint.meta.get("continues", True))
        return Next(command, picked, "" if asked else "it was started without --resume")
    mine = [each for each in found.saved if each.command.key == command.key]
    if mine and not rest:
        return Next(command, None, "its last run has ended")
    return Next(command, None, "none of its checkpoints is whole" if mine else "there is no checkpoint of it")


@dataclass(frozen=True)
class Next:
    """What the next start of a command does.

    Attributes:
        command: which one.
        saved: what it goes on from, or would with ``--resume``; None for nothing.
        reason: why it starts from scratch; empty if it goes on.
    """

    command: Command
    saved: Saved | None
    reason: str = ""

    def __str__(self) -> str:
        who = f"the next start of '{self.command.short}'"
        if self.saved is None:
            return f"{who} starts from scratch: {self.reason}"
        if self.reason:
            return f"{who} starts from scratch: {self.reason}, with which it continues from step {self.saved.step}"
        return f"{who} continues from step {self.saved.step}"


# -- ends -----------------------------------------------------------------------------------------


def mark_ended(folder: str, step: int) -> None:
    """Say that the run whose folder this is has ended well: the next start of its command starts from scratch.

    Raises:
        OSError: it cannot be written.
    """
    payload = json.dumps({"step": step, "time": time.time()}).encode()
    open_storage(folder).write(ENDED, [payload], len(payload))


def forget_ended(folder: str, meta: Mapping[str, Any]) -> None:
    """Remove the checkpoints of earlier runs of the same command that have ended well.

    Args:
        folder: of the run that has taken their place.
        meta: of its checkpoints.
    """
    where, _, own = folder.rstrip("/").rpartition("/")
    if _FOLDER.fullmatch(own) is None:
        return
    key, run = str(meta.get("command", "")), str(meta.get("run", ""))
    for each in folders(where, key):
        if not each.run or age_key(each.run) >= age_key(run) or not each.ended():
            continue
        if all(one.command.key == key for one in each.saved()):
            if each.storage.is_link():
                continue  # somebody keeps it elsewhere
            for step in store.steps(each.storage):
                if store.made_here(each.storage, step):
                    store.remove(each.storage, step)
            if not store.steps(each.storage):
                each.storage.remove(ENDED)
            each.storage.remove_folder("")
