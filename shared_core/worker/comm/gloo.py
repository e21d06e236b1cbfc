"""One inner gloo group of one generation: connect with a way out, and cut it in milliseconds.

Gloo has no abort: a blocked operation ignores ``abort()`` and ``shutdown()`` and ends only when its sockets do. So
where every member listens is noted when the group connects, and cutting means shutting down the connections that use
one of these addresses.

Gloo asks nobody who they are, and any user of a machine can connect to 127.0.0.1 or send a worker to a port of its own.
But the kernel knows to which user the other end of a connection within this machine belongs.

When a peer fails while a group connects, which is an ordinary event, gloo's C++ writes a line for each attempt straight
to descriptor 2, whatever its log level. So while a group connects, descriptor 2 is a pipe, and a thread passes on all
other lines.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from torch._C._distributed_c10d import Store as TorchStore

from shared_core.codec import Form, decode
from shared_core.errors import DamagedRecord, GenerationAbandoned, NotConnected, RecoveryFailed, WaitTimeout
from shared_core.faults import inject
from shared_core.protocol.worker_env import ADDRESS
from shared_core.resources import write_all
from shared_core.system import threads
from shared_core.transport.store import Store
from shared_core.waiting import Wait, poll, ranks_text
from shared_core.worker.comm import compat
from shared_core.worker.comm.compat import ProcessGroupGloo, gloo_options, set_operation_timeout

#: gloo's line for each attempt, and torch's for the exception that it raises.
_NOISE = re.compile(rb"failed to connect, willRetry=|Gloo connectFullMesh failed with")

#: Usually the thread has ended after some microseconds, and what comes next on the console is in order.
_PASS_ON_S = 0.05

_quiet_lock = threading.Lock()
_quiet_depth = 0
_real_stderr = -1
_passing_on = threading.Thread()


@contextmanager
def quiet() -> Iterator[None]:
    """In here gloo's lines about peers that it cannot connect to are dropped. For any thread, and several at once."""
    entered = False
    with suppress(OSError, RuntimeError):  # no standard error, descriptors or threads: then it is as it is
        _enter_quiet()
        entered = True
    try:
        yield
    finally:
        if entered:
            _leave_quiet()


def _enter_quiet() -> None:
    global _quiet_depth, _real_stderr, _passing_on
    with _quiet_lock:
        if _quiet_depth == 0:
            opened: list[int] = []
            try:
                opened += [os.dup(2), os.dup(2)]
                opened += os.pipe()
                console, kept, read, write = opened
                passing = threading.Thread(target=_pass_on, args=(read, kept), name="swift-quiet", daemon=True)
                passing.start()
            except (OSError, RuntimeError):  # no descriptor or no thread is left
                for fd in opened:
                    os.close(fd)
                raise
            os.dup2(write, 2)  # inheritable, as programs expect of it
            os.close(write)
            _real_stderr, _passing_on = console, passing
        _quiet_depth += 1


def _leave_quiet() -> None:
    global _quiet_depth, _real_stderr
    with _quiet_lock:
        _quiet_depth -= 1
        if _quiet_depth == 0:
            os.dup2(_real_stderr, 2)
            os.close(_real_stderr)
            _real_stderr = -1
            _passing_on.join(_PASS_ON_S)


def _pass_on(read: int, console: int) -> None:
    """Until nobody has the pipe any more: a process that was started meanwhile keeps it as its standard error."""
    rest = b""
    with suppress(OSError):
        while chunk := os.read(read, 65536):
            *lines, rest = (rest + chunk).split(b"\n")
            kept = b"".join(line + b"\n" for line in lines if not _NOISE.search(line))
            if not rest.startswith(b"["):  # such as a progress bar; gloo's lines and torch's begin so
                kept, rest = kept + rest, b""
            write_all(console, kept)
        if rest and not _NOISE.search(rest):
            write_all(console, rest)
    os.close(read)
    os.close(console)


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
    """How many connections, given by own end and other end, have no owner at the other end yet; those outside of
    127.0.0.0/8 are passed over. Raises PermissionError if another user's process is at one.
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
    """The same from ``/proc/net/tcp``, which may take milliseconds; zeros if it is not there."""
    ends = [f"{socket.inet_aton(host)[::-1].hex().upper()}:{port:04X}" for host, port in (own, other)]
    for line in _TABLE.read_text().splitlines()[1:]:
        columns = line.split()
        if columns[1:3] == ends:
            return int(columns[3], 16), int(columns[7]), int(columns[9])
    return 0, 0, 0


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
    """Raises OSError if ``fd`` is not the socket ``link`` any more: another thread may have closed it."""
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
        return not unknown(ends for _, _, ends in self._connections())

    def discard(self) -> None:
        """Cut the group and drop it. Its destructor waits for gloo's threads, so it runs on a thread of its own."""
        self.sever()
        box = [self.pg]
        self.pg = None
        threads.start(box.clear, name="swift-drop")

    @property
    def addresses(self) -> frozenset[str]:
        return self._peers | {self._place}

    def abandon(self) -> None:
        """In a forked copy: never use it, nor run its destructor, which would wait for threads."""
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
    """What ``connected`` returns, from a thread of its own, which drops it where the generation ends meanwhile: gloo
    tries to reach a member that is gone for five times its time-out, and nothing stops it. Raises GenerationAbandoned.
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
