"""One rank's copies on another machine, seen from its worker. :mod:`~shared_core.launcher.mirror` is the other end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shared_core.events import console
from shared_core.protocol.mirroring import APPEND, BEGIN, END, LOCAL, REMOVE, SYNC, WRITE, keeper
from shared_core.system import threads
from shared_core.system.wire import CONNECT_S, Link, connect
from shared_core.worker.state.publication_file import is_blank

#: Without a copy for so long, and without a new generation, the user is told.
_TROUBLE_S = 5.0


class Mirror:
    """Copies of one rank's publications. Any thread may call. Without a link the calls do nothing."""

    def __init__(self, rank: int, attempt: int, slot: int, folder: Path, key: bytes) -> None:
        self._rank, self._attempt, self._slot, self._folder, self._key = rank, attempt, slot, folder, key
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._keeper: str | None = None
        self._trouble = threading.Timer(0.0, lambda: None)

    def follow(self, machines: Sequence[str | None]) -> None:
        """These machines hold the places now. A new keeper gets all copies, on a thread; publications wait for that."""
        chosen = keeper(machines, self._slot)
        if chosen == self._keeper:
            return
        self._keeper = chosen
        link = self._link
        if link is not None:  # somebody may wait for an answer that never comes
            with suppress(OSError):
                link.shutdown()
        ready = threading.Event()
        threads.start(self._connect, (chosen, ready), name="swift-mirror")
        ready.wait(CONNECT_S)

    def _connect(self, chosen: str | None, ready: threading.Event) -> None:
        with self._lock:
            ready.set()
            self._trouble.cancel()
            self._drop()
            if chosen is None or chosen != self._keeper:
                return
            try:
                self._link = connect(chosen, self._key)
                self._send(BEGIN)
                for path in sorted(self._folder.iterdir()):
                    if path.suffix != ".tmp" and path.name not in LOCAL and not is_blank(path):
                        self._send(WRITE, path.name, [path.read_bytes()])
                self._send(END)
                self.sync()
            except OSError as error:
                self._give_up(error)

    def write(self, name: str, data: Sequence[bytes | memoryview]) -> None:
        """Copy a whole file, given in pieces."""
        self._try(WRITE, name, data)

    def append(self, name: str, data: bytes) -> None:
        self._try(APPEND, name, [data])

    def remove(self, name: str) -> None:
        self._try(REMOVE, name, ())

    def sync(self) -> None:
        """Return when the other machine has all; at once if there is none."""
        with self._lock:
            if self._link is None:
                return
            try:
                self._send(SYNC)
                self._link.answer()
            except OSError as error:
                self._give_up(error)

    def _send(self, kind: bytes, name: str = "", data: Sequence[bytes | memoryview] = ()) -> None:
        assert self._link is not None
        self._link.send(kind, self._rank, self._attempt, name, data)

    def _try(self, kind: bytes, name: str, data: Sequence[bytes | memoryview]) -> None:
        with self._lock:
            if self._link is None:
                return
            try:
                self._send(kind, name, data)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        # Mostly the other machine is failing, and the next generation names another.
        self._drop()
        message = (
            f"rank {self._rank}: no copy of its state on another machine until the next failure or resize ({error}). "
            "If this machine fails before, all workers may have to start again"
        )
        self._trouble = threading.Timer(_TROUBLE_S, console, [message])
        self._trouble.daemon = True
        self._trouble.start()

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
