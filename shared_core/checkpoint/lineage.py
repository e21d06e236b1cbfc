"""The runs in a folder of checkpoints: which command each is of, and with which of them its next start continues.

Each run has a folder of its own, so that nobody ever writes to, or removes, what is another's::

    DIR/train-3fa2b1c0-20261122T083801-9c01d2/step-0000000040/...   script, command, and the name of the run
    DIR/train-3fa2b1c0-20261122T083801-9c01d2/ended.json            it has ended well

Names of runs begin with their time, so they sort by age. A new name is later than all that are there, whatever the
clock says: one that was ahead, or is behind, hides no run. Does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from shared_core.checkpoint import run_lock, store
from shared_core.checkpoint.command import Command
from shared_core.checkpoint.storage import Storage, open_storage
from shared_core.checkpoint.store import Checkpoint, PassedOver
from shared_core.errors import CorruptFile, NoUsableCheckpoint, SwiftError
from shared_core.events import console

#: A file in a run's folder: the run has ended well.
ENDED = "ended.json"
#: In the place of a run's name: the folder may hold any.
_ANY = "unknown"
_STAMPED = r"\d{8}T\d{6}-[0-9a-f]{6}"
_FOLDER = re.compile(rf".+-(?P<command>[0-9a-f]{{8}})-(?P<run>{_STAMPED})")


def new_run(earlier: Iterable[str] = ()) -> str:
    """A name that no other run has, and that sorts after those of earlier ones."""
    stamps = [int(run[:8] + run[9:15]) + 1 for run in earlier if age_key(run)]
    text = f"{min(max(int(_now()), *stamps, 0), 10**14 - 1):014d}"
    return f"{text[:8]}T{text[8:]}-{secrets.token_hex(3)}"


def next_run(where: str, command: Command) -> str:
    """A name for a run of a command: later than all that it has there, as far as the storage can be read."""
    earlier: list[str] = []
    with suppress(OSError, SwiftError):
        earlier += [each.run for each in folders(where, command.key)]
    return new_run(earlier)


def _now() -> str:
    return time.strftime("%Y%m%d%H%M%S", time.gmtime())


def age_key(run: str) -> str:
    """Sorts runs by age, the oldest first; empty for what is no name of a run."""
    return run if re.fullmatch(_STAMPED, run) else ""


def folder_of(where: str, command: Command, run: str) -> str:
    return f"{where.rstrip('/')}/{command.stem}-{command.key[:8]}-{run}"


def meta_of(
    boundary: int,
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
    """Metadata of a checkpoint; equal on all ranks.

    Args:
        session: a name that no other attempt has.
        run: a name that a run keeps over all restarts.
        continues: the next start of the command continues with it.
        adopted: what the run was told to begin with; empty for nothing.
        job: name of the launcher's job; empty without one.
    """
    who = {"attempt": attempt, "session": session, "job": job, "run": run, "adopted": adopted}
    what = {"command": command.key, "words": command.words, "continues": continues}
    return who | what | {"world_size": world_size, "boundary": boundary, "version": version}


@dataclass(frozen=True)
class Folder:
    """A folder with the checkpoints of one run, or whatever checkpoints somebody has put into it. All reads may
    raise OSError.

    Attributes:
        run: whose it is; empty where its name does not tell.
        command: how the key of its command begins; empty likewise.
    """

    storage: Storage
    run: str = ""
    command: str = ""

    def ended(self) -> frozenset[str]:
        """Runs in it that have ended well."""
        return frozenset({self.run} if self.run and ENDED in self.storage.names() else ())

    def read(self) -> tuple[list[Checkpoint], list[PassedOver]]:
        """Its checkpoints, and those that are there and cannot be used."""
        found, passed = store.read_all(self.storage)
        return found, [replace(each, run=self.run) for each in passed]


@dataclass(frozen=True)
class Contents:
    """What a folder of checkpoints holds.

    Attributes:
        ended: by the beginning of a command's key, its runs that have ended well.
        passed: checkpoints and folders of runs that are there and cannot be used; those without a run may be anybody's.
    """

    saved: tuple[Checkpoint, ...] = ()
    ended: Mapping[str, frozenset[str]] = field(default_factory=dict)
    passed: tuple[PassedOver, ...] = ()

    def ended_of(self, key: str) -> frozenset[str]:
        return self.ended.get(key[:8], frozenset())

    def continues(self, run: str, key: str) -> bool:
        """Whether a command's next start may continue with a run of it: neither that nor a later one has ended well."""
        ends = self.ended_of(key)
        return run not in ends and all(age_key(run) >= age_key(other) for other in ends)

    def unusable(self, key: str) -> list[PassedOver]:
        """What the next start of a command would look at, and cannot use; of the newest run first."""
        found = [each for each in self.passed if not each.run or self.continues(each.run, key)]
        return sorted(found, key=lambda each: (age_key(each.run), each.step), reverse=True)

    def commands(self) -> list[Command]:
        """Those that have checkpoints here, in the order of their newest runs."""
        newest: dict[str, tuple[str, Command]] = {}
        for each in self.saved:
            found = age_key(each.run), each.command
            newest[each.command.key] = max(newest.get(each.command.key, found), found, key=lambda pair: pair[0])
        return [command for _, command in sorted(newest.values(), key=lambda pair: (pair[0], pair[1].key))]


