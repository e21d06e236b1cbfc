"""Keeps updates apart from what must not see half of one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class UpdateGate:
    """No update runs while somebody holds the state, and nobody takes hold of it while an update runs. Several may hold
    it at once.

    Attributes:
        condition: the lock of the updates: guards whatever changes with them; notified when something may have
            become possible.
        installing: a replacement is about to join, and has no state to give.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.updating = False
        self.installing = False
        self._holders = 0

    @property
    def held_now(self) -> bool:
        return self._holders > 0

    def begin(self) -> None:
        """An update begins; blocks until nobody holds the state."""
        with self.condition:
            self.condition.wait_for(lambda: self._holders == 0)
            self.updating = True

    def end(self) -> None:
        """The update is complete. Callers hold the lock."""
        self.updating = False
        self.condition.notify_all()

    def install(self, installing: bool) -> None:
        with self.condition:
            self.installing = installing
            self.condition.notify_all()

    def hold(self) -> None:
        """No update begins until :meth:`release`. Callers hold the lock, and have seen that none runs."""
        self._holders += 1

    def release(self) -> None:
        with self.condition:
            self._holders -= 1
            self.condition.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No update runs in here; blocks until the one that runs is complete."""
        with self.condition:
            self.condition.wait_for(lambda: not self.updating)
            self.hold()
        try:
            yield
        finally:
            self.release()
