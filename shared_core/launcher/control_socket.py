"""The agent's Unix socket in the job's private folder: the store of a job on one machine, requests of its workers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from shared_core.codec import decode
from shared_core.errors import DamagedRecord
from shared_core.events import console
from shared_core.protocol.leaving import ANSWER_BYTES, LEAVE
from shared_core.protocol.worker_messages import WISH, WISH_BYTES
from shared_core.system.jobdir import AGENT
from shared_core.system.wire import Link
from shared_core.transport import local, remote_store
from shared_core.transport.server import PeerServer
from shared_core.transport.store import MemoryStore

_TAKEN = b"."
#: Longest that the agent's loop takes to answer, in seconds.
_ANSWER_S = 30.0
#: Gives an answer: its kind, and text.
Answer = Callable[[bytes, str], None]


class ControlSocket:
    """Listens for this machine's workers for as long as the agent runs. ``wake`` is called on a thread when there is a
    request; it must not block.
    """

    def __init__(self, job_dir: Path, wake: Callable[[], None]) -> None:
        self.path = job_dir / AGENT
        self._wake = wake
        self._store: MemoryStore | None = None
        self._lock = threading.Lock()
        self._wishes: list[tuple[int, dict[str, Any]]] = []
        self._leaves: list[tuple[str, Answer]] = []
        self._server = PeerServer(local.listen(self.path), local.accept, self._serve)

    def new_store(self) -> MemoryStore:
        """An empty store in place of the one before, whose waits end with an error."""
        store, before = MemoryStore(), self._store
        self._store = store
        if before is not None:
            before.close()
        return store

    def wishes(self) -> list[tuple[int, dict[str, Any]]]:
        """Requests since the last call: the pid, as the kernel tells it, and options by full name."""
        with self._lock:
            wishes, self._wishes = self._wishes, []
        return wishes

    def leaves(self) -> list[tuple[str, Answer]]:
        """Leaves that somebody of this user asks for, since the last call: the rank or host, and what to call once."""
        with self._lock:
            leaves, self._leaves = self._leaves, []
        return leaves

    def close(self) -> None:
        self._server.close()
        if self._store is not None:
            self._store.close()

    def _serve(self, sock: socket.socket, link: Link, known: Callable[[], None]) -> None:
        link.settimeout(None)
        request = link.receive(lambda _: WISH_BYTES)
        known()
        if request.kind == remote_store.OPEN and self._store is not None:
            remote_store.serve(self._store, link)
        elif request.kind == WISH:
            try:
                wish = decode(request.data, dict[str, object], "of a worker's wish")
            except DamagedRecord:
                console(f"what process {local.process_of(sock)} asked of the launcher cannot be read and is ignored")
                return
            with self._lock:
                self._wishes.append((local.process_of(sock), wish))
            self._wake()
            link.send(_TAKEN)
        elif request.kind == LEAVE:
            answers: SimpleQueue[tuple[bytes, str]] = SimpleQueue()
            with self._lock:
                self._leaves.append((request.data.decode(errors="replace"), lambda *each: answers.put(each)))
            self._wake()
            with suppress(Empty):
                kind, text = answers.get(timeout=_ANSWER_S)
                link.send(kind, data=[text.encode()[:ANSWER_BYTES]])
