"""A copy of each machine's newest snapshot in the memory of one other machine: the tier ``neighbour``.

A thread of the agent sends the snapshot to the agent of the machine in the next place (:class:`Sender`), which keeps
the newest whole one and the one that is coming (:class:`NeighbourCopies`). When all workers start again, each asks all
machines what they hold, and reads what it needs from there (:mod:`~shared_core.worker.checkpoints.recovery_line`).

It uses the connections of :mod:`~shared_core.launcher.mirror`. A copy: one frame with the names and sizes of the files
and the notes that seal them; an answer; each file in parts and its SHA-256; a frame if all of it was still there at the
end (else its memory was reused meanwhile); an answer. Only whole copies are offered to workers.

A copy is of use only together with the other machines' own snapshots of the same step. So nobody replaces a copy by a
newer one before it has a snapshot of that newer step itself.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypedDict

from shared_core.checkpoint.spool import SEALED, Spool, sealed_of
from shared_core.codec import Count, FileName, fit
from shared_core.errors import CorruptFile, StorageFull, SwiftError
from shared_core.events import console
from shared_core.plain_json import parse
from shared_core.protocol.mirroring import keeper
from shared_core.system.snapshot_wire import GET, LIST, PART, PUT, SIZE, Key, ask, receive_file, send_file
from shared_core.system.wire import WAIT_S, Link, connect

_GO, _HAVE, _FULL, _NOT_YET, _WHOLE = b"g", b"h", b"f", b"n", b"."
_OWN, _KEPT, _COMING, _DIGESTS = "own", "kept", "coming", "digests.json"
#: A machine looks for a snapshot to send so often, and tries again so long after a failure, in seconds.
LOOK_S, RETRY_S = 0.1, 1.0
#: An offered copy waits so long for this machine's own snapshot of the same step, looked for so often, in seconds.
_OWN_S, _LOOK_OWN_S = 1.0, 0.01
#: Longest wait for a thread at the end, in seconds.
_END_S = 1.0
_NICE = 10


def _low_priority() -> None:
    with suppress(OSError):  # Linux: of this thread only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class _Offered(TypedDict):
    """What comes with :data:`PUT`: sizes of the files, and the notes that seal them."""

    attempt: Count
    step: Count
    files: dict[FileName, Count]
    notes: dict[FileName, str]


class _Asked(TypedDict):
    where: Literal["own", "kept"]
    key: tuple[Count, Count]
    name: str


class NeighbourCopies:
    """What this machine's memory holds of checkpoints: its own snapshots, and a copy of its neighbour's.

    ``folder``, of this machine's snapshots, is made when there is something to keep.

    Attributes:
        begun: (attempt, step) of the newest copy that was offered to this machine, whether or not it had room.
        kept: (attempt, step) of the copy that is whole here; None for none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begun: Key | None = None
        self.kept: Key | None = None
        self._lock, self._holding = threading.Lock(), threading.Lock()
        self._holds: dict[str, set[Key]] = {}
        self._held: set[Key] = set()
        self._busy: Link | None = None
        self._over = threading.Event()

    def close(self) -> None:
        """Take no more copies: nothing is written to the folder from now on."""
        self._over.set()
        if (link := self._busy) is not None:
            with suppress(OSError):
                link.shutdown()
        for lock in (self._lock, self._holding):
            if lock.acquire(timeout=_END_S):
                lock.release()

    def hold(self, why: str, *keys: Key | None) -> None:
        """Keep these snapshots of this machine, replacing those of the same reason. Raises OSError."""
        with self._holding:
            self._holds[why] = {key for key in keys if key is not None}
            held: set[Key] = set().union(*self._holds.values())
            if held != self._held and not self._over.is_set():
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                Spool(self.folder).hold(held)
                self._held = held

    def serve(self, link: Link, kind: bytes, data: bytes) -> None:
        """Answer one frame. Called on a thread for each connection; raises ConnectionError for what is no request."""
        link.settimeout(WAIT_S)
        try:
            if kind == LIST:
                ask(link, LIST, self._list())
            elif kind in (PUT, GET):
                (self._take if kind == PUT else self._give)(link, parse(data))
            else:
                raise ConnectionError("no request of ours")
        except (KeyError, ValueError, CorruptFile) as error:
            raise ConnectionError(f"no request of ours: {error}") from error

    def _take(self, link: Link, header: Any) -> None:
        _low_priority()
        offered = fit(header, _Offered)
        key, files, notes = (offered["attempt"], offered["step"]), offered["files"], offered["notes"]
        for name, text in notes.items():
            part = sealed_of(text)
            if (part.step, f"rank{part.rank}{SEALED}") != (key[1], name):
                raise ConnectionError(f"{name} is not the note of this snapshot")
        before, self._busy = self._busy, link
        if before is not None:  # its sender has failed, or has given up
            with suppress(OSError):
                before.shutdown()
        with self._lock:
            answer = b""
            try:
                answer = self._answer(key, files, notes)
                link.send(answer)
                if answer == _GO:
                    self._receive(link, key, files, notes)
                    link.send(_WHOLE)
            finally:
                self.hold(_KEPT, self.kept, key if answer == _NOT_YET else None)

    def _answer(self, key: Key, files: Mapping[str, int], notes: Mapping[str, str]) -> bytes:
        if self._over.is_set():
            raise ConnectionError("the job ends on this machine")
        if self.kept is not None and key < self.kept:
            return _NOT_YET  # from a machine without which the others have continued
        self.begun = key
        self.hold(_KEPT, self.kept, key)
        if self.kept is not None and self._has_own(self.kept) and not self._awaits_own(key):
            return _NOT_YET
        spool = Spool(self.folder / _KEPT, key[0])
        if key == self.kept and _notes(spool, key[1]) == notes:
            return _HAVE
        try:
            spool.check_room(sum(files.values()))
        except StorageFull:
            return _FULL
        return _GO

    def _has_own(self, key: Key) -> bool:
        return Spool(self.folder, key[0]).complete(key[1])

    def _awaits_own(self, key: Key) -> bool:
        deadline = time.monotonic() + _OWN_S
        while not (has := self._has_own(key)) and time.monotonic() < deadline:
            if self._over.wait(_LOOK_OWN_S):
                break
        return has

    def _receive(self, link: Link, key: Key, files: Mapping[str, int], notes: Mapping[str, str]) -> None:
        spool = Spool(self.folder / _KEPT, key[0])
        coming = spool.folder / _COMING
        shutil.rmtree(coming, ignore_errors=True)
        coming.mkdir(mode=0o700)
        try:
            digests = {name: receive_file(link, coming / name, size) for name, size in files.items()}
            if link.answer() != _WHOLE:
                raise ConnectionError("no end of a snapshot")
            for name, text in (*notes.items(), (_DIGESTS, json.dumps(digests))):
                (coming / name).write_text(text)
            self._keep(spool, key, coming)
        finally:
            shutil.rmtree(coming, ignore_errors=True)

    def _keep(self, spool: Spool, key: Key, coming: Path) -> None:
        """Rename in one step, so that there is always a whole one; then delete the older ones."""
        place = spool.folder_of(key[1])
        shutil.rmtree(place)
        os.rename(coming, place)
        self.kept = key
        for each in spool.all_attempts():
            for step in each.steps():
                if (each.attempt, step) != key:
                    old = each.folder_of(step)
                    for note in old.glob(f"*{SEALED}"):  # first, so that it does not look whole any more
                        note.unlink()
                    shutil.rmtree(old, ignore_errors=True)

    def _list(self) -> list[dict[str, Any]]:
        found = []
        for where in (_OWN, _KEPT):
            for spool in self._spool(where, 0).all_attempts():
                for step in spool.steps():
                    for part in spool.parts(step).values():
                        what = {"files": part.files, "meta": dict(part.meta), "world_size": part.world_size}
                        found.append({"where": where, "key": (spool.attempt, step), "rank": part.rank} | what)
        return found

    def _spool(self, where: str, attempt: int) -> Spool:
        return Spool(self.folder if where == _OWN else self.folder / _KEPT, attempt)

    def _give(self, link: Link, header: Any) -> None:
        asked = fit(header, _Asked)
        (attempt, step), name = asked["key"], asked["name"]
        spool = self._spool(asked["where"], attempt)
        part = next((each for each in spool.parts(step).values() if name in each.files), None)
        if part is None:
            return link.send(PART, data=[SIZE.pack(-1)])
        path = spool.path_of(part, name)
        size = path.stat().st_size
        link.send(PART, data=[SIZE.pack(size)])
        digest = send_file(link, path, size)
        if asked["where"] == _KEPT:
            digest = bytes.fromhex(json.loads((path.parent / _DIGESTS).read_bytes())[name])
        elif spool.parts(step).get(part.rank) != part:
            raise ConnectionError("the snapshot was let go meanwhile")
        link.send(PART, data=[digest])


