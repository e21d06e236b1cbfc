"""Leases: each agent renews its own in the store, looks at those of the others, and stops its workers when it cannot.

A lease is a counter. Who sees one stand still for the length of a lease, by its own clock, regards that machine as
failed; clocks of machines are never compared. The holder counts from the moment *before* it sent the last renewal that
was answered, and only three quarters of the lease (:data:`FENCE`), so it has stopped its workers before anybody regards
it as failed.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from shared_core.codec import Between, decode
from shared_core.errors import DamagedRecord
from shared_core.events import console

#: A machine that could not renew its lease for this part of it stops its workers.
FENCE = 0.75
#: Renewals in the length of a lease.
RENEWALS = 10
#: A machine may take so many seconds from its place in the rendezvous to its first renewal.
FIRST_S = 15.0
_PREFIX = "machines/"
_COUNT = f"{_PREFIX}count"
#: More machines than any job sees: each look asks for each of them.
_Come = Annotated[int, Between(0, 10_000)]
#: Stands for the counter of a lease that holds no number: it stands still.
_UNREADABLE = -1


@dataclass
class Observations:
    """When the counters of other machines last changed, by this machine's clock. Plain data."""

    lease_s: float
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    _looked: float | None = None

    def look(self, now: float, counters: Mapping[str, int]) -> set[str]:
        """Note the counters (0: never renewed) and return the machines whose leases have run out.

        ``now`` is monotonic, in seconds. A look long after the one before proves nothing: it was this machine that
        stood still, so all start over.
        """
        if self._looked is not None and now - self._looked > self.lease_s / 2:
            self._seen = {name: (count, now) for name, (count, _) in self._seen.items()}
        self._looked = now
        late = set()
        for name, count in counters.items():
            before = self._seen.get(name)
            if before is None or before[0] != count:
                self._seen[name] = (count, now)
            elif now - before[1] > (self.lease_s if count else max(self.lease_s, FIRST_S)):
                late.add(name)
        return late


@dataclass
class _Duty:
    """A lease that must be renewed for the workers to continue."""

    name: str
    renew: Callable[[], bool]
    length_s: float
    renewed: float = field(default_factory=time.monotonic)

    @property
    def end(self) -> float:
        """When to stop the workers if it is not renewed before, by :func:`time.monotonic`."""
        return self.renewed + FENCE * self.length_s