def folders(where: store.Where, key: str | None = None) -> Iterator[Folder]:
    """The folders of all runs (or of those of one command), and this one itself; reads names only. Raises OSError."""
    storage = open_storage(where) if isinstance(where, str | os.PathLike) else where
    own = _FOLDER.fullmatch(storage.root.rstrip("/").rpartition("/")[2])
    if own is not None:  # ``where`` is the folder of one run
        yield Folder(storage, own["run"], own["command"])
        return
    yield Folder(storage)
    for name in storage.names():
        match = _FOLDER.fullmatch(name)
        if match is not None and (key is None or match["command"] == key[:8]):
            yield Folder(open_storage(f"{storage.root.rstrip('/')}/{name}"), match["run"], match["command"])


def contents(where: store.Where, key: str | None = None) -> Contents:
    """What a folder holds (of one command, or of all); only manifests are read. A run's folder that this user may not
    read is passed over. Raises OSError, or SwiftError for storage of an unknown kind.
    """
    saved: list[Checkpoint] = []
    ended: dict[str, frozenset[str]] = {}
    passed: list[PassedOver] = []
    for each in folders(where, key):
        try:
            found, not_found = each.read()
            ends = each.ended()
        except PermissionError as error:
            if not each.run:
                raise
            passed.append(PassedOver(each.storage.root, store.cannot_be_read(error), run=each.run))
            continue
        saved += [one for one in found if key is None or one.command.key == key]
        passed += not_found
        ended[each.command] = ended.get(each.command, frozenset()) | ends
    return Contents(tuple(saved), ended, tuple(passed))


def read(where: str, key: str, say: Callable[[str], None] = console) -> Contents:
    """As :func:`contents`; empty where that cannot be read, and the user is told. A local folder that this user may not
    read counts as one that cannot be used, not as an empty one.
    """
    try:
        return contents(where, key)
    except PermissionError as error:
        return Contents(passed=(PassedOver(where, store.cannot_be_read(error), run=_ANY),))
    except (OSError, SwiftError) as error:
        say(f"checkpoints in {where} cannot be listed: {error}; this start continues none of them")
        return Contents()


def candidates(found: Contents, key: str) -> list[Checkpoint]:
    """What the next start of a command may continue with: of its newest run first, and of that the newest first."""
    mine = [each for each in found.saved if each.command.key == key and found.continues(each.run, key)]
    return sorted(mine, key=lambda each: (age_key(each.run), each.step), reverse=True)


def to_adopt(where: str) -> tuple[list[Checkpoint], list[PassedOver]]:
    """What ``--resume-from`` may mean, the newest first: the checkpoint whose folder is named, or all in a folder; and
    what is there and cannot be used. Raises OSError, or SwiftError for storage of an unknown kind.
    """
    parent, _, name = where.rstrip("/").rpartition("/")
    step = store.step_of(name)
    if step is not None:
        try:
            return [store.load_manifest(parent or "/", step)], []
        except store.NeverCompleted:
            return [], []
        except CorruptFile as error:
            return [], [PassedOver(where, str(error), step)]
    found = contents(where)
    return sorted(found.saved, key=lambda each: (each.time, each.step), reverse=True), list(found.passed)


def first_whole(found: Iterable[Checkpoint], say: Callable[[str], None] = console) -> Checkpoint | None:
    """The first one all of whose checksums hold; others are passed over, and the user is told."""
    for each in found:
        try:
            store.verify(each)
        except (CorruptFile, OSError) as error:
            say(f"checkpoint {each.path} is passed over: {error}")
        else:
            return each
    return None


# -- what is said ---------------------------------------------------------------------------------


def tell_passed(
    passed: Iterable[PassedOver], taken: Checkpoint | None = None, say: Callable[[str], None] = console
) -> None:
    """Print which checkpoints cannot be used: those that a start would have taken before ``taken``, or all for None."""
    last = ("", -1) if taken is None else (age_key(taken.run), taken.step)
    for each in passed:
        if each.step < 0 or (age_key(each.run), each.step) > last:
            say(str(each))


