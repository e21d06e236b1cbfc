"""Where a job listens: on one address of this machine if it is known, and at the ports that the user has chosen."""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shared_core.errors import ConfigError


@dataclass(frozen=True)
class Ports:
    """The ports that the agent of a machine opens, from ``first`` (``--port``) on; 0 for any free one."""

    first: int = 0

    @property
    def store(self) -> int:
        """Of the job's store, on the machine that hosts it."""
        return self.first

    @property
    def copies(self) -> int:
        """Of the copies of the training state, on each machine."""
        return self.first and self.first + 1

    def take(self, host: str, port: int) -> socket.socket:
        """A listener, as :func:`listen` makes it; raises ConfigError."""
        try:
            return listen(host, port)
        except OSError as error:
            why = str(error.strerror).partition(" (while")[0]
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(
                    f"--port {self.first} needs ports {self.store} and {self.copies} of this machine, and cannot "
                    f"listen at {port}: {why}. Choose another one, different for each swiftrun of a machine and not "
                    "the port of --rdzv-endpoint"
                ) from error
            raise ConfigError(
                f"this machine cannot listen at {host}: {why}. Give one of its addresses with --local-addr"
            ) from error


def bound_to(host: str) -> str:
    """The address to listen at where others reach this machine as ``host``; empty for all addresses.

    That is the address which the name has here, if it has one. But many systems give a machine's own name an address
    that others do not reach (127.0.1.1).
    """
    try:
        ipaddress.ip_address(host)
        return host
    except ValueError:
        pass
    found = {str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    loopback = all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found)
    if loopback == (host == "localhost"):
        if len(found) == 1:
            return found.pop()
        if loopback and "127.0.0.1" in found:
            return "127.0.0.1"
    return ""


def listen(host: str, port: int) -> socket.socket:
    """A listener at the address that :func:`bound_to` gives; port 0 is any free one. Raises OSError."""
    address = bound_to(host)
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=128)


class StoreConnection:
    """A client of torch's store, connected on a thread that is abandoned if nobody answers there.

    torch's constructor waits for minutes, whatever its time-out is, where something listens that is no store, and no
    signal reaches a thread that is in it. ``timeout_s`` is of the client's requests, in seconds.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.place = (host, port)
        self._timeout = timedelta(seconds=timeout_s)
        self._error: RuntimeError | None = None
        self._client: TCPStore
        self._over = threading.Event()
        threading.Thread(target=self._connect, name="swift-connect", daemon=True).start()

    def client(self, wait_s: float) -> TCPStore:
        """The client, after at most ``wait_s`` seconds. Raises TimeoutError if nothing has answered as a store does
        until now: call again; ConnectionError if the store cannot be reached.
        """
        if not self._over.wait(wait_s):
            raise TimeoutError("something listens there and does not answer as a store of torch does")
        if self._error is not None:
            raise ConnectionError(str(self._error)) from self._error
        return self._client

    def _connect(self) -> None:
        try:
            self._client = TCPStore(*self.place, is_master=False, timeout=self._timeout, wait_for_workers=False)
        except RuntimeError as error:
            self._error = error
        self._over.set()


def serve_store(host: str, listener: socket.socket, timeout_s: float = 300.0) -> TCPStore:
    """The server of a store behind this listener, which it owns from now on. ``timeout_s`` is of waits for keys.
    torch's own listens on every interface of the machine.
    """
    port = int(listener.getsockname()[1])
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
