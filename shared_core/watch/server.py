"""A small web server in the launcher's process: it answers GET for a few pages, and nothing else."""

from __future__ import annotations

import functools
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

LOOPBACK = "127.0.0.1"
#: Names by which a browser reaches this machine's loopback address; a name of another that leads here is refused.
_NAMES = frozenset({LOOPBACK, "localhost"})
#: Most requests at once; others are turned away. The launcher has other things to do.
_MOST = 16
#: A client that says nothing for so long is turned away, in seconds.
_PATIENCE_S = 10.0
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
    """What a path gives.

    Attributes:
        kind: its media type.
        body: makes it.
        headers: besides those that every answer has, or in their place.
    """

    kind: str
    body: Callable[[], bytes]
    headers: Mapping[str, str] = field(default_factory=dict)


class Server:
    """Listens from the beginning, so that a port that is taken is noticed before a job is started; answers later.

    Args:
        option: with which the user chose the port, for the error.
        address: to listen at.
        port: 0 for a free one.

    Attributes:
        address: see above.
        port: where it listens.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, option: str, address: str, port: int) -> None:
        self.address = address
        kind = _IPv6 if ":" in address else _Server
        try:
            self._http = kind((address, port), _Handler)
        except (OSError, OverflowError) as error:
            what = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{option} {port}: cannot listen at {address}:{port} ({what}): choose another port, or 0 for a free one"
            ) from error
        self._http.only_here = address in _NAMES
        self.port = int(self._http.server_address[1])
        self._serves = False

    def serve(self, pages: Mapping[str, Page]) -> None:
        """Answer in a thread of its own, which ends with the process.

        Args:
            pages: by path.
        """
        self._http.pages = pages
        run = functools.partial(self._http.serve_forever, poll_interval=0.1)  # so long the end waits for it
        threading.Thread(target=run, name="swift-watch", daemon=True).start()
        self._serves = True

    def close(self) -> None:
        """Answer no more."""
        if self._serves:
            self._http.shutdown()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False
    only_here = True
    pages: Mapping[str, Page] = {}

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(_MOST)
        super().__init__(*args)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # that of HTTPServer asks a name server for this machine's name

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.2)  # without a free descriptor the request stays, and would be tried again at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nobody needs to know of a client that has gone."""


class _IPv6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "swift", ""
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        """A page, or an error."""
        if self.server.only_here and not _is_ours(self.headers.get_all("Host", [])):
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"this server is for 127.0.0.1 and localhost only\n")
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
            with suppress(ConnectionError):
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The console is the job's."""


def _is_ours(hosts: list[str]) -> bool:
    """Whether a request names this machine as it should: a page elsewhere whose name was made to lead here does not."""
    return len(hosts) == 1 and hosts[0].partition(":")[0].lower() in _NAMES