def none_usable(where: str, passed: int, who: str = "") -> NoUsableCheckpoint:
    """The error of a start that would lose checkpoints; ``passed``: how many cannot be used."""
    return NoUsableCheckpoint(
        f"{who}{where} holds checkpoints of this command ({passed} were passed over, see above), and none can be used. "
        "To start from scratch: checkpoint.resume='never' (SWIFT_RECOVERY_CHECKPOINT_RESUME=never); to begin with "
        "another checkpoint: --resume-from, or checkpoint.resume_from"
    )


def left_behind(where: str, key: str, how: str, *, continues: bool, again: str) -> str:
    """Text: why a start of a command starts from scratch, although there are checkpoints; empty if there are none.

    Args:
        how: the option that adopts a checkpoint of another command.
        continues: it would have continued with a checkpoint of its own.
        again: the option that has it do so.
    """
    try:
        found = contents(where, key)
        other = _newest(where) if not found.saved else None
    except (OSError, SwiftError):
        return ""  # told where it is read or written
    bad = [each for each in found.unusable(key) if each.run]
    if bad and not found.saved:
        return f"{bad[0]}; this run starts from scratch"
    if other is not None:
        whose = f"of another command ({other.command.short})"
        return f"{where} holds step {other.step} {whose}; this run starts from scratch; {how} adopts it"
    rest = candidates(found, key)
    if found.saved and not rest:
        newest = max(found.saved, key=lambda each: (age_key(each.run), each.step))
        ended = "of this command, which has ended"
        return f"{where} holds step {newest.step} {ended}; this run starts from scratch; {how} adopts it"
    if rest and not continues:
        return f"{where} holds step {rest[0].step} of this command; this run starts from scratch; {again} continues it"
    return ""


def _newest(where: str) -> Checkpoint | None:
    """The newest checkpoint of the newest run that has any, of whatever command."""
    for each in sorted(folders(where), key=lambda each: age_key(each.run), reverse=True):
        with suppress(PermissionError):  # another user's
            if saved := each.read()[0]:
                return max(saved, key=lambda one: (one.time, one.step))
    return None


def next_start(found: Contents, command: Command, whole: Callable[[Checkpoint], bool] = lambda each: True) -> Next:
    """What the next start of a command does. ``whole`` tells whether a checkpoint can be read."""
    rest = candidates(found, command.key)
    picked = next((each for each in rest if whole(each)), None)
    if picked is not None:
        asked = bool(picked.meta.get("continues", True))
        return Next(command, picked, "" if asked else "it was started without --resume")
    mine = [each for each in found.saved if each.command.key == command.key]
    bad = [each for each in found.unusable(command.key) if each.run]
    if mine and not rest and not bad:
        return Next(command, None, "its last run has ended")
    if rest or bad:
        return Next(command, None, "none of its checkpoints is whole", fails=True)
    return Next(command, None, "there is no checkpoint of it")


@dataclass(frozen=True)
class Next:
    """What the next start of a command does; as text, a sentence.

    Attributes:
        saved: what it continues from, or would with ``--resume``; None for nothing.
        reason: why it starts from scratch; empty if it continues.
        fails: it ends with an error instead.
    """

    command: Command
    saved: Checkpoint | None
    reason: str = ""
    fails: bool = False

    def __str__(self) -> str:
        who = f"the next start of '{self.command.short}'"
        if self.fails:
            return f"{who} ends with an error: {self.reason}; with checkpoint.resume='never' it starts from scratch"
        if self.saved is None:
            return f"{who} starts from scratch: {self.reason}"
        if self.reason:
            return f"{who} starts from scratch: {self.reason}, with which it continues from step {self.saved.step}"
        return f"{who} continues from step {self.saved.step}"


# -- ends -----------------------------------------------------------------------------------------


def mark_ended(folder: str, step: int) -> None:
    """Note that this run has ended well: its command's next start begins from scratch. May raise OSError."""
    payload = json.dumps({"step": step, "time": time.time()}).encode()
    open_storage(folder).write(ENDED, [payload], len(payload))


def forget_ended(folder: str, meta: Mapping[str, Any]) -> None:
    """Remove the checkpoints of earlier runs of the same command that have ended well. ``folder`` is that of the run
    that takes their place, ``meta`` of its checkpoints.
    """
    where, _, own = folder.rstrip("/").rpartition("/")
    if _FOLDER.fullmatch(own) is None:
        return
    key, run = str(meta.get("command", "")), str(meta.get("run", ""))
    for each in folders(where, key):
        if not each.run or age_key(each.run) >= age_key(run) or not each.ended():
            continue
        if all(one.command.key == key for one in each.read()[0]):
            if each.storage.is_link():
                continue  # somebody keeps it elsewhere
            for step in store.steps(each.storage):
                if store.made_here(each.storage, step):
                    store.remove(each.storage, step)
            if not store.steps(each.storage):
                each.storage.remove(ENDED)
                each.storage.remove(run_lock.FILE)
            each.storage.remove_folder("")
