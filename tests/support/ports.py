"""Free ports, for tests that tell another program where to listen."""

from __future__ import annotations

import contextlib
import secrets
import socket

#: Below the ports that Linux gives to outgoing connections, any of which may take a port that was free a moment ago.
_LOWEST, _HIGHEST = 20_000, 32_767


def free_ports(count: int = 1) -> list[int]:
    """Consecutive ports on which nobody listens, drawn at random."""
    while True:
        first = _LOWEST + secrets.randbelow(_HIGHEST - _LOWEST - count)
        ports = list(range(first, first + count))
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                stack.enter_context(socket.create_server(("", port)))
            return ports
