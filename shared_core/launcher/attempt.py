"""The store of one attempt at the job, and what the agent writes there for its workers and for other agents."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from shared_core.errors import ConfigError, DamagedRecord
from shared_core.launcher.key_watcher import KeyWatcher
from shared_core.launcher.ledger import Ledger
from shared_core.launcher.ports import serve_store
from shared_core.protocol.codec import Count, decode
from shared_core.protocol.failure_policy import Death
from shared_core.protocol.generation import Cause, Entry, EntryKind
from shared_core.protocol.keys import WORDS
from shared_core.protocol.preparing import place_key
from shared_core.protocol.stragglers import Steps
from shared_core.transport.store import Store

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
        self._client.queue_push(self.key(f"{queue}/{slot}"), json.dumps(asdict(value)))
        self._client.queue_push(self.key(f"{WORDS}/{slot}"), queue)

    def with_others(self, mine: Mapping[int, Steps]) -> dict[int, Steps]:
        """The times of the last steps of this machine's ranks, and of those of the others; tells these."""
        if self._slots == 1:
            return dict(mine)
        rows = [[rank, number, list(parts)] for rank, steps in mine.items() for number, parts in steps.items()]
        self._client.set(self.key(f"steps/{self._slot}"), json.dumps(rows))
        found: dict[int, Steps] = dict(mine)
        for slot in set(range(self._slots)) - {self._slot}:
            key = self.key(f"steps/{slot}")
            with suppress(DamagedRecord):
                told = self._client.get(key) if self._client.check([key]) else b"[]"
                for rank, number, parts in decode(told, list[tuple[Count, Count, list[float]]], key):
                    found[rank] = {**found.get(rank, {}), number: parts}
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
