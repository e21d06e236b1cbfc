"""A small web server in the launcher's process: it answers GET for a few pages, and nothing else."""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shared_core.errors import ConfigError
from shared_core.kinds import check_host

LOOPBACK = "127.0.0.1"
#: Most requests at once; who comes then takes the place of the one that has been here longest.
_MOST = 16
#: Most threads at once, those of clients that were sent away and that still prepare an answer among them.
_MOST_THREADS = 2 * _MOST
#: A request and its answer take so long together, in seconds, however often the client sends or reads a little.
_MAX_WAIT_S = 10.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Page:
    """What a path gives. ``headers``: besides those that every answer has, or in their place."""

    kind: str
    body: Callable[[], bytes]
    headers: Mapping[str, str] = field(default_factory=dict)


class DashboardServer:
    """Listens from the beginning, so that a port that is taken is noticed before a job is started; answers later.

    Args:
        option: with which the user chose the port, for the error.
        port: 0 for a free one.

    Attributes:
        address: see above.
        port: where it listens.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, option: str, address: str, port: int) -> None:
        self.address = address
        check_host(f"{option}, address {address!r}", address)
        kind = _IPv6 if ":" in address else _Server
        try:
            self._http = kind((address, port), _Handler)
        except (OSError, OverflowError) as error:
            what = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{option} {port}: cannot listen at {address}:{port} ({what}): choose another port, or 0 for a free one"
            ) from error
        self._http.names = _names(address)
        self.port = int(self._http.server_address[1])
        self._serves = False

    def serve(self, pages: Mapping[str, Page]) -> None:
        """Start a daemon thread that serves ``pages``, by path."""
        self._http.pages = pages
        run = functools.partial(self._http.serve_forever, poll_interval=0.1)  # so long the end waits for it
        threading.Thread(target=run, name="swift-watch", daemon=True).start()
        self._serves = True

    def close(self) -> None:
        if self._serves:
            self._http.shutdown()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False
    request_queue_size = 64
    names: frozenset[str] = frozenset()
    pages: Mapping[str, Page] = {}

    def __init__(self, *args: Any) -> None:
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}  # of clients, oldest first
        self._free = threading.BoundedSemaphore(_MOST_THREADS)
        super().__init__(*args)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # that of HTTPServer asks a name server for this machine's name

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.2)  # without a free descriptor the request stays, and would be tried again at once
            raise

    def service_actions(self) -> None:
        """Send away who takes too long; called between requests, at least every poll interval of the server."""
        with self._lock:
            now = time.monotonic()
            for client in [each for each, since in self._since.items() if now - since > _MAX_WAIT_S]:
                self._send_away(client)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            if len(self._since) >= _MOST:
                self._send_away(next(iter(self._since)))
            self._since[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._leaves(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leaves(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # before its descriptor is closed, and perhaps another's
            self._since.pop(request, None)
        super().shutdown_request(request)

    def _send_away(self, client: socket.socket) -> None:
        """End its connection under the lock; its thread then closes it."""
        del self._since[client]
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _leaves(self, client: socket.socket) -> None:
        with self._lock:
            self._since.pop(client, None)
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nobody needs to know of a client that has gone."""


class _IPv6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "swift", ""
    timeout = _MAX_WAIT_S

    def do_GET(self) -> None:
        reached = str(self.connection.getsockname()[0])
        if not is_ours(self.headers.get_all("Host", []), reached, self.server.names):
            names = ", ".join(sorted({*self.server.names, reached, "localhost"}))
            said = f"this server answers as {names}; for another name: --metrics-address NAME\n"
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, said.encode())
            return
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self._answer(HTTPStatus.NOT_FOUND, b"there is no such page\n")
            return
        try:
            body = page.body()
        except (OSError, ValueError) as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}\n".encode())
            return
        self._answer(HTTPStatus.OK, body, {"Content-Type": page.kind, **page.headers})

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"GET only\n", {"Allow": "GET"})

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(self, status: HTTPStatus, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        sent = _HEADERS | {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in (sent | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(OSError):  # it has gone, was sent away, or reads nothing
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The console is the job's."""


def is_ours(hosts: list[str], reached: str, names: frozenset[str]) -> bool:
    """Whether a request names this server as one who means it does. A page of another site whose name was made to lead
    here names its own site.

    Args:
        hosts: values of the request's ``Host``.
        reached: address at which the connection has reached this machine.
        names: others that count, in small letters.
    """
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:@\[\]]+)(:\d*)?", hosts[0].strip()) if len(hosts) == 1 else None
    if match is None:
        return False
    name = match[1].strip("[]").lower()
    here = _address(reached)
    given = _address(name)
    if given is None or here is None:
        return name in names or (name == "localhost" and here is not None and here.is_loopback)
    # An address is no name that another could have made lead here. Elsewhere a port may be passed on from another one.
    return given == here or (given.is_loopback if here.is_loopback else True)


def _names(address: str) -> frozenset[str]:
    """By which a server at this address may be asked for: what the user has called it, else what this machine is."""
    given = _address(address)
    if given is None:
        return frozenset({address.lower()})
    return frozenset() if given.is_loopback else frozenset({socket.gethostname().lower()})


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a text is, if any; one of IPv4 where it comes as one of IPv6."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
