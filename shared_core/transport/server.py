"""A listener of an agent: one thread for each connection, bounded in number, whatever strangers do."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from shared_core.system.wire import Link

#: Most connections at once that have not said yet what they want.
_MOST_NEW = 64
#: Seconds to wait when the machine has no descriptor or thread left for another connection.
_NO_ROOM_S = 0.1


class PeerServer:
    """Accepts connections and serves each on a thread.

    Of those that have not proved who they are, the one that has been silent for longest gives way to a new one.

    Args:
        listener: to accept connections from; it is closed with this object.
        greet: has the other side prove who it is; returns the link. Raises OSError if it does not, or not in time.
        serve: answers on the link until the other side goes; gets the socket and what to call once the first request
            has come. Raises OSError when the other side has gone.
    """

    def __init__(
        self,
        listener: socket.socket,
        greet: Callable[[socket.socket], Link],
        serve: Callable[[socket.socket, Link, Callable[[], None]], None],
    ) -> None:
        self._listener, self._greet, self._serve = listener, greet, serve
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._new: dict[socket.socket, None] = {}  # the oldest first
        self._all: set[socket.socket] = set()
        # Half of the descriptors are for the agent itself.
        self._most = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        threading.Thread(target=self._accept, name="swift-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening; connections that are open continue."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:  # no descriptor is left, or no memory
                self._closed.wait(_NO_ROOM_S)
                continue
            if not self._admit(sock):
                sock.close()
                continue
            try:
                threading.Thread(target=self._answer, args=(sock,), name="swift-server", daemon=True).start()
            except RuntimeError:  # no thread is left
                self._gone(sock)
                sock.close()
                self._closed.wait(_NO_ROOM_S)

    def _admit(self, sock: socket.socket) -> bool:
        """Whether there is room; the one that has been silent for longest gives it up."""
        with self._lock:
            if len(self._all) >= self._most or len(self._new) >= min(_MOST_NEW, self._most // 2):
                oldest = next(iter(self._new), None)
                if oldest is None:
                    return False
                del self._new[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._new[sock] = None
            self._all.add(sock)
            return True

    def _answer(self, sock: socket.socket) -> None:
        def known() -> None:
            with self._lock:
                self._new.pop(sock, None)

        try:
            with suppress(OSError, MemoryError), sock, self._greet(sock) as link:
                self._serve(sock, link, known)
        finally:
            self._gone(sock)

    def _gone(self, sock: socket.socket) -> None:
        with self._lock:
            self._new.pop(sock, None)
            self._all.discard(sock)
