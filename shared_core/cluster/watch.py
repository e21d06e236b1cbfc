"""Notices the keys that workers set for the agent.

A thread with its own store client blocks until a worker calls ``worker.tell`` and then wakes the agent's loop; the loop
looks at the keys, which never blocks, and does so at each tick anyway, for keys that were set without ``tell``. The
thread's wait has no time-out that could run out: torch prints two warnings for each.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shared_core.cluster.worker import FOREVER_S, WORDS

_ONCE = ("fail", "restart")
_AGAIN = ("divergent",)


class KeyWatcher:
    """Watches the keys of one attempt: ``fail``, ``restart``, ``divergent`` and ``done`` (all ranks said goodbye).

    Args:
        connect: makes a store client; one is made for the thread, one for :meth:`look`.
        prefix: key prefix of the attempt.
        world_size: number of ranks that say goodbye.
        wake: called on the thread when a worker has something to say; must not block.
    """

    def __init__(self, connect: Callable[[], TCPStore], prefix: str, world_size: int, wake: Callable[[], None]) -> None:
        self._prefix = prefix
        self._done_keys = [f"{prefix}done/{rank}" for rank in range(world_size)]
        self._wake = wake
        self._stop = threading.Event()
        self._seen: set[str] = set()
        self._client = connect()
        self._thread = threading.Thread(target=self._run, args=(connect(),), name="swift-keys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; returns when the thread has ended."""
        self._stop.set()
        self._client.queue_push(self._prefix + WORDS, "")
        self._thread.join()

    def forget_done(self) -> None:
        """A rank that had said goodbye was lost before all had: look for all goodbyes again."""
        self._seen.discard("done")

    def look(self) -> list[tuple[str, Any]]:
        """``(key, value)`` of what was said since the last look; ``done`` once all ranks said goodbye."""
        store = self._client
        heard: list[tuple[str, Any]] = []
        for name in _ONCE:
            if name not in self._seen and store.check([self._prefix + name]):
                self._seen.add(name)
                heard.append((name, _decode(store.get(self._prefix + name))))
        for name in _AGAIN:
            if store.check([self._prefix + name]):
                heard.append((name, _decode(store.get(self._prefix + name))))
                store.delete_key(self._prefix + name)
        if "done" not in self._seen and store.check(self._done_keys):
            self._seen.add("done")
            heard.append(("done", None))
        return heard

    def _run(self, store: TCPStore) -> None:
        store.set_timeout(timedelta(seconds=FOREVER_S))
        while not self._stop.is_set():
            try:
                store.queue_pop(self._prefix + WORDS)
            except RuntimeError:
                self._stop.wait(1.0)  # the agent's ticks look at the keys meanwhile
                continue
            self._wake()


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
