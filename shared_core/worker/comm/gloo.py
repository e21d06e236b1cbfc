"""One inner gloo group of one generation: connect with a way out, and cut it in milliseconds.

Gloo has no abort: a blocked operation ignores ``abort()`` and ``shutdown()`` and ends only when its sockets do. So
where every member listens is noted when the group connects, and cutting means shutting down the connections that use
one of these addresses.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

from torch._C._distributed_c10d import Store as TorchStore

from shared_core.errors import DamagedRecord, GenerationAbandoned, NotConnected, RecoveryFailed, WaitTimeout
from shared_core.faults import inject
from shared_core.protocol.codec import Form, decode
from shared_core.protocol.worker_env import ADDRESS
from shared_core.system import threads
from shared_core.transport.store import Store
from shared_core.waiting import Wait, poll, ranks_text
from shared_core.worker.comm import compat, peers
from shared_core.worker.comm.compat import ProcessGroupGloo, gloo_options, set_operation_timeout
from shared_core.worker.comm.peers import Place
from shared_core.worker.comm.quiet import quiet

#: Untyped, because torch's stubs leave out most of it.
_Store: Any = TorchStore
_device_lock = threading.Lock()
#: Names of threads that gloo and its process groups start.
NATIVE_THREADS = frozenset({"gloo_tcp_loop", "pt_gloo_runloop"})
#: A member whose listening socket was not found.
_UNKNOWN = "unknown"
_Hex = Annotated[str, Form(r"([0-9a-f]{2})*", "bytes in hexadecimal")]
#: How long gloo may take to give operations back once their sockets are shut down. It takes 2 ms, or it never does:
#: that is so in one failure of eight, and then all of this is added to the stall.
STUCK_S = 0.05


def finish(work: Any, abandoned: Callable[[], bool], what: str, wait: Wait | None = None) -> None:
    """Wait for a collective of an inner group, which another thread cuts when the generation is abandoned.

    Raises:
        GenerationAbandoned: if it was cut and gloo does not give the operation back, as happens now and then: gloo may
            still read its tensors.
        RuntimeError: what gloo reports.
        WaitTimeout: at the limit of ``wait``, where one is given.
    """
    done, future = threading.Event(), work.get_future()
    future.add_done_callback(lambda _: done.set())
    while not done.wait(0.05):
        if abandoned() and not done.wait(STUCK_S):
            raise GenerationAbandoned(what)
        if wait is not None:
            wait.look()
    future.value()


class _RendezvousStore(_Store):  # type: ignore[misc]
    """The store given to gloo, which writes there how each member can be reached, and reads that of all others.

    Reading them one by one would cost each member two requests for each other one. So the last to write puts all
    together under one key, and each reads that. Its wait ends when the generation is abandoned.

    Args:
        inner: where they meet, prefixed for this group.
        place: where this process listens, as ``"address port"``.
        own: this process' rank in the group.
        members: global ranks, in group order.
        abandoned: whether to give up.
        silent: print no line about a long wait.

    Attributes:
        places: where the members listen; empty before the first ``wait`` returns.
    """

    def __init__(
        self,
        inner: Any,
        place: str,
        own: int,
        members: Sequence[int],
        abandoned: Callable[[], bool],
        wait_timeout_s: float,
        what: str,
        *,
        silent: bool,
    ) -> None:
        super().__init__()
        self._inner, self._place, self._own, self._members = inner, place, own, members
        self._abandoned = abandoned
        self._wait = Wait(
            f"rank {members[own]}",
            lambda: f"{ranks_text(rank for at, rank in enumerate(members) if not self._come(at))} to connect {what}",
            wait_timeout_s,
            speaks=lambda: not silent and not any(self._come(at) for at in range(own)),
        )
        self._values: dict[str, bytes] = {}
        self.places: frozenset[str] = frozenset()

    def clone(self) -> _RendezvousStore:
        return self

    def set(self, key: str, value: bytes) -> None:
        self._inner.set(f"at/{self._own}", json.dumps([key, self._place, value.hex()]))
        size = len(self._members)
        if self._inner.add("come", 1) == size:
            said = self._inner.multi_get([f"at/{at}" for at in range(size)])
            self._inner.set("all", b"[" + b",".join(map(bytes, said)) + b"]")

    def get(self, key: str) -> bytes:
        if key not in self._values:
            raise NotConnected(f"rank {self._members[self._own]}: another group meets under the same name (no {key})")
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        inject.point("recovery.connecting")
        if not self._values:
            poll(lambda: bool(self._inner.check(["all"])), self._abandoned, self._wait)
            rows = decode(self._inner.get("all"), list[tuple[str, str, _Hex]], "all")
            self.places = frozenset(place for _, place, _ in rows) - {_UNKNOWN}
            self._values = {key: bytes.fromhex(value) for key, _, value in rows}

    def _come(self, at: int) -> bool:
        return bool(self._inner.check([f"at/{at}"]))


def _place(address: tuple[Any, ...]) -> str:
    return f"{address[0]} {address[1]}"


def _socket_fds() -> list[tuple[int, str]]:
    out: list[tuple[int, str]] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:"):
            out.append((int(name), link))
    return out


class _Ends(NamedTuple):
    """What a TCP socket keeps for its life, once it listens or is connected."""

    own: Place
    #: None for a socket that listens.
    theirs: Place | None


class _Sockets:
    """TCP sockets of this process. Each is asked once where its ends are: to ask all of them for each new group took
    longer than to connect it, where there were hundreds of groups.
    """

    def __init__(self) -> None:
        self._ends: dict[str, _Ends] = {}

    def now(self) -> list[tuple[int, str, _Ends]]:
        """Descriptor, name in ``/proc`` and ends of each that listens or is connected. Any thread may call it."""
        known, found = self._ends, []
        for fd, link in _socket_fds():
            ends = known.get(link) or _ask(fd, link)
            if ends is not None:
                found.append((fd, link, ends))
        self._ends = {link: ends for _, link, ends in found}
        return found


def _ask(fd: int, link: str) -> _Ends | None:
    """None for a socket that is not TCP, is not connected yet, or is closed by now."""
    with suppress(OSError), _duplicate(fd, link) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return _Ends(sock.getsockname()[:2], None if listens else sock.getpeername()[:2])
    return None


def _duplicate(fd: int, link: str) -> socket.socket:
    """Raises OSError if ``fd`` is not the socket ``link`` any more: another thread may have closed it, and the number
    may be another socket's.
    """
    copy = os.dup(fd)
    if os.readlink(f"/proc/self/fd/{copy}") != link:
        os.close(copy)
        raise OSError(f"{link} is closed")
    return socket.socket(fileno=copy)


_sockets = _Sockets()


class InnerGroup:
    """A connected gloo group of one generation.

    Attributes:
        pg: gloo's process group; None after :meth:`discard`.
        rank: global rank of this process.
        members: global ranks, in group order.
        severed: its connections were cut. Set before they are.
    """

    def __init__(
        self, pg: Any, place: str, peers: frozenset[str], rank: int, members: tuple[int, ...], wait_timeout_s: float
    ) -> None:
        self.pg = pg
        self.rank, self.members, self.wait_timeout_s = rank, members, wait_timeout_s
        self.severed = False
        self._cut: set[str] = set()
        self._place = place
        self._peers = peers

    @classmethod
    def connect(
        cls,
        store: Store,
        rank: int,
        members: Sequence[int],
        *,
        operation_timeout: timedelta,
        connect_timeout_s: float,
        wait_timeout_s: float,
        abandoned: Callable[[], bool],
        what: str,
        silent: bool = False,
    ) -> InnerGroup:
        """Meet the other members in ``store`` (already prefixed by generation and group) and connect to them. Blocks.

        Args:
            rank: global rank of this process.
            members: global ranks, in group order.
            connect_timeout_s: longest time to connect the sockets.
            wait_timeout_s: longest wait for a member.
            abandoned: whether the generation has ended; asked while it waits.
            what: the group, and where, for the line that says who is waited for.
            silent: leave that line to whoever waits for the group's operations.

        Raises:
            GenerationAbandoned: if the generation ends meanwhile.
            NotConnected: if a member cannot be reached.
            RecoveryFailed: if another user's process is in a member's place.
            WaitTimeout: if a member does not come within ``wait_timeout_s``.
            DamagedRecord: if what a member wrote about how it can be reached cannot be read.
        """
        with _device_lock:
            before = {link for _, link in _socket_fds()}
            device = threads.persist(_default_device, "open a device of gloo")  # it has a thread
            new = [_place(ends.own) for _, link, ends in _sockets.now() if ends.theirs is None and link not in before]
        place = new[0] if new else _UNKNOWN
        own = list(members).index(rank)
        met = _RendezvousStore(store, place, own, members, abandoned, wait_timeout_s, what, silent=silent)
        options = gloo_options(device, timedelta(seconds=connect_timeout_s))
        try:
            pg = _make(lambda: ProcessGroupGloo(met, own, len(members), options), abandoned, what)
        except RuntimeError as error:
            if isinstance(error, (WaitTimeout, DamagedRecord)):
                raise
            if isinstance(error, GenerationAbandoned) or abandoned():
                raise GenerationAbandoned(f"{what}: {error}") from error
            raise NotConnected(f"{what}: {error}") from error
        set_operation_timeout(pg, operation_timeout)
        group = cls(pg, place, met.places, rank, tuple(members), wait_timeout_s)
        try:
            who, whom = f"rank {rank}", f"its peers to accept the sockets of {what}"
            slow = "A firewall may be in the way; raise detection.connect_timeout_s if the peers are only slow."
            wait = Wait(who, whom, connect_timeout_s, bound="detection.connect_timeout_s", advice=slow)
            poll(group._known, abandoned, wait)
        except PermissionError as error:
            group.discard()
            raise RecoveryFailed(
                f"rank {rank}: {error} in {what}: nothing was sent to it. Find out who that is, or run the job where "
                "others cannot reach 127.0.0.1 (docs/machines.md#security)"
            ) from error
        except GenerationAbandoned:
            group.discard()
            raise
        except WaitTimeout as error:
            group.discard()
            raise NotConnected(f"{what}: {error}") from error
        return group

    def _known(self) -> bool:
        """Whether all ends on this machine belong to this user."""
        return not peers.unknown(ends for _, _, ends in self._connections())

    def discard(self) -> None:
        """Cut the group and drop it. Its destructor waits for gloo's threads, so it runs on a thread of its own."""
        self.sever()
        box = [self.pg]
        self.pg = None
        threads.start(box.clear, name="swift-drop")

    @property
    def addresses(self) -> frozenset[str]:
        """Where this process and its peers listen."""
        return self._peers | {self._place}

    def abandon(self) -> None:
        """In a forked copy of the process, which has none of its threads: never use it. Its destructor would wait for
        these threads, so it never runs.
        """
        compat.keep_for_ever(self.pg)
        self.pg = None

    def sever(self) -> int:
        """Shut down every connection of the group, from any thread; blocked operations fail at once. Returns how many
        were cut.

        The listening socket is left alone: gloo aborts the process when it is touched.
        """
        self.severed = True
        cut = 0
        for fd, link, _ in self._connections():
            with suppress(OSError), _duplicate(fd, link) as sock:
                sock.getpeername()  # an error if the peer has cut it
                self._cut.add(link)
                sock.shutdown(socket.SHUT_RDWR)
                cut += 1
        return cut

    def closed(self) -> bool:
        """Whether gloo has closed all connections that were cut, and so writes nothing any more that had arrived."""
        return self._cut.isdisjoint(link for _, link in _socket_fds())

    def _connections(self) -> Iterator[tuple[int, str, tuple[Place, Place]]]:
        """Descriptor of each connection of the group, its name in ``/proc``, its two ends."""
        for fd, link, (own, theirs) in _sockets.now():
            if theirs is not None and (_place(own) == self._place or _place(theirs) in self._peers):
                yield fd, link, (own, theirs)