def _notes(spool: Spool, step: int) -> dict[str, str]:
    parts = spool.parts(step).values()
    return {name: spool.path_of(part, name).read_text() for part in parts for name in [f"rank{part.rank}{SEALED}"]}


class Sender:
    """Sends this machine's snapshots to the machine in the next place, on a thread of its own.

    The machine in the first place sends its newest, all others the step that was offered to them, so that all copies
    are of one step. A snapshot stays here while it is sent, until the next one is kept there, and while the neighbour's
    copy of the same step is the one kept here. ``machines``: who holds which place; set by the agent.
    """

    def __init__(self, copies: NeighbourCopies, name: Callable[[], str], secret: bytes) -> None:
        self.machines: tuple[str | None, ...] = ()
        self._copies, self._name, self._secret = copies, name, secret
        self._sent: tuple[str, Key] | None = None
        self._said = ""
        self._failures = 0
        self._link: Link | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swift-neighbour", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send no more. A second call does nothing."""
        self._over.set()
        if (link := self._link) is not None:
            with suppress(OSError):
                link.shutdown()
        self._thread.join(_END_S)  # it may be connecting

    def _run(self) -> None:
        _low_priority()
        wait = LOOK_S
        while not self._over.wait(wait):
            wait = LOOK_S
            try:
                self._look()
                self._failures = 0
            except (OSError, SwiftError) as error:
                # The first failure is not told: the other machine may be failing, or a newer snapshot took the place.
                self._failures += 1
                if self._failures > 1:
                    self._tell(
                        f"this machine's newest snapshot is not copied to another machine for now ({error}). It is "
                        f"tried again every {RETRY_S:g} s; if this machine fails before, all workers start again "
                        "from the newest checkpoint in storage, or from the start"
                    )
                wait = RETRY_S

    def _look(self) -> None:
        machines, name = self.machines, self._name()
        to = keeper(machines, machines.index(name)) if name in machines else None
        if to is None:
            return self._copies.hold(_OWN)
        key = self._choose(first=name == next(filter(None, machines), None))
        sent = self._sent[1] if self._sent is not None else None
        if key is None or self._sent == (to, key):
            return self._copies.hold(_OWN, sent)
        self._copies.hold(_OWN, key, sent)
        spool = Spool(self._copies.folder, key[0])
        if spool.complete(key[1]):  # it may have been deleted just before it was to be held
            self._send(to, spool, key)

    def _choose(self, *, first: bool) -> Key | None:
        if not first:
            key = self._copies.begun
            return key if key is not None and Spool(self._copies.folder, key[0]).complete(key[1]) else None
        for spool in Spool(self._copies.folder).all_attempts():
            if (step := spool.newest_complete()) is not None:
                return spool.attempt, step
        return None

    def _send(self, to: str, spool: Spool, key: Key) -> None:
        parts, notes = spool.parts(key[1]), _notes(spool, key[1])
        paths = {name: spool.path_of(part, name) for part in parts.values() for name in part.files}
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        with connect(to, self._secret) as self._link:
            link = self._link
            ask(link, PUT, {"attempt": key[0], "step": key[1], "files": sizes, "notes": notes})
            answer = link.answer()
            if answer == _GO:
                for name, path in paths.items():
                    link.send(PART, data=[send_file(link, path, sizes[name])])
                if spool.parts(key[1]) != parts:
                    raise ConnectionError(f"the snapshot of step {key[1]} was let go meanwhile")
                link.send(_WHOLE)
                link.answer()
        if answer == _NOT_YET:
            return
        if answer == _FULL:
            self._tell(
                f"{to} has no room in memory for a copy of this machine's snapshots: if this machine fails, all "
                "workers start again from the newest checkpoint in storage, or from the start. Free memory there "
                "(/dev/shm)"
            )
        else:
            self._said = ""
        self._sent = to, key

    def _tell(self, message: str) -> None:
        """Once, until it works again."""
        if not self._said and not self._over.is_set():
            self._said = message
            console(message)
