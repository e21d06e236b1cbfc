"""The process that copies snapshots from a machine's memory to storage: one a machine, no worker's child.

``python -m shared_core.checkpoint.writer FOLDER``. What it has to do lies in the folder (:mod:`shared_core.checkpoint
.spool`), so it may be killed at any moment and started again. It does not import torch, and runs at low priority.

It works on one step at a time; while it does, the newest complete snapshot waits and replaces the one that waited
before. When its ranks' parts are durable it says so in the checkpoint's folder, and whoever finds the marks of all
ranks there commits. Writers of several machines must work on the same steps although they let different ones go: that
of rank 0's machine chooses, by a note in the checkpoint's folder, and a machine that has no such snapshot any more says
so there. At the end each says which of its snapshots was the last: nobody waits for a newer part from there.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared_core.checkpoint import lineage, store
from shared_core.checkpoint.run_lock import RENEW_S, RunLock, owner_of
from shared_core.checkpoint.spool import BELL, Sealed, Spool, Target
from shared_core.checkpoint.storage import CHUNK, TEMPORARY, Storage, cause_of, open_storage
from shared_core.errors import CorruptFile, StorageFull, SwiftError
from shared_core.events import RUN, EventLog, console
from shared_core.faults import inject
from shared_core.plain_json import parse

# -- a snapshot of this machine on its way to storage: its parts, room for them, and their durability -----------------


class QuotaFull(StorageFull):
    """The user's own limit is reached."""


@dataclass
class Outgoing:
    """A complete snapshot of this machine, on its way to storage.

    Attributes:
        begun: ``time.monotonic()`` at the first byte.
        durable: ``time.monotonic()`` when this machine's parts were; 0 before.
        marks: of other ranks, at the last look.
    """

    spool: Spool
    step: int
    parts: dict[int, Sealed]
    storage: Storage
    target: Target
    begun: float = 0.0
    durable: float = 0.0
    marks: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.spool.attempt, self.step

    @property
    def one(self) -> Sealed:
        """Any of the parts: what it says of the job is the same in all."""
        return next(iter(self.parts.values()))

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.one.meta

    @property
    def alone(self) -> bool:
        """Whether all ranks of the job are on this machine."""
        return len(self.one.local) == self.one.world_size

    @property
    def nbytes(self) -> int:
        return sum(self.spool.path_of(part, name).stat().st_size for part in self.parts.values() for name in part.files)

    def ours(self, found: store.Checkpoint) -> bool:
        """Whether it is of the same run: only its own old checkpoints are removed."""
        return bool(found.meta.get("run") == self.meta.get("run"))

    def same_start(self, note: Mapping[str, Any]) -> bool:
        """Whether another machine's note is of the same attempt of the same job."""
        return all(note.get(key) == self.meta.get(key) for key in ("run", "session", "attempt"))

    @property
    def committed(self) -> bool:
        with contextlib.suppress(CorruptFile, OSError):
            return store.load_manifest(self.storage, self.step).meta == self.meta
        return False

    def make_room(self, warn: Callable[[str], None]) -> None:
        """Remove old checkpoints until quota and device have room; raises StorageFull if they have not. ``warn`` is
        called if the quota leaves only one checkpoint meanwhile.
        """
        storage, need = self.storage, self.nbytes
        store.prune(storage, max(2, self.target.keep), self.ours, spare=[self.step])
        quota = self.target.quota_bytes
        if quota:
            mine = [each for each in store.committed(storage) if self.ours(each) and each.step != self.step]
            sizes = {each.step: store.parts_size(storage, each.step) for each in mine}
            while len(sizes) > 1 and sum(sizes.values()) + need > quota:
                oldest = min(sizes)
                warn(
                    f"checkpoint.quota_bytes={quota} has no room for two checkpoints and the one that is being written:"
                    " the oldest is removed first, so one is left meanwhile. Raise the quota to keep two"
                )
                store.remove(storage, oldest)
                del sizes[oldest]
            if sum(sizes.values()) + need > quota:
                raise QuotaFull(
                    f"the checkpoint of step {self.step} needs {need} bytes, and with the {sum(sizes.values())} of "
                    f"earlier ones they exceed the quota of {quota} bytes (checkpoint.quota_bytes). Earlier"
                    " checkpoints are as they were: raise the quota"
                )
        free = storage.free()
        if free is not None and free < need:
            raise StorageFull(
                f"no room to write {need} bytes to {storage.root}: {free} bytes are free; earlier checkpoints are as "
                "they were: make room, or set checkpoint.dir to a larger device"
            )

    def persist(self) -> None:
        """Make this machine's parts durable. Raises OSError or SwiftError if that cannot be."""
        storage, folder = self.storage, store.folder_name(self.step)
        if storage.is_link(folder):  # the user keeps an old checkpoint of this step elsewhere
            storage.remove_folder(folder)
        names = set(storage.names(folder))
        if store.MANIFEST in names:  # of another attempt, or damaged: from now on it is wrong
            storage.remove(f"{folder}/{store.MANIFEST}")
        store.sign(storage, self.step)
        if not self.alone and 0 in self.one.local:
            write_note(storage, self.step, store.BEGUN, self.meta)
        for rank, part in self.parts.items():
            self._persist_rank(rank, part, names)

    def _persist_rank(self, rank: int, part: Sealed, names: set[str]) -> None:
        storage, folder = self.storage, store.folder_name(self.step)
        mark = store.read_mark(storage, self.step, rank)
        if mark is not None and mark.meta == part.meta and mark.parts.keys() == set(part.files) <= names:
            return  # an earlier writer got as far; what it has written is never touched again
        for name in (f"rank{rank}{end}" for end in (store.DONE, store.MISSED, store.LAST)):
            if name in names:
                storage.remove(f"{folder}/{name}")
        for name in names:
            if store.left_over(name, part.files) or (self.alone and name.startswith(TEMPORARY)):
                storage.remove(f"{folder}/{name}")
        written = {}
        for name in part.files:
            path = self.spool.path_of(part, name)
            size = path.stat().st_size
            written[name] = (store.copy_part(storage, self.step, name, _pieces(path), size), size)
        store.write_mark(storage, self.step, rank, store.StoreMark(written, part.meta))


