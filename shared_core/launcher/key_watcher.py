"""Notices the keys that workers set for the agent.

A thread with its own store client blocks until a worker calls ``worker.tell`` and then wakes the agent's loop; the loop
looks at the keys, which never blocks, and does so at each tick anyway, for keys that were set without ``tell``. The
thread's wait has no time-out that could run out: torch prints two warnings for each.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shared_core.protocol.keys import REPORTS, SAVED, WORDS
from shared_core.waiting import FOREVER_S

_ONCE = ("fail", "restart", SAVED)
_DIVERGENT = "divergent"
#: Said anew in each generation.
_AGAIN = ("handed", "declined")


class KeyWatcher:
    """Watches the keys of one attempt: ``fail``, ``restart``, ``saved``, ``divergent``, ``handed``, ``declined``,
    goodbyes, and the queue of ``reports``.

    Args:
        connect: makes a store client; one is made for the thread, one for :meth:`look`.
        prefix: key prefix of the attempt.
        wake: called on the thread when there is something to look at; must not block.
        slot: this machine's place: workers wake the agent of their own machine, and agents each other.
        ranks: this machine's, of which ``divergent`` is heard here.
    """

    def __init__(
        self,
        connect: Callable[[], TCPStore],
        prefix: str,
        wake: Callable[[], None],
        *,
        slot: int = 0,
        ranks: Sequence[int] = (),
    ) -> None:
        self._prefix = prefix
        self._words = f"{prefix}{WORDS}/{slot}"
        self._reports = f"{prefix}{REPORTS}/{slot}"
        self._ranks = frozenset(ranks)
        self._wake = wake
        self._stop = threading.Event()
        self._seen: set[str] = set()
        self._said: dict[str, bytes] = {}
        self._client = connect()
        self._thread = threading.Thread(target=self._run, args=(connect(),), name="swift-keys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; returns when the thread has ended."""
        self._stop.set()
        with suppress(RuntimeError):  # the store may be gone: then the thread knows
            self._client.queue_push(self._words, "")
        self._thread.join(5.0)

    def look(self) -> list[tuple[str, Any]]:
        """``(key, value)`` of what was said since the last look."""
        store = self._client
        heard: list[tuple[str, Any]] = []
        for name in _ONCE:
            if name not in self._seen and store.check([self._prefix + name]):
                self._seen.add(name)
                heard.append((name, _decode(store.get(self._prefix + name))))
        for name in _AGAIN:
            if store.check([self._prefix + name]):
                raw = store.get(self._prefix + name)
                if self._said.get(name) != raw:
                    self._said[name] = raw
                    heard.append((name, _decode(raw)))
        for _ in range(store.queue_len(self._reports)):
            heard.append((REPORTS, _decode(store.queue_pop(self._reports))))
        if mine := self._divergent():
            heard.append((_DIVERGENT, mine))
        return heard

    def _divergent(self) -> list[int]:
        """Ranks of this machine that were named; they are taken off the list, which other agents read too."""
        key = self._prefix + _DIVERGENT
        while self._client.check([key]):
            raw = self._client.get(key)
            named = _decode(raw)
            mine = [rank for rank in named if rank in self._ranks] if isinstance(named, list) else []
            if not mine:
                break
            rest = json.dumps([rank for rank in named if rank not in mine])
            if self._client.compare_set(key, raw.decode(), rest) == rest.encode():
                return mine
        return []

    def _run(self, store: TCPStore) -> None:
        store.set_timeout(timedelta(seconds=FOREVER_S))
        while not self._stop.is_set():
            try:
                store.queue_pop(self._words)
            except RuntimeError:
                self._wake()  # a store that is gone is news too
                self._stop.wait(1.0)  # the agent's ticks look at the keys meanwhile
                continue
            self._wake()


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
