"""Notices the keys that workers set for the agent.

A thread with its own store client blocks until a worker calls ``worker.tell``, and then wakes the agent's loop. The
loop reads the keys without blocking; it also does so at each tick, for keys that were set without ``tell``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from shared_core.errors import DamagedRecord
from shared_core.events import console
from shared_core.protocol import worker_messages as said
from shared_core.protocol.keys import DAMAGED, LEAVES, PREPARED, REPORTS, SAVED, WORDS
from shared_core.transport.store import Store

_ONCE = ("fail", "restart", SAVED)
_DIVERGENT = "divergent"
#: Written again in each generation.
_AGAIN = ("handed", "declined")
_QUEUES = (REPORTS, PREPARED, DAMAGED, LEAVES)


class KeyWatcher:
    """Watches the keys of one attempt: ``fail``, ``restart``, ``saved``, ``divergent``, ``handed``, ``declined``,
    and the queues ``reports``, ``prepared``, ``damaged`` and ``leaves``.

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
