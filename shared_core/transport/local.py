"""Links within a machine, over a Unix socket in the private folder of the job.

Only the job's user can enter the folder, and the kernel says which process is at the other end: no secret is needed.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared_core.system.wire import CONNECT_S, Link

#: Longest address of a socket that is used, in bytes; the kernel takes few more.
_LONGEST = 100
#: More workers than start on one machine at once.
_BACKLOG = 1024
_PEER = struct.Struct("3i")


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """What a socket can be bound or connected to: the path, or a short one that leads there."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """A listener at ``path``. Raises OSError where it cannot be made, or something is there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def connect(path: Path) -> Link:
    """A link to who listens at ``path``, without a proof and MACs. Raises OSError where nobody does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # While many connect at once the kernel lets a blocking socket wait, and refuses one with a time-out at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(CONNECT_S), 0))
        with _address(path) as address:
            sock.connect(address)
    except OSError:
        sock.close()
        raise
    return Link(sock, None, serves=False)


def accept(sock: socket.socket) -> Link:
    """The other side of :func:`connect`. Raises PermissionError for another user's process."""
    _, user, _ = _peer(sock)
    if user != os.geteuid():
        raise PermissionError(f"a process of user {user} is at the other end")
    return Link(sock, None, serves=True)


def process_of(sock: socket.socket) -> int:
    """The pid of the process that has connected, in this process' namespace."""
    return _peer(sock)[0]


def _peer(sock: socket.socket) -> tuple[int, int, int]:
    pid, user, group = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user, group