class Lease:
    """This machine's lease and its view of the others', kept by threads. The agent's loop reads the attributes.

    Attributes:
        failed: machines that were seen to fail or to have left; a new set with each change.
        alive: machines that have a lease, in the order in which they came.
        fenced: why this machine has stopped its workers; empty while it holds its lease.

    Args:
        lease_s: length of a lease in seconds.
        changed: called on a thread when a machine failed or has come.
        fence: called on a thread when this machine must stop its workers at once; gets the reason.
        also: renews a second lease (that of the store's host, in etcd); False if it could not.
        also_s: length of that lease in seconds.
        guard: fence when it cannot be renewed in time; not needed where the only store is in this process.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        machine: str,
        lease_s: float,
        changed: Callable[[], None],
        fence: Callable[[str], None],
        also: Callable[[], bool] | None = None,
        also_s: float = 0.0,
        *,
        guard: bool = True,
    ) -> None:
        self.failed: set[str] = set()
        self.alive: tuple[str, ...] = ()
        self.fenced = ""
        self._store, self._machine = connect(), machine
        self._changed, self._fence = changed, fence
        self._expected: set[str] = set()
        self._observations = Observations(lease_s)
        self._stop = threading.Event()
        self._count = 0
        self._unreadable: set[str] = set()
        self._own = _Duty("its lease", self._renew, lease_s)
        # On a thread of its own: while etcd does not answer, the others must see that this machine is alive.
        duties = [self._own, *([_Duty("its lease in etcd", also, also_s)] if also is not None else [])]
        self._duties = tuple(duties) if guard else ()
        self._renew()
        self._come()
        place = self._store.add(_COUNT, 1)
        self._store.set(f"{_PREFIX}member/{place}", machine)
        self._threads = [
            threading.Thread(target=self._keep, args=(duty,), name="swift-lease", daemon=True) for duty in duties
        ]
        if guard:
            self._threads.append(threading.Thread(target=self._guard, name="swift-fence", daemon=True))
        for thread in self._threads:
            thread.start()

    def expect(self, machines: Iterable[str | None]) -> None:
        """These hold places: watch them even if they have never renewed a lease."""
        self._expected = {name for name in machines if name}

    def leave(self) -> None:
        """Tell the others that this machine leaves; returns when the store has it."""
        self._store.set(f"{_PREFIX}left/{self._machine}", "1")
        self._store.check([_COUNT])  # a set is not acknowledged; this later request is

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)

    # -- threads --------------------------------------------------------------------------------------------------

    def _keep(self, duty: _Duty) -> None:
        while not self._stop.wait(duty.length_s / RENEWALS):
            try:
                sent = time.monotonic()
                if duty.renew():
                    duty.renewed = sent
                if duty is self._own:
                    self._look()
            except DamagedRecord as error:
                self._cut(str(error))
                return
            except RuntimeError:  # a broken connection stays broken: the store is gone
                if not self._stop.is_set():
                    self._cut("the store of the job is gone")
                return

    def _renew(self) -> bool:
        self._count += 1
        self._store.set(f"{_PREFIX}beat/{self._machine}", str(self._count))
        self._store.check([_COUNT])  # answered after the renewal took effect
        return True

    def _look(self) -> None:
        keys = [f"{_PREFIX}member/{place}" for place in range(1, self._come() + 1)]
        keys = [key for key in keys if self._store.check([key])]
        names = [raw.decode(errors="backslashreplace") for raw in self._store.multi_get(keys)]
        watched = [name for name in dict.fromkeys([*names, *sorted(self._expected)]) if name not in self.failed]
        known = [name for name in watched if self._store.check([f"{_PREFIX}beat/{name}"])]
        beats = self._store.multi_get([f"{_PREFIX}beat/{name}" for name in known]) if known else []
        counters = dict.fromkeys(watched, 0) | {
            name: self._read_beat(name, raw) for name, raw in zip(known, beats, strict=True)
        }
        gone = {name for name in watched if self._store.check([f"{_PREFIX}left/{name}"])}
        late = self._observations.look(time.monotonic(), counters) - {self._machine}
        alive = tuple(name for name in names if name not in late | gone | self.failed)
        if late or gone or alive != self.alive:
            self.failed = self.failed | late | gone
            self.alive = alive
            self._changed()

    def _come(self) -> int:
        """How many machines have come; checked, as ``add`` to anything but a number cuts the connection."""
        return int(decode(self._store.get(_COUNT), _Come, _COUNT)) if self._store.check([_COUNT]) else 0

    def _read_beat(self, name: str, raw: bytes) -> int:
        """How often a machine has renewed its lease; no number counts as no renewal, and the user is told once."""
        if raw.isdigit() and len(raw) < 20:
            return int(raw)
        if name not in self._unreadable:
            self._unreadable.add(name)
            console(
                f"the lease of machine {name} holds {raw[:80]!r}, which is not a number: something else has written to "
                "the job's store; the machine counts as failed unless it renews its lease"
            )
        return _UNREADABLE

    def _guard(self) -> None:
        # On a thread of its own: the one that renews may be stuck in a connection that does not answer.
        first = self._own
        while not self._stop.wait(max(0.0, first.end - time.monotonic())):
            first = min(self._duties, key=lambda duty: duty.end)
            if time.monotonic() >= first.end:
                self._cut(f"{first.name} could not be renewed for {time.monotonic() - first.renewed:.1f} s")
                return

    def _cut(self, reason: str) -> None:
        if not self.fenced:
            self.fenced = reason
            self._fence(reason)


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
