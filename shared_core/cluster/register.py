"""Where the machines of a job meet: one small document behind torchelastic's rendezvous backends.

Those offer a value that is replaced only by who knows its newest form; that is all the agreement needed here.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from shared_core.errors import ConfigError

C10D, ETCD = "c10d", "etcd-v2"
BACKENDS = (C10D, ETCD)
_PORTS = {C10D: 29400, ETCD: 2379}
_ETCD_TTL_S = 7 * 86400


class Gone(ConnectionError):
    """The machine of the rendezvous answers, but nothing listens at its port."""


class EtcdBackend(RendezvousBackend):
    """As torchelastic's ``etcd-v2`` backend, without the package ``python-etcd``, which is no longer maintained.

    Args:
        endpoint: host and port.
        run_id: name of the job.
        options: ``protocol`` (http or https), ``ca_cert``, ``ssl_cert``, ``ssl_cert_key``, as torchelastic's.
        timeout_s: of one request.
    """

    def __init__(self, endpoint: tuple[str, int], run_id: str, options: dict[str, Any], timeout_s: float) -> None:
        protocol = str(options.get("protocol", "http"))
        host = f"[{endpoint[0]}]" if ":" in endpoint[0] else endpoint[0]
        path = urllib.parse.quote(f"/v2/keys/torch/elastic/swift/{run_id}")
        self._url = f"{protocol}://{host}:{endpoint[1]}{path}"
        self._timeout_s = timeout_s
        self._tls: ssl.SSLContext | None = None
        if protocol == "https":
            self._tls = ssl.create_default_context(cafile=options.get("ca_cert"))
            if options.get("ssl_cert"):
                self._tls.load_cert_chain(options["ssl_cert"], options.get("ssl_cert_key"))

    @property
    def name(self) -> str:
        """See base class."""
        return ETCD

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class."""
        status, answer = self._call("GET", {"quorum": "true"})
        return None if status == 404 else self._decode(answer)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """See base class."""
        condition = {"prevExist": "false"} if token is None else {"prevIndex": str(token)}
        value = base64.b64encode(state).decode()
        status, answer = self._call("PUT", condition, {"value": value, "ttl": str(_ETCD_TTL_S)})
        if status in (200, 201):
            return *self._decode(answer), True
        now = self.get_state()
        return None if now is None else (*now, False)

    def _call(self, method: str, query: dict[str, str], form: dict[str, str] | None = None) -> tuple[int, Any]:
        data = urllib.parse.urlencode(form).encode() if form else None
        request = urllib.request.Request(f"{self._url}?{urllib.parse.urlencode(query)}", data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s, context=self._tls) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (404, 412) and b"errorCode" in (body := error.read()):
                    return error.code, json.loads(body)
            hint = "; etcd must be started with --enable-v2" if error.code == 404 else ""
            raise RendezvousConnectionError(f"etcd at {self._url} answers {error.code}{hint}") from error
        except (OSError, ValueError) as error:
            raise RendezvousConnectionError(f"etcd at {self._url} cannot be reached: {error}") from error

    @staticmethod
    def _decode(answer: Any) -> tuple[bytes, Token]:
        node = answer["node"]
        return base64.b64decode(node["value"]), int(node["modifiedIndex"])


def parse_endpoint(endpoint: str, backend: str) -> tuple[str, int]:
    """Host and port of ``HOST[:PORT]``.

    Raises:
        ConfigError: if it has another form.
    """
    host, _, port = endpoint.strip().rpartition(":") if ":" in endpoint.rpartition("]")[2] else (endpoint, "", "")
    if not host.strip("[]") or (port and not port.isdigit()):
        raise ConfigError(f"--rdzv-endpoint {endpoint!r}: HOST:PORT is needed for several machines")
    return host.strip("[]"), int(port) if port else _PORTS[backend]


def is_here(host: str) -> bool:
    """Whether ``host`` names this machine: only then can it be bound to."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def own_address(peer: tuple[str, int]) -> str:
    """The address by which this machine reaches ``peer``; nothing is sent.

    Raises:
        OSError: if there is no way to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def probe(place: tuple[str, int], timeout_s: float = 1.0) -> None:
    """Return if somebody listens there.

    Raises:
        Gone: if the machine answers and nobody does.
        OSError: if it cannot be reached.
    """
    try:
        socket.create_connection(place, timeout_s).close()
    except ConnectionRefusedError as error:
        raise Gone(str(error)) from error


class Register:
    """The document of one job.

    Attributes:
        hosts: whether this process hosts the rendezvous (c10d only).

    Args:
        backend: ``c10d`` or ``etcd-v2``.
        endpoint: host and port.
        run_id: name of the job.
        options: of ``--rdzv-conf``.
        timeout_s: of one request.
    """

    def __init__(
        self, backend: str, endpoint: tuple[str, int], run_id: str, options: dict[str, Any], timeout_s: float
    ) -> None:
        self.backend, self.endpoint, self.run_id = backend, endpoint, run_id
        self.hosts = False
        self._options, self._timeout_s = options, timeout_s
        self._server: Any = None
        self._backend: RendezvousBackend | None = None

    def open(self) -> None:
        """Connect, or host the rendezvous where the endpoint is this machine's.

        Raises:
            Gone, OSError, RendezvousConnectionError: if it cannot be reached now.
        """
        if self.backend == ETCD:
            self._backend = EtcdBackend(self.endpoint, self.run_id, self._options, self._timeout_s)
            self._backend.get_state()
            return
        if self._server is None and is_here(self.endpoint[0]):
            try:
                self._server = self._store(master=True)
                self.hosts = True
            except RuntimeError:
                pass  # another agent of this machine does already
        if not self.hosts:
            probe(self.endpoint)
        try:
            self._backend = C10dRendezvousBackend(self._server or self._store(master=False), self.run_id)
        except RuntimeError as error:
            raise RendezvousConnectionError(str(error)) from error

    def _store(self, *, master: bool) -> Any:
        timeout = timedelta(seconds=max(1.0, self._timeout_s))
        return TCPStore(*self.endpoint, is_master=master, multi_tenant=True, timeout=timeout, wait_for_workers=False)

    def read(self) -> dict[str, Any] | None:
        """The document; None if there is none.

        Raises:
            RendezvousConnectionError: if the rendezvous cannot be reached.
        """
        assert self._backend is not None
        state = self._backend.get_state()
        return None if state is None else json.loads(state[0])

    def change(self, how: Callable[[dict[str, Any] | None], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Replace the document by what ``how`` makes of its newest form; returns what it then is.

        Args:
            how: called with the document, and again when somebody else was faster; None leaves it as it is.

        Raises:
            RendezvousConnectionError: if the rendezvous cannot be reached.
        """
        assert self._backend is not None
        state = self._backend.get_state()
        while True:
            document = None if state is None else json.loads(state[0])
            wanted = how(document)
            if wanted is None:
                return document
            answer = self._backend.set_state(json.dumps(wanted).encode(), None if state is None else state[1])
            if answer is None:
                state = None
            elif answer[2]:
                return wanted
            else:
                state = answer[:2]
