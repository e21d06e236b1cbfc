"""A copy of each rank's publications on one other machine, so that they outlive their own (DESIGN section 3).

What a rank publishes lies in the memory of its machine. Each worker also sends it to the agent of the machine in the
next place, and continues when that agent has it: before the rank contributes to any collective of that batch. A spare
machine that takes a place asks the others for what they hold of its ranks.

It travels in the frames of :mod:`~shared_core.system.wire`. Files are written whole and renamed.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from shared_core.codec import FILE_NAME
from shared_core.protocol.mirroring import APPEND, BEGIN, END, GET, REMOVE, REPLICATED, SYNC, WRITE
from shared_core.system import secret
from shared_core.system.wire import WAIT_S, Link, accept, connect
from shared_core.transport.server import PeerServer

_OK = b"."
#: Longest request that carries no file, in bytes.
_REQUEST_BYTES = 64 << 20


def _write(folder: Path, name: str, data: bytes) -> None:
    if FILE_NAME.wrong(name):
        raise ConnectionError(f"{name!r} is not the name of a publication")
    temporary = folder / f"{name}.tmp"
    temporary.write_bytes(data)
    os.rename(temporary, folder / name)


class MirrorServer:
    """Takes copies from other machines' workers, and gives them back. Runs in the agent, a thread for each connection.

    A client must prove within seconds that it knows the job's secret, and there is a limit to their number.

    Args:
        folder: where copies are kept, private to the user.
        more: answers frames of other kinds, given the connection, the kind and the data.
        listener: to accept connections from; by default a new one of 127.0.0.1.
    """

    def __init__(
        self,
        folder: Path,
        more: Callable[[Link, bytes, bytes], None] | None = None,
        *,
        key: bytes,
        listener: socket.socket | None = None,
    ) -> None:
        self._folder, self._more = folder, more
        listener = listener or socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(listener.getsockname()[1])
        self._server = PeerServer(listener, lambda sock: accept(sock, key), self._serve)

    def close(self) -> None:
        self._server.close()

    def _serve(self, sock: socket.socket, link: Link, known: Callable[[], None]) -> None:
        limit_s: float | None = secret.PROOF_S

        def idle(waits: bool) -> None:
            if not waits:
                known()
            sock.settimeout(limit_s if waits else WAIT_S)

        for kind, rank, attempt, name, data in link.frames(self._longest, idle):
            # Between two publications a worker may compute for any time.
            limit_s = None if kind == BEGIN or limit_s is None else WAIT_S
            self._do(link, kind, rank, attempt, name, data)

    def _longest(self, kind: bytes) -> int:
        """Longest frame in bytes: a file may take all free memory."""
        if kind not in (WRITE, APPEND):
            return _REQUEST_BYTES
        with suppress(OSError):
            stat = os.statvfs(self._folder if self._folder.exists() else self._folder.parent)
            return max(_REQUEST_BYTES, stat.f_bavail * stat.f_frsize)
        return _REQUEST_BYTES

    def _do(self, link: Link, kind: bytes, rank: int, attempt: int, name: str, data: bytes) -> None:
        folder = self._folder / f"rank{rank}" / f"attempt{attempt}"
        fresh = folder.with_suffix(".new")
        if kind == BEGIN:
            for other in folder.parent.glob("attempt*"):
                # The one before may still be asked for, when the number of workers has just changed.
                if other not in (folder, folder.with_name(f"attempt{attempt - 1}")):
                    shutil.rmtree(other, ignore_errors=True)
            fresh.mkdir(mode=0o700, parents=True)
        elif kind == END:
            if not fresh.exists():
                raise ConnectionError("a copy ends that has not begun")
            # In one step, so that the old copy is there until the new one is whole.
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(fresh, folder)
        elif kind == WRITE:
            _write(fresh if fresh.exists() else folder, name, data)
        elif kind == APPEND and not FILE_NAME.wrong(name):
            with open(folder / name, "ab") as file:
                file.write(data)
        elif kind == REMOVE and not FILE_NAME.wrong(name):
            (folder / name).unlink(missing_ok=True)
        elif kind == SYNC:
            link.send(_OK)
        elif kind == GET:
            here = self._folder.parent / f"rank{rank}" / f"attempt{attempt}"  # the rank's own, on its machine
            for path in sorted((here if here.exists() else folder).glob("*")):
                if path.suffix != ".tmp" and (path.name == name if name else path.name != REPLICATED):
                    link.send(WRITE, rank, attempt, path.name, [path.read_bytes()])
            link.send(END, rank, attempt)
        elif self._more is not None:
            self._more(link, kind, data)


def fetch(machines: Iterable[str | None], ranks: Iterable[int], attempt: int, job_dir: Path) -> None:
    """Get the publications of ``ranks`` from the machine that has the newest step boundary of each.

    They go to ``rank{r}/attempt{n}/`` in ``job_dir``. Machines that do not answer are passed over.
    """
    others, key = [machine for machine in machines if machine is not None], secret.of_job(job_dir)
    for rank in ranks:
        _fetch_one(others, key, rank, attempt, job_dir / f"rank{rank}" / f"attempt{attempt}")


def fetch_replicated(machines: Iterable[str | None], ranks: Iterable[int], attempt: int, job_dir: Path) -> None:
    """Get the replicated state that one of ``ranks`` wrote for a change, if anybody has it."""
    key = secret.of_job(job_dir)
    for machine in machines:
        for rank in ranks if machine is not None else ():
            found = _ask(machine or "", key, rank, attempt, REPLICATED).get(REPLICATED)
            if found:
                return _write(job_dir / f"rank{rank}" / f"attempt{attempt}", REPLICATED, found)


def _ask(machine: str, key: bytes, rank: int, attempt: int, name: str = "") -> dict[str, bytes]:
    """Files that a machine has of a rank; empty if it cannot be reached."""
    found: dict[str, bytes] = {}
    with suppress(OSError), connect(machine, key) as link:
        link.send(GET, rank, attempt, name)
        for kind, _, _, file, data in link.frames():
            if kind == END:
                return found
            if FILE_NAME.wrong(file):
                return {}  # no machine of ours
            found[file] = data
    return {}


def _fetch_one(machines: list[str], key: bytes, rank: int, attempt: int, folder: Path) -> None:
    best: dict[str, bytes] = {}
    newest = -1
    for machine in machines:
        found = _ask(machine, key, rank, attempt)
        boundaries = [int(name[9:]) for name in found if name.startswith("boundary.") and name[9:].isdigit()]
        if found and max(boundaries, default=0) > newest:
            best, newest = found, max(boundaries, default=0)
    if best:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        for name, data in best.items():
            _write(folder, name, data)
