"""The job's store: what its processes leave for each other by name, in the memory of one agent.

It is no store of torch's, because torch's asks nobody who they are. On one machine the store is behind a Unix socket in
the job's private folder, on several behind connections on which both sides have proved that they know the job's secret
(:mod:`shared_core.transport.remote_store`). What is kept is data about the job, and never an option.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from shared_core.waiting import FOREVER_S

T = TypeVar("T")


class StoreError(RuntimeError):
    """The job's store is gone, or what was awaited there did not come in time."""


class Store(Protocol):
    """What is asked of the store, here or from afar. Texts are kept as UTF-8."""

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value, in the place of any other."""

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values of several keys, once all are there; StoreError where they are not in time. None: as long as this
        store's other waits.
        """

    def get(self, key: str) -> bytes:
        """The value of a key; see :meth:`multi_get`."""
        return self.multi_get([key])[0]

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Return once all keys are there; see :meth:`multi_get`."""
        self.multi_get(keys, timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 before there is one; returns the sum. StoreError if the key holds no number."""

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Keep ``desired`` if the key holds ``expected``, or is missing and that is empty; returns what it holds."""

    def delete_key(self, key: str) -> bool:
        """Forget a key; returns whether there was one."""

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append to a queue. A queue and a key may have the same name."""

    def queue_pop(self, key: str) -> bytes:
        """Take the first of a queue, once there is one; see :meth:`multi_get`."""

    def queue_len(self, key: str) -> int:
        """How many wait in a queue."""


class Bell(Protocol):
    """What a thread that waits for a key listens to."""

    def ring(self) -> None:
        """The key may be there. Any thread; must not block; called with the store's lock held."""

    def wait(self, seconds: float) -> bool:
        """True when it has rung since the last call, False after ``seconds``. OSError: whoever is awaited has gone."""


class _Event:
    """A bell within this process."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.ring = self._event.set

    def wait(self, seconds: float) -> bool:
        rang = self._event.wait(min(seconds, threading.TIMEOUT_MAX))
        self._event.clear()
        return rang


class MemoryStore(Store):
    """The store itself. Any thread of its process may call; waits have no limit unless one is given."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._bells: dict[str, list[Bell]] = {}
        self._closed = False

    def close(self) -> None:
        """Whoever waits, and whoever waits from now on, gets a :class:`StoreError`."""
        with self._lock:
            self._closed = True
            for key in self._bells:
                self._ring(key)

    def set(self, key: str, value: str | bytes) -> None:
        with self._lock:
            self._put(key, _raw(value))

    def multi_get(
        self, keys: Sequence[str], timeout_s: float | None = None, bell: Callable[[], Bell] = _Event
    ) -> list[bytes]:
        """See :class:`Store`; ``bell`` makes what the calling thread listens to if it has to wait."""

        def take() -> list[bytes] | None:
            return [self._values[key] for key in keys] if self._has(keys) else None

        return self._until(keys, take, timeout_s, bell)

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            return self._has(keys)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            before = self._values.get(key, b"0")
            if len(before) > 20 or not before.removeprefix(b"-").isdigit():
                raise StoreError(f"the entry {key} in the job's store is no number that could be added to")
            self._put(key, b"%d" % (int(before) + amount))
            return int(before) + amount

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        with self._lock:
            held = self._values.get(key)
            if held == _raw(expected) or (held is None and not expected):
                self._put(key, _raw(desired))
                return _raw(desired)
            return _raw(expected) if held is None else held

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None

    def queue_push(self, key: str, value: str | bytes) -> None:
        with self._lock:
            self._queues.setdefault(key, deque()).append(_raw(value))
            self._ring(key)

    def queue_pop(self, key: str, timeout_s: float | None = None, bell: Callable[[], Bell] = _Event) -> bytes:
        """See :class:`Store`; ``bell`` as in :meth:`multi_get`."""

        def take() -> bytes | None:
            return queue.popleft() if (queue := self._queues.get(key)) else None

        return self._until([key], take, timeout_s, bell)

    def queue_len(self, key: str) -> int:
        with self._lock:
            return len(self._queues.get(key, ()))

    # -- with the lock held -------------------------------------------------------------------------------------------

    def _has(self, keys: Iterable[str]) -> bool:
        return all(key in self._values for key in keys)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._ring(key)

    def _ring(self, key: str) -> None:
        for bell in self._bells.get(key, ()):
            bell.ring()

    # -----------------------------------------------------------------------------------------------------------------

    def _until(
        self, keys: Sequence[str], take: Callable[[], T | None], timeout_s: float | None, make: Callable[[], Bell]
    ) -> T:
        """What ``take`` returns, once that is something; it is called with the lock held."""
        with self._lock:
            self._check_open()
            if (found := take()) is not None:
                return found
            bell = make()
            for key in keys:
                self._bells.setdefault(key, []).append(bell)
        limit_s = FOREVER_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        try:
            while True:
                with self._lock:
                    self._check_open()
                    if (found := take()) is not None:
                        return found
                if not bell.wait(max(0.0, deadline - time.monotonic())):
                    raise StoreError(f"nobody has set {', '.join(keys)} in the job's store within {limit_s:g} s")
        finally:
            with self._lock:
                for key in keys:
                    self._bells[key].remove(bell)
                    if not self._bells[key]:
                        del self._bells[key]

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the job's store is closed")


def _raw(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