def _pieces(path: Path) -> Iterator[memoryview]:
    """A file in pieces; each is valid until the next one is asked for."""
    buffer = bytearray(CHUNK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield memoryview(buffer)[:count]


def write_note(storage: Storage, step: int, name: str, meta: Mapping[str, Any]) -> None:
    """Leave a note for the writers of other machines in a checkpoint's folder."""
    payload = json.dumps(dict(meta)).encode()
    storage.write(f"{store.folder_name(step)}/{name}", [payload], len(payload))


def read_note(storage: Storage, step: int, name: str) -> dict[str, Any] | None:
    """Another writer's note; None if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, CorruptFile):
        found = parse(store.read_file(storage, f"{store.folder_name(step)}/{name}"))
        return found if isinstance(found, dict) else None
    return None


# -- which snapshot is written, and when ------------------------------------------------------------------------------


#: Other machines' marks and notes are looked for so often, in seconds: in a folder, and behind a URL.
LOOK_S, LOOK_URL_S = 0.1, 1.0
#: A step is given up, if a newer one waits, when no other machine's mark has come for so long, in seconds.
MAX_WAIT_S = 60.0
#: A step that could not be written is tried again after so long, doubled each time, in seconds.
RETRY_S, RETRY_MOST_S = 1.0, 60.0


class CheckpointWriter:
    """The work of the process, without its waiting. Used by one thread, and by its own look-out thread."""

    def __init__(self, spool: Spool, events: EventLog) -> None:
        self._spool, self._events = spool, events
        self._status = replace(spool.status(), pid=os.getpid(), writing=-1, waiting=-1)
        self._open: Outgoing | None = None
        self._done: set[tuple[int, int]] = set()
        self._retry: tuple[tuple[int, int], float, float] | None = None
        self._cleared = False  # whether the leftovers of ended runs of the same command were removed
        self._said: set[str] = set()
        self._warned: set[str] = set()
        self._follows, self._hurry, self._hurries_since = False, False, 0.0
        self._absent: Collection[int] = ()
        self._lock = threading.RLock()
        self._held: dict[str, RunLock] = {}

    def work(self, *, hurry: bool = False, absent: Collection[int] = ()) -> float | None:
        """Do all that can be done now. ``hurry``: the job ends; what failed is tried once more and then given up.
        ``absent``: ranks without which it ends, whose parts never come. Returns the seconds until it should be called
        again even if no bell rings; None for no such time.
        """
        self._absent = absent
        if hurry and not self._hurry:
            self._hurry, self._retry, self._hurries_since = True, None, time.monotonic()
        self._keep_locks()
        until = self._work()
        if any(lock.is_lease for lock in self._held.values()):
            return RENEW_S if until is None else min(until, RENEW_S)
        return until

    def _work(self) -> float | None:
        while (job := self._open or self._choose()) is not None:
            try:
                if not job.durable:
                    with self._looking_around(job):
                        self._persist(job)
                if self._finish(job):
                    continue
                return LOOK_S if job.storage.local() is not None else LOOK_URL_S
            except (OSError, SwiftError) as error:
                self._failed(job, error)
        if self._retry is not None:
            return max(0.0, self._retry[1] - time.monotonic())
        return LOOK_S if self._follows else None

    @property
    def idle(self) -> bool:
        return self._open is None and self._newest() is None

    # -- what to do next ----------------------------------------------------------------------------------------------

    def _newest(self) -> Outgoing | None:
        """The newest complete snapshot, if it is to be written and was not; older ones are dropped."""
        with self._lock, contextlib.suppress(FileNotFoundError):  # the job's folder is removed at its end
            return self._find_newest()
        return None

    def _find_newest(self) -> Outgoing | None:
        newest = max((spool.attempt for spool in self._spool.all_attempts()), default=0)
        for spool in self._spool.all_attempts():
            step = spool.newest_complete()
            for old in spool.steps() if spool.attempt < newest else ():
                if not spool.complete(old):  # its workers are gone
                    spool.drop(old)
            if step is None:
                continue
            self._let_go_before(spool, step)
            parts = spool.parts(step)
            target = next((part.target for part in parts.values()), None)
            if target is None or (spool.attempt, step) in self._done:
                return None
            try:
                return Outgoing(spool, step, parts, open_storage(target.where), target)
            except SwiftError as error:  # storage of an unknown kind
                self._done.add((spool.attempt, step))
                self._tell("config", f"no checkpoint of step {step}: {error}; training continues")
                self._set(attempt=spool.attempt, failed=step, cause="config", message=str(error))
                return None
        return None

    def _choose(self) -> Outgoing | None:
        """What to write now; None if there is nothing, or another machine has to choose first."""
        self._follows = False
        job = self._newest()
        if job is None or (self._retry and self._retry[0] == job.key and time.monotonic() < self._retry[1]):
            return None
        if job.alone or 0 in job.one.local:
            self._open = job
        else:
            self._follows = True
            with self._reports(job):
                self._open = self._chosen_elsewhere(job)
            late = self._hurry and time.monotonic() > self._hurries_since + MAX_WAIT_S
            if self._open is None and (late or self._ended_without(job)):
                self._leave(job)  # the other machines have ended without it
        return self._open

    def _chosen_elsewhere(self, newest: Outgoing) -> Outgoing | None:
        for step in reversed(store.steps(newest.storage)):
            chosen = read_note(newest.storage, step, store.BEGUN)
            if chosen is None or not newest.same_start(chosen):
                continue
            if step == newest.step and chosen == newest.meta:
                return newest
            if step < newest.step:
                self._report_missed(newest, step)
            return None
        return None

    def _ended_without(self, job: Outgoing) -> bool:
        """At the end: whether the other machines skip this step, or a part is missing that never comes: of a rank
        without which the job ends, or of a machine that has written its last.
        """
        if not self._hurry:
            return False
        with self._reports(job):
            if 0 not in job.one.local and self._chosen_newer(job):
                return True
            there = {
                *job.storage.names(store.folder_name(job.step)),
                *(f"rank{rank}{store.DONE}" for rank in job.parts),
            }
            missing = [rank for rank in range(job.one.world_size) if f"rank{rank}{store.DONE}" not in there]
            if not {*missing}.isdisjoint(self._absent):
                return True
            for step in store.steps(job.storage):
                names = job.storage.names(store.folder_name(step)) if step < job.step else []
                lasts = [name for rank in missing if (name := f"rank{rank}{store.LAST}") in names]
                if any(job.same_start(read_note(job.storage, step, name) or {}) for name in lasts):
                    return True
        return False

    def say_last(self) -> None:
        """The end: tell the writers of other machines which snapshot of this one was the last."""
        for spool in self._spool.all_attempts():
            step = spool.newest_complete()
            parts = spool.parts(step) if step is not None else {}
            if step is None or not parts:  # or its folder was removed with the job's
                continue
            one = next(iter(parts.values()))
            if one.target is not None and len(parts) < one.world_size:
                with contextlib.suppress(OSError, SwiftError):
                    name = f"rank{min(parts)}{store.LAST}"
                    write_note(open_storage(one.target.where), step, name, one.meta)
            return

    def _report_missed(self, newest: Outgoing, step: int) -> None:
        if (newest.spool.attempt, step) in self._done:
            return
        names = newest.storage.names(store.folder_name(step))
        for rank in newest.one.local:
            if store.MANIFEST not in names and f"rank{rank}{store.DONE}" not in names:
                write_note(newest.storage, step, f"rank{rank}{store.MISSED}", newest.meta)
        self._done.add((newest.spool.attempt, step))

    def _let_go_before(self, spool: Spool, step: int) -> None:
        busy = self._spool.held() | ({self._open.key} if self._open is not None else set())
        for each in spool.all_attempts():
            if each.attempt > spool.attempt:
                continue
            left = [old for old in each.steps() if (each.attempt, old) < (spool.attempt, step)]
            for old in left:
                if (each.attempt, old) not in busy:
                    each.drop(old)
            if each.attempt < spool.attempt and not each.steps():
                each.drop_attempt()

    # -- one step -----------------------------------------------------------------------------------------------------

    def _persist(self, job: Outgoing) -> None:
        job.begun = time.monotonic()
        inject.set_step(job.step)
        self._set(attempt=job.spool.attempt, writing=job.step, waiting=-1)
        self._hold(job.storage, owner_of(job.meta))
        if not job.committed:
            job.make_room(self._warn)
            job.persist()
        job.durable = time.monotonic()

    @contextlib.contextmanager
    def _looking_around(self, job: Outgoing) -> Iterator[None]:
        """While a write blocks: a thread renews leases, and drops all snapshots but the newest."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                with contextlib.suppress(OSError, SwiftError):
                    for lock in list(self._held.values()):
                        lock.renew()
                with contextlib.suppress(OSError, SwiftError):
                    newest = self._newest()
                    if newest is not None and newest.key != job.key and newest.step != self._status.waiting:
                        self._set(waiting=newest.step)

        thread = threading.Thread(target=look, name="swift-look", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    # -- locks of runs ------------------------------------------------------------------------------------------------

    def _hold(self, storage: Storage, owner: str) -> None:
        lock = self._held.get(storage.root) or RunLock(storage, owner)
        lock.take()
        self._held[storage.root] = lock

    def _keep_locks(self) -> None:
        """Hold the locks that the job has claimed, and renew leases. Errors are told where something is written."""
        claim = self._spool.claimed()
        with contextlib.suppress(OSError, SwiftError):
            if claim is not None and claim[0] not in self._held:
                self._hold(open_storage(claim[0]), claim[1])
        for lock in self._held.values():
            with contextlib.suppress(OSError, SwiftError):
                lock.renew()

    def release(self) -> None:
        for lock in self._held.values():
            lock.release()

    def _finish(self, job: Outgoing) -> bool:
        """Commit if all ranks' parts are durable. Returns whether this step is over, one way or the other."""
        names = job.storage.names(store.folder_name(job.step))
        mine = [name for rank, part in job.parts.items() for name in (f"rank{rank}{store.DONE}", *part.files)]
        if not set(mine) <= set(names):
            raise FileNotFoundError(errno.ENOENT, "what was written is gone", job.storage.root)
        found = store.commit_marked(job.storage, job.step, job.one.world_size, job.meta)
        if found is not None:
            self._committed(job, found)
            return True
        newest = self._newest()
        if not self._hurry and (newest is None or newest.key == job.key):
            return False
        marks = sum(name.endswith(store.DONE) for name in names)
        if marks != job.marks:
            job.marks, job.durable = marks, time.monotonic()
        missed = any(name.endswith(store.MISSED) for name in names)
        late = time.monotonic() - job.durable > MAX_WAIT_S
        # All workers have started again since, and the machine whose part is missing may have failed. If its writer is
        # only slow, it commits the step itself: the parts and marks of this machine stay.
        late = late or (newest is not None and newest.spool.attempt > job.spool.attempt)
        if 0 not in job.one.local and not missed:
            missed = self._chosen_newer(job)
        if missed or late or self._ended_without(job):
            self._leave(job)
            return True
        return False

    def _leave(self, job: Outgoing) -> None:
        """Other machines do not take part in this step."""
        self._over(job)
        message = "other machines' parts are missing"
        self._set(attempt=job.spool.attempt, writing=-1, failed=job.step, cause="incomplete", message=message)

    def _chosen_newer(self, job: Outgoing) -> bool:
        newer = (step for step in store.steps(job.storage) if step > job.step)
        return any(job.same_start(read_note(job.storage, step, store.BEGUN) or {}) for step in newer)

    def _committed(self, job: Outgoing, found: store.Checkpoint) -> None:
        self._over(job)
        seconds = time.monotonic() - job.begun
        if self._said:
            self._said.clear()
            console(f"checkpoints can be written again: step {job.step} is committed")
        nbytes = sum(found.sizes.get(name, 0) for part in job.parts.values() for name in part.files)
        committed = {**found.meta, "step": job.step}
        self._set(
            committed=committed, writing=-1, failed=-1, cause="", message="", seconds=seconds, bytes=nbytes, waiting=-1
        )
        if 0 in job.one.local:
            extra = {
                "boundary": job.step,
                "version": found.meta.get("version", -1),
                "seconds": seconds,
                "bytes": nbytes,
            }
            self._events.emit("checkpoint", rank=0, generation=int(found.meta.get("generation", 0)), **extra)
        with self._reports(job):
            keep = max(2, job.target.keep)
            store.prune(job.storage, keep, job.ours)
            if job.storage.is_link():
                self._warn(f"{job.storage.root} is a link: no older checkpoint is removed where it leads")
            if not self._cleared and len(store.committed(job.storage)) >= 2:
                self._cleared = True
                lineage.forget_ended(job.target.where, job.meta)

    def _over(self, job: Outgoing) -> None:
        self._open, self._retry = None, None
        self._done.add(job.key)

    # -- limits and failures ------------------------------------------------------------------------------------------

    def _failed(self, job: Outgoing, error: OSError | SwiftError) -> None:
        self._open = None
        if self._hurry:
            self._over(job)
        cause = "quota" if isinstance(error, QuotaFull) else cause_of(error)
        wait = min(2 * self._retry[2], RETRY_MOST_S) if self._retry and self._retry[0] == job.key else RETRY_S
        self._retry = (job.key, time.monotonic() + wait, wait) if not self._hurry else None
        what = {
            "read-only": f"{job.storage.root} cannot be written to ({error})",
            "gone": f"{job.storage.root} was removed, or is not mounted any more ({error})",
        }.get(cause, str(error))
        if cause == "error" and isinstance(error, OSError) and job.storage.local() is None:
            what = f"{job.storage.root} cannot be reached ({error})"
        message = f"no checkpoint of step {job.step}: {what}"
        self._tell(cause, f"{message}; training continues, and later checkpoints are tried")
        self._set(attempt=job.spool.attempt, writing=-1, failed=job.step, cause=cause, message=message)

    @contextlib.contextmanager
    def _reports(self, job: Outgoing) -> Iterator[None]:
        """Tell storage errors outside a step's own writing, and ignore them."""
        try:
            yield
        except (OSError, SwiftError) as error:
            self._tell(cause_of(error), f"checkpoints at {job.storage.root}: {error}")

    def _tell(self, cause: str, message: str) -> None:
        """Once for each cause, until a checkpoint succeeds."""
        if cause not in self._said:
            self._said.add(cause)
            self._warn(message)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            console(message)
            self._events.emit("warning", message=message)

    def _set(self, **values: Any) -> None:
        with self._lock:
            self._status = replace(self._status, **values)
            self._spool.set_status(self._status)


# -- the process ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Work until standard input ends; then finish within the seconds that it said, or ``--grace``. After the seconds it
    says the ranks without which the job ends.
    """
    parser = argparse.ArgumentParser(prog="python -m shared_core.checkpoint.writer", description=__doc__)
    parser.add_argument("folder", type=Path, help="the spool")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds to continue when whoever started it has died")
    parser.add_argument("--events", help="events.jsonl of the job")
    options = parser.parse_args(argv)
    # The parent process decides when this one ends; a scheduler's signals go to every process of a job.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(10)
    spool = Spool(options.folder)
    try:
        bell = _open_bell(spool.folder / BELL)
    except FileNotFoundError:
        return 0  # the job's folder has been removed: nobody would remove another
    ends, absent = threading.Event(), set[int]()
    threading.Thread(
        target=_watch, args=(options.grace, absent, ends, bell), name="swift-lifeline", daemon=True
    ).start()
    writer = CheckpointWriter(spool, EventLog(options.events, os.environ.get(RUN, ""), spool.folder.parent))
    with selectors.DefaultSelector() as selector:
        selector.register(bell, selectors.EVENT_READ)
        while True:
            last = ends.is_set()
            timeout = writer.work(hurry=last, absent=absent)
            if last and (writer.idle or timeout is None):
                writer.say_last()
                writer.release()
                return 0
            selector.select(min(LOOK_S, timeout or LOOK_S) if last else timeout)
            with contextlib.suppress(BlockingIOError):
                while os.read(bell, 4096):
                    pass


def _open_bell(path: Path) -> int:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)  # for writing too: so it never reads an end of file


def _watch(grace_s: float, absent: set[int], ends: threading.Event, bell: int) -> None:
    """Wait for the end of standard input, then end the process in time, whatever it is doing."""
    said = b""
    while more := os.read(sys.stdin.fileno(), 4096):
        said += more
    with contextlib.suppress(ValueError):
        grace_s, *ranks = map(float, said.split())
        absent.update(map(int, ranks))
    ends.set()
    with contextlib.suppress(BlockingIOError):
        os.write(bell, b".")  # not by its path: the job's folder may have been removed
    time.sleep(min(grace_s, threading.TIMEOUT_MAX))
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
