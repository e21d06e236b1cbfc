"""Where the machines of a job meet: one small document behind torchelastic's rendezvous backends.

These keep a value that is replaced only by who knows its newest form; no other agreement is needed here.
"""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from shared_core.codec import Count, Name, Port, damaged, decode
from shared_core.errors import ConfigError
from shared_core.kinds import check_host
from shared_core.launcher.etcd import ETCD, EtcdBackend
from shared_core.launcher.ports import StoreConnection, listen, serve_store

FORMING, RUNNING, ENDED = "forming", "running", "ended"
#: What to do about a damaged document.
ADVICE = "choose another --rdzv-id"


class _Member(TypedDict):
    name: str
    nproc: Count
    nnodes: str


class _Host(_Member, total=False):
    host: bool


class _Phase(TypedDict):
    phase: Literal["forming", "running", "ended"]


class _Document(_Phase, total=False):
    round: Count
    attempt: Count
    run: Name
    members: list[_Host]
    store: tuple[str, Port]
    beat: Count


#: Fields that a document must have in each phase.
_NEEDED = {
    FORMING: ("round", "attempt", "run", "members"),
    RUNNING: ("round", "attempt", "run", "members", "store"),
    ENDED: (),
}


def read_document(raw: bytes, key: str) -> dict[str, Any]:
    """The document; raises DamagedRecord. ``key``: where it is kept, for the message."""
    document: dict[str, Any] = decode(raw, _Document, key, ADVICE)
    phase = document["phase"]
    for name in _NEEDED[phase]:
        if name not in document:
            raise damaged(key, f"it is {phase} without {name!r}", ADVICE)
    if phase == RUNNING and not document["members"]:
        raise damaged(key, "it is running without members", ADVICE)
    return document | {"store": list(document["store"])} if "store" in document else document


C10D = "c10d"
BACKENDS = (C10D, ETCD)
#: Longest wait for a store's answer before signals and time-outs are checked again, in seconds.
ANSWER_S = 0.25
_PORTS = {C10D: 29400, ETCD: 2379}


class Gone(ConnectionError):
    """The machine of the rendezvous answers, but nothing listens at its port."""


def parse_endpoints(endpoints: str, backend: str) -> tuple[tuple[str, int], ...]:
    """Hosts and ports of ``HOST[:PORT]``; for etcd also several, with commas. Raises ConfigError for any other form."""
    found = []
    for endpoint in endpoints.split(","):
        host, _, port = endpoint.strip().rpartition(":") if ":" in endpoint.rpartition("]")[2] else (endpoint, "", "")
        if not host.strip("[] ") or (port and not port.isdecimal()) or "/" in host:
            raise ConfigError(f"--rdzv-endpoint {endpoints!r}: HOST:PORT is needed for several machines")
        if len(port) > 5 or int(port or 1) not in range(1, 65536):
            raise ConfigError(f"--rdzv-endpoint {endpoints!r}: the port must be between 1 and 65535")
        check_host(f"--rdzv-endpoint {endpoints!r}", host)
        found.append((host.strip("[] "), int(port) if port else _PORTS[backend]))
    if backend == C10D and len(found) > 1:
        raise ConfigError(f"--rdzv-endpoint {endpoints!r}: several endpoints are for --rdzv-backend {ETCD}")
    return tuple(found)


def is_here(host: str) -> bool:
    """Whether ``host`` names this machine: only then can a socket be bound to it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def own_address(peer: tuple[str, int]) -> str:
    """The address by which this machine reaches ``peer``; nothing is sent. Raises OSError if there is no route."""
    family, kind, _, _, address = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def probe(place: tuple[str, int], timeout_s: float = 1.0) -> None:
    """Return if somebody listens there. Raises Gone if the machine answers and nobody does; else OSError."""
    try:
        socket.create_connection(place, timeout_s).close()
    except ConnectionRefusedError as error:
        raise Gone(str(error)) from error


class Register:
    """The document of one job.

    Args:
        backend: ``c10d`` or ``etcd``.
        endpoints: hosts and ports; one with c10d.
        options: of ``--rdzv-conf``.

    Attributes:
        hosts: whether this process hosts the rendezvous (c10d only).
    """

    def __init__(
        self,
        backend: str,
        endpoints: Sequence[tuple[str, int]],
        run_id: str,
        options: dict[str, Any],
        timeout_s: float,
    ) -> None:
        self.backend, self.endpoints, self.run_id = backend, tuple(endpoints), run_id
        self.hosts = False
        self._options, self._timeout_s = options, timeout_s
        self._server: Any = None
        self._connection: StoreConnection | None = None
        self._backend: RendezvousBackend | None = None

    @property
    def endpoint(self) -> tuple[str, int]:
        return self._backend.endpoint if isinstance(self._backend, EtcdBackend) else self.endpoints[0]

    @property
    def where(self) -> str:
        return f"{', '.join(f'{host}:{port}' for host, port in self.endpoints)} ({self.backend})"

    @property
    def _key(self) -> str:
        return f"of the job {self.run_id} at {self.where}"

    def open(self) -> None:
        """Connect, or host the rendezvous where the endpoint is this machine's.

        Raises:
            Gone, OSError, RendezvousConnectionError: if it cannot be reached now. Call again: a connection that was
                begun continues.
            ConfigError: if trying again cannot help.
        """
        if self.backend == ETCD:
            self._backend = EtcdBackend(self.endpoints, self.run_id, self._options, self._timeout_s)
            self._backend.get_state()
            return
        if self._server is None and is_here(self.endpoint[0]):
            try:
                listener = listen(*self.endpoint)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # then another agent of this machine hosts it
                    raise
            else:
                self._server = serve_store(self.endpoint[0], listener, max(1.0, self._timeout_s))
                self.hosts = True
        if not self.hosts:
            probe(self.endpoint)
        try:
            self._backend = C10dRendezvousBackend(self._server or self._client(), self.run_id)
        except RuntimeError as error:
            raise RendezvousConnectionError(str(error)) from error

    def _client(self) -> Any:
        if self._connection is None:
            self._connection = StoreConnection(*self.endpoint, max(1.0, self._timeout_s))
        try:
            client = self._connection.client(ANSWER_S)
        except ConnectionError:
            self._connection = None
            raise
        self._connection = None
        return client

    def change(self, how: Callable[[dict[str, Any] | None], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Replace the document by what ``how`` makes of its newest form; returns the newest document.

        ``how`` is called again when somebody else was faster; None leaves the document as it is.

        Raises:
            RendezvousConnectionError: if the rendezvous cannot be reached.
            DamagedRecord: if something else is kept there.
        """
        assert self._backend is not None
        try:
            state = self._backend.get_state()
        except RendezvousStateError as error:
            raise damaged(self._key, f"it is not encoded ({error.__cause__})", ADVICE) from None
        while True:
            document = None if state is None else read_document(state[0], self._key)
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