def _make(connected: Callable[[], Any], abandoned: Callable[[], bool], what: str) -> Any:
    """What ``connected`` returns, from a thread of its own: gloo tries to reach a member that is gone for five times
    its time-out, and nothing stops it. Then the thread drops what it has made.

    Raises:
        GenerationAbandoned: if the generation ends meanwhile.
    """
    done, made, failed = threading.Event(), [], []

    def run() -> None:
        try:
            with quiet():
                made.append(connected())
        except BaseException as error:
            failed.append(error)
        done.set()

    threads.start(run, name="swift-connect")
    while not done.wait(0.02):
        if abandoned() and not done.wait(STUCK_S):
            raise GenerationAbandoned(what)
    if failed:
        raise failed[0]
    return made[0]


def _default_device() -> object:
    """``GLOO_SOCKET_IFNAME`` (its first interface), loopback if all ranks are on this machine, else the address by
    which the agents reach each other, else the host's.

    Loopback, because the host's address is looked up by name, and a name server that is slow to answer would hold up
    every recovery.
    """
    inject.point("device")
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE"):
        return ProcessGroupGloo.create_device(hostname="127.0.0.1")
    if address := os.environ.get(ADDRESS):
        return ProcessGroupGloo.create_device(hostname=address)
    return ProcessGroupGloo.create_default_device()
