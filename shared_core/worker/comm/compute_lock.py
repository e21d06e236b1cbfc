"""Whose turn it is to compute in this process: the program's, or a helper's while the program waits for a peer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class ComputeLock:
    """Held by the thread of the training program except while it waits in this backend.

    A helper thread that takes it may use the global generators and compute: the program continues afterwards as if it
    had waited longer.

    Attributes:
        waited_s: how long the program has waited in all.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._lock = threading.Lock()
        self._program: int | None = None

    def begin(self) -> None:
        """The calling thread is the program. Later calls do nothing."""
        if self._program is None:
            self._lock.acquire()
            self._program = threading.get_ident()

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """The program waits in here. On other threads, and before :meth:`begin`, this does nothing."""
        if self._program != threading.get_ident():
            yield
            return
        self._lock.release()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._lock.acquire()
            self.waited_s += time.perf_counter() - began

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A helper computes in here; blocks until the program waits."""
        with self._lock:
            yield
