"""The store of one attempt at the job, and what the agent writes there for its workers and for other agents."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypedDict

from shared_core.codec import Count, decode, dumps
from shared_core.errors import ConfigError, DamagedRecord
from shared_core.events import console
from shared_core.launcher.ledger import Ledger
from shared_core.launcher.ports import serve_store
from shared_core.protocol import worker_messages as said
from shared_core.protocol.failure_policy import Death
from shared_core.protocol.generation import Cause, Entry, EntryKind
from shared_core.protocol.preparing import place_key
from shared_core.protocol.stragglers import Steps
from shared_core.protocol.worker_messages import DAMAGED, LEAVES, PREPARED, REPORTS, SAVED, WORDS
from shared_core.transport.store import Store

_ONCE = ("fail", "restart", SAVED)
_DIVERGENT = "divergent"
#: Written again in each generation.
_AGAIN = ("handed", "declined")
_QUEUES = (REPORTS, PREPARED, DAMAGED, LEAVES)


class KeyWatcher:
    """Watches the keys of one attempt: ``fail``, ``restart``, ``saved``, ``divergent``, ``handed``, ``declined``,
    and the queues ``reports``, ``prepared``, ``damaged`` and ``leaves``.

    A thread with its own client of the store blocks until a worker calls ``tell``, and then wakes the agent's loop.
    That reads the keys without blocking; it also does so at each tick, for keys that were set without ``tell``.

    Args:
        connect: gives a store whose waits have no time-out; called once for the thread, once for :meth:`look`.
        wake: called on the thread when there is something to look at; must not block.
        slot: this machine's place: workers wake the agent of their own machine, and agents each other.
        ranks: this machine's, of which ``divergent`` is read here.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        prefix: str,
        wake: Callable[[], None],
        *,
        slot: int = 0,
        ranks: Sequence[int] = (),
    ) -> None:
        self._prefix = prefix
        self._words = f"{prefix}{WORDS}/{slot}"
        self._queues = {name: f"{prefix}{name}/{slot}" for name in _QUEUES}
        self._ranks = frozenset(ranks)
        self._wake = wake
        self._stop = threading.Event()
        self._seen: set[str] = set()
        self._said: dict[str, bytes] = {}
        self._client = connect()
        self._thread = threading.Thread(target=self._run, args=(connect(),), name="swift-keys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; waits up to 5 s for the thread to end."""
        self._stop.set()
        with suppress(RuntimeError):  # the store may be gone: then the thread ends, too
            self._client.queue_push(self._words, "")
        self._thread.join(5.0)

    def look(self) -> list[tuple[str, Any]]:
        """``(key, value)`` of all that is new, values as in :mod:`~shared_core.protocol.worker_messages`. Never blocks.
        Damaged values are passed over, and the user is told.
        """
        store = self._client
        heard: list[tuple[str, Any]] = []
        for name in (*_ONCE, *_AGAIN):
            if name in self._seen or not store.check([self._prefix + name]):
                continue
            raw = store.get(self._prefix + name)
            if self._said.get(name) == raw:
                continue
            self._said[name] = raw
            if (value := _read(name, raw)) is not None:
                heard.append((name, value))
                if name in _ONCE:
                    self._seen.add(name)
        for name, queue in self._queues.items():
            for _ in range(store.queue_len(queue)):
                if (value := _read(name, store.queue_pop(queue))) is not None:
                    heard.append((name, value))
        if mine := self._divergent():
            heard.append((_DIVERGENT, mine))
        return heard

    def _divergent(self) -> list[int]:
        """Ranks of this machine on the list; they are removed from it, as other agents read it too."""
        key = self._prefix + _DIVERGENT
        while self._client.check([key]):
            raw = self._client.get(key)
            if self._said.get(_DIVERGENT) == raw:
                break
            named = _read(_DIVERGENT, raw)
            mine = [rank for rank in named or () if rank in self._ranks]
            if not mine:
                self._said[_DIVERGENT] = raw
                break
            rest = json.dumps([rank for rank in named if rank not in mine])
            if self._client.compare_set(key, raw.decode(), rest) == rest.encode():
                return mine
        return []

    def _run(self, store: Store) -> None:
        while not self._stop.is_set():
            try:
                store.queue_pop(self._words)
            except RuntimeError:
                self._wake()  # a store that is gone is also news
                self._stop.wait(1.0)  # the agent's ticks look at the keys meanwhile
                continue
            self._wake()


def _read(name: str, raw: bytes) -> Any:
    try:
        return said.read(name, raw)
    except DamagedRecord as error:
        console(f"a worker's message to the launcher cannot be read and is ignored: {error}")
        return None


@dataclass(frozen=True)
class WorkerPlaces:
    """The workers of this machine in one attempt. All machines have the same number.

    Attributes:
        machine: place of this machine, from 0.
        local: workers of each machine; 0 before there is a place.
    """

    machine: int = 0
    machines: int = 1
    local: int = 0

    @property
    def ranks(self) -> list[int]:
        """Of this machine, by local rank."""
        return list(range(self.machine * self.local, (self.machine + 1) * self.local))

    @property
    def world_size(self) -> int:
        """Workers of all machines."""
        return self.machines * self.local

    @property
    def speaks(self) -> bool:
        """Whether this machine's agent is the one that prints what concerns all machines."""
        return self.machine == 0

    def local_rank(self, rank: int) -> int:
        """Place of a rank on this machine; 0 for one of another machine."""
        return self.ranks.index(rank) if rank in self.ranks else 0


#: Default address of the store for the process groups of a script on one machine.
LOOPBACK = "127.0.0.1"
_FIRST = "first"


class _First(TypedDict):
    """JSON of what an attempt begins with."""

    machines: list[str | None]
    line: str


def host_store(host: str, port: int) -> Any:
    """The server of the script's own store, for plain gloo groups, at this address only: torch's would listen on all.

    Nothing of this product is kept there. ``host`` is an address or name of this machine; ``port`` 0 takes a free one.
    Raises ConfigError if it cannot listen there.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place[:2], family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"the store of the script's process groups cannot listen at {host}:{port} ({error.strerror}): "
            "choose another --port or --master-port, or an address of this machine for --local-addr"
        ) from error
    return serve_store(host, listener)


def prefix_of(number: int) -> str:
    return f"swift/{number}/"


def first_of(store: Store, number: int) -> dict[str, Any] | None:
    """What an attempt begins with: ``machines`` in their places, and ``line`` (see :class:`Resizing`); None if no agent
    has begun it. Raises DamagedRecord.
    """
    key = prefix_of(number) + _FIRST
    return decode(store.get(key), _First, key) if store.check([key]) else None


@dataclass(frozen=True)
class Team:
    """The place of this agent among those of several machines.

    Attributes:
        slot: number of this machine's place, from 0.
        machines: names of the machines in generation 0 of the attempt, by place.
        host: of the store for the script's process groups (``MASTER_ADDR``).
    """

    slot: int
    machines: tuple[str | None, ...]
    number: int
    host: str
    port: int
    keeper: str


class Attempt:
    """One attempt at the job, from its first generation to its end or to the restart of all workers.

    Alone on its machine the agent has a fresh store for each, so that nothing of the attempt before can be read by
    mistake; several agents share one store, and the attempts' keys differ.

    Args:
        number: whole-job restarts before this attempt; part of every key.
        place: host and port of the store for the script's process groups, 0 for a free port.
        connect: gives the job's store; its waits have no time-out.
        wake: called on a thread when there is something to look at.
        team: the other agents, if there are any.
    """

    def __init__(
        self,
        number: int,
        place: tuple[str, int],
        connect: Callable[[], Store],
        ranks: Sequence[int],
        world_size: int,
        wake: Callable[[], None],
        team: Team | None = None,
    ) -> None:
        self.number = number
        self.host, self.port = place
        self._server: Any = None
        if team is None:
            self._server = host_store(*place)
            self.port = int(self._server.port)
        self._slot = team.slot if team else 0
        self._slots = len(team.machines) if team else 1
        self._client = connect()
        self.ledger = Ledger(self._client, self.key(""), world_size, team.machines if team else ())
        self.ledger.catch_up()
        self._done_keys = [self.key(f"done/{rank}") for rank in range(world_size)]
        self._watcher = KeyWatcher(connect, self.key(""), wake, slot=self._slot, ranks=ranks)

    def begin(self, machines: Sequence[str | None], line: str) -> None:
        """Write what this attempt begins with; the first agent that writes it wins."""
        self._client.compare_set(self.key(_FIRST), "", json.dumps({"machines": list(machines), "line": line}))

    @property
    def generation(self) -> int:
        return self.ledger.generation

    @property
    def incarnations(self) -> Sequence[int]:
        """For each rank, how many workers held it before the present one."""
        return self.ledger.incarnations

    def key(self, name: str) -> str:
        return prefix_of(self.number) + name

    def next_generation(
        self, deaths: Sequence[Death], detected: float, stay: Sequence[int] = (), *, ends: bool = False
    ) -> Entry | None:
        """Write the generation that follows these failures, and return what was written; None if the attempt is over.

        Args:
            detected: when they were noticed, in seconds since the epoch.
            stay: ranks that continue because the number of workers changes. A change that is under way continues with
                those that are left.
            ends: the change under way is given up.
        """
        entry = Entry(causes=tuple(Cause(death.kind, death.cause, death.rank) for death in deaths), detected=detected)

        def make() -> Entry:
            return entry.while_changing(stay, None if ends else self.ledger.change)

        return self.append(make)

    def set(self, name: str) -> None:
        self._client.set(self.key(name), "1")

    def tell(self, slot: int, queue: str, value: Any) -> None:
        """Tell the agent at another machine's place something: a dataclass, in one of its queues."""
        self._client.queue_push(self.key(f"{queue}/{slot}"), dumps(value))
        self._client.queue_push(self.key(f"{WORDS}/{slot}"), queue)

    def with_others(self, mine: Mapping[int, Steps]) -> dict[int, Steps]:
        """The times of the last steps of this machine's ranks, and of those of the others; tells these."""
        if self._slots == 1:
            return dict(mine)
        self._client.set(self.key(f"steps/{self._slot}"), dumps(mine))
        found: dict[int, Steps] = dict(mine)
        for slot in set(range(self._slots)) - {self._slot}:
            key = self.key(f"steps/{slot}")
            with suppress(DamagedRecord):
                told = self._client.get(key) if self._client.check([key]) else b"{}"
                found |= decode(told, dict[Count, dict[Count, list[float]]], key)
        return found

    def give_place(self, rank: int, incarnation: int) -> None:
        """A hot standby takes its rank's place, in the newest generation."""
        self._client.set(self.key(place_key(rank, incarnation)), str(self.generation))

    def goodbyes(self) -> bool:
        """Whether any worker of the job has said goodbye."""
        return any(self._client.check([key]) for key in self._done_keys)

    def finished(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if self._client.check([self._done_keys[rank]])]

    def append(self, make: Callable[[], Entry | None]) -> Entry | None:
        """As :meth:`Ledger.append`; wakes other agents.

        Deletes goodbyes of failed ranks: their replacements say them.
        """

        def checked() -> Entry | None:
            entry = make()
            # Before the entry, so that who finds all goodbyes after it has found new ones.
            for rank in entry.failed if entry is not None else ():
                self._client.delete_key(self.key(f"done/{rank}"))
            return entry

        entry = self.ledger.append(checked)
        if entry is not None:
            for slot in range(self._slots):
                if slot != self._slot:
                    self._client.queue_push(self.key(f"{WORDS}/{slot}"), "gen")
        return entry

    def look(self) -> list[tuple[str, Any]]:
        """What workers wrote since the last look; see :meth:`KeyWatcher.look`."""
        return self._watcher.look()

    def release(self) -> bool:
        """Let the workers exit if all present ranks have said goodbye; returns whether they may."""

        # The goodbyes are read with the view that is then appended to. A failure in between comes first, and has
        # deleted its rank's goodbye.
        def everyone() -> Entry | None:
            keys = [self._done_keys[rank] for rank in self.ledger.present()]
            return Entry(kind=EntryKind.RELEASE) if keys and self._client.check(keys) else None

        if self.append(everyone) is None:
            return False
        self._client.set(self.key("release"), "1")
        return True

    def stop(self) -> None:
        """The job failed: workers exit at once."""
        with suppress(RuntimeError):
            self._client.set(self.key("stop"), "1")
            self._client.set(self.key("release"), "1")  # wakes those that said goodbye; they look for stop

    def close(self) -> None:
        """Stop watching. The server ends with this object."""
        self._watcher.close()
