"""One inner gloo group of one generation: connect with a way out, and cut it in milliseconds.

Gloo has no abort: a blocked operation ignores ``abort()`` and ``shutdown()`` and ends only when its sockets do. So
where every member listens is noted when the group connects, and cutting means shutting down the connections
that use one of them.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from shared_core.errors import GenerationAbandoned, NotConnected, RecoveryFailed, WaitTimeout
from shared_core.faults import inject
from shared_core.protocol.worker_env import ADDRESS
from shared_core.system import threads
from shared_core.waiting import Wait, poll, wait_for
from shared_core.worker.comm import peers
from shared_core.worker.comm.compat import ProcessGroupGloo, gloo_options, set_operation_timeout
from shared_core.worker.comm.peers import Place
from shared_core.worker.comm.quiet import quiet

#: Untyped, because torch's stubs leave out most of it.
_Store: Any = Store
_device_lock = threading.Lock()
#: How long gloo may take to give operations back once their sockets are shut down. It takes 2 ms, or it never does:
#: that is so in one loss of eight, and then all of this is added to the stall.
STUCK_S = 0.05


def finish(work: Any, abandoned: Callable[[], bool], what: str, wait: Wait | None = None) -> None:
    """Wait for a collective of an inner group, which is cut when the generation is abandoned.

    Raises:
        GenerationAbandoned: if it was cut and gloo does not give the operation back, as happens now and then.
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


class _AbortableStore(_Store):  # type: ignore[misc]
    """Store given to gloo's rendezvous whose waits end when the generation is abandoned."""

    def __init__(self, inner: Any, abandoned: Callable[[], bool], timeout_s: float, who: str, what: str) -> None:
        super().__init__()
        self._inner, self._abandoned, self._timeout_s, self._who, self._what = inner, abandoned, timeout_s, who, what

    def clone(self) -> _AbortableStore:
        return _AbortableStore(self._inner, self._abandoned, self._timeout_s, self._who, self._what)

    def set(self, key: str, value: bytes) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._inner.get(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        inject.point("recovery.connecting")
        poll(lambda: self.check(list(keys)), self._abandoned, Wait(self._who, self._what, self._timeout_s))


def _listening() -> dict[str, str]:
    """Listening TCP sockets of this process: inode to address and port."""
    found: dict[str, str] = {}
    for fd, link in _socket_fds():
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[link] = _place(sock.getsockname())
        except (OSError, IndexError):
            continue
    return found


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


class InnerGroup:
    """A connected gloo group of one generation.

    Attributes:
        pg: gloo's process group; the operations of the generation run on it.
        rank: global rank of this process.
        members: global ranks of all, in group order.
        wait_timeout_s: longest wait for one of them in a recovery.
        severed: its connections were cut.
    """

    def __init__(
        self, pg: Any, place: str, peers: frozenset[str], rank: int, members: tuple[int, ...], wait_timeout_s: float
    ) -> None:
        self.pg = pg
        self.rank, self.members, self.wait_timeout_s = rank, members, wait_timeout_s
        self.severed = False
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
        """Meet the other members in ``store`` (already prefixed by generation and group) and connect to them.

        Args:
            store: where they meet.
            rank: of this process, among all.
            members: ranks, in group order.
            operation_timeout: of the group's operations.
            connect_timeout_s: longest time to connect the sockets.
            wait_timeout_s: longest wait for a member.
            abandoned: whether the generation has ended.
            what: the group, and where, for the line that says who is waited for.
            silent: leave that line to whoever waits for the group's operations.

        Raises:
            GenerationAbandoned: if the generation ends meanwhile.
            NotConnected: if a member cannot be reached.
            RecoveryFailed: if another user's process is in a member's place.
            WaitTimeout: if a member does not come within ``wait_timeout_s``.
        """
        with _device_lock:
            before = _listening()
            device = threads.persist(_default_device, "open a device of gloo")  # it has a thread
            new = [place for link, place in _listening().items() if link not in before]
        place = new[0] if new else "unknown"
        own, keys = list(members).index(rank), {each: f"port/{at}" for at, each in enumerate(members)}
        store.set(f"port/{own}", place)
        wait_for(store, keys, abandoned, wait_timeout_s, rank, f"to connect {what}", silent=silent)
        raw = store.multi_get(list(keys.values()))
        places = frozenset(bytes(each).decode(errors="replace") for each in raw) - {"unknown"}
        options = gloo_options(device, timedelta(seconds=connect_timeout_s))
        try:
            met = _AbortableStore(store, abandoned, wait_timeout_s, f"rank {rank}", f"the sockets of {what}")
            with quiet():
                pg = ProcessGroupGloo(met, own, len(members), options)
        except RuntimeError as error:
            if isinstance(error, GenerationAbandoned) or abandoned():
                raise GenerationAbandoned(f"{what}: {error}") from error
            raise NotConnected(f"{what}: {error}") from error
        set_operation_timeout(pg, operation_timeout)
        group = cls(pg, place, places, rank, tuple(members), wait_timeout_s)
        try:
            who, whom = f"rank {rank}", f"its peers to accept the sockets of {what}"
            poll(group._known, abandoned, Wait(who, whom, connect_timeout_s))
        except PermissionError as error:
            group.discard()
            raise RecoveryFailed(
                f"rank {rank}: {error} in {what}: nothing was sent to it. Find out who that is, or run the job where "
                "others cannot reach 127.0.0.1 (docs/security.md)"
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
        return not peers.unknown(ends for _, ends in self._connections())

    def discard(self) -> None:
        """Cut the group and let it go. Its destructor waits for gloo's threads, so it runs on a thread nobody waits
        for.
        """
        self.sever()
        box = [self.pg]
        self.pg = None
        threads.start(box.clear, name="swift-drop")

    def sever(self) -> int:
        """Shut down every connection of the group, from any thread; blocked operations fail at once. Returns how
        many were cut.

        The listening socket is left alone: gloo aborts the process when it is touched.
        """
        self.severed = True
        cut = 0
        for sock, _ in self._connections():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
                cut += 1
        return cut

    def _connections(self) -> Iterator[tuple[socket.socket, tuple[Place, Place]]]:
        """Each connection of the group, with its own and its other end."""
        for fd, _ in _socket_fds():
            try:
                with socket.socket(fileno=os.dup(fd)) as sock:
                    if sock.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        continue
                    own, theirs = sock.getsockname(), sock.getpeername()
                    if _place(own) == self._place or _place(theirs) in self._peers:
                        yield sock, (own[:2], theirs[:2])
            except OSError:
                continue


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
