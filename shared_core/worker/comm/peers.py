"""Whose process is at the other end of a connection within this machine.

gloo asks nobody who they are, and any user of a machine can connect to 127.0.0.1 or send a worker to a port of its own.
But the kernel knows to which user the other end belongs.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_TABLE = Path("/proc/net/tcp")
_ESTABLISHED = 1
#: ``sock_diag(7)``: header of a netlink message; request for one socket; what is said of it, up to its inode.
_HEAD = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI2s2s4s12x4s12xIII")
_ANSWER = struct.Struct("=BB2x48x12xII")
_SOCK_DIAG, _BY_FAMILY, _REQUEST_FLAG, _NO_COOKIE = 4, 20, 1, 0xFFFFFFFF

#: An address and a port.
Place = tuple[str, int]


def unknown(connections: Iterable[tuple[Place, Place]]) -> int:
    """How many connections have no owner at the other end yet: not accepted so far, or closed. ``connections``: own end
    and other end of each; those outside of 127.0.0.0/8 are passed over.

    Raises:
        PermissionError: another user's process is at the other end of one.
    """
    count = 0
    for own, theirs in connections:
        if own[0].startswith("127.") and theirs[0].startswith("127."):
            state, user, inode = _ask_kernel(theirs, own) or _look_up(theirs, own)
            if inode and user != os.geteuid():
                raise PermissionError(f"a process of user {user} has taken the place of a worker")
            count += not inode or state != _ESTABLISHED
    return count


def _ask_kernel(own: Place, other: Place) -> tuple[int, int, int] | None:
    """State, user and inode of the socket at ``own``, by ``sock_diag(7)``; None where the kernel cannot be asked."""
    places = (
        struct.pack("!H", own[1]),
        struct.pack("!H", other[1]),
        socket.inet_aton(own[0]),
        socket.inet_aton(other[0]),
    )
    body = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF, *places, 0, _NO_COOKIE, _NO_COOKIE)
    with suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as sock:
        sock.settimeout(1.0)
        sock.send(_HEAD.pack(_HEAD.size + len(body), _BY_FAMILY, _REQUEST_FLAG, 0, 0) + body)
        answer = sock.recv(4096)
        if _HEAD.unpack_from(answer)[1] == _BY_FAMILY:
            _, state, user, inode = _ANSWER.unpack_from(answer, _HEAD.size)
            return state, user, inode
    return None


def _look_up(own: Place, other: Place) -> tuple[int, int, int]:
    """The same from ``/proc/net/tcp``, which takes milliseconds where there is much memory; zeros if
    it is not there.
    """
    ends = [f"{socket.inet_aton(host)[::-1].hex().upper()}:{port:04X}" for host, port in (own, other)]
    for line in _TABLE.read_text().splitlines()[1:]:
        columns = line.split()
        if columns[1:3] == ends:
            return int(columns[3], 16), int(columns[7]), int(columns[9])
    return 0, 0, 0
