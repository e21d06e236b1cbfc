"""How a machine is stopped that may no longer take part."""

from __future__ import annotations

import os
import socket


class Fenced(Exception):  # noqa: N818 (not an error of anybody's)
    """This machine lost its lease or its place: its workers are stopped. It may come back as a spare machine."""


def sever(port: int) -> int:
    """Shut down this process's TCP connections to ``port``, which wakes every thread that waits in one.
    Returns how many there were.
    """
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername()[1] == port:
                    sock.shutdown(socket.SHUT_RDWR)
                    cut += 1
        except OSError:
            continue  # not connected, or already closed
    return cut
