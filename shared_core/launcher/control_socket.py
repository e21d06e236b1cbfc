"""The agent's Unix socket in the private folder of the job: the store of a job on one machine, and the wishes of this
machine's workers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared_core.errors import DamagedRecord
from shared_core.events import console
from shared_core.protocol.codec import decode
from shared_core.protocol.worker_messages import WISH, WISH_BYTES
from shared_core.system.jobdir import AGENT
from shared_core.system.wire import Link
from shared_core.transport import local, remote_store
from shared_core.transport.server import Server
from shared_core.transport.store import MemoryStore

_TAKEN = b"."


class ControlSocket:
    """Listens for this machine's workers, from the beginning to the end of the agent.

    Args:
        job_dir: private folder of the job.
        wake: called on a thread when there is a wish; must not block.

    Attributes:
        path: of the socket.
    """

    def __init__(self, job_dir: Path, wake: Callable[[], None]) -> None:
        self.path = job_dir / AGENT
        self._wake = wake
        self._store: MemoryStore | None = None
        self._lock = threading.Lock()
        self._wishes: list[tuple[int, dict[str, Any]]] = []
        self._server = Server(local.listen(self.path), local.accept, self._serve)

    def new_store(self) -> MemoryStore:
        """An empty store, in the place of the one before: whoever waits there is sent away."""
        store, before = MemoryStore(), self._store
        self._store = store
        if before is not None:
            before.close()
        return store

    def wishes(self) -> list[tuple[int, dict[str, Any]]]:
        """What was asked for since the last call: the number of the process that did, from the kernel, and options."""
        with self._lock:
            wishes, self._wishes = self._wishes, []
        return wishes

    def close(self) -> None:
        """Listen no more, and send away whoever waits."""
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
