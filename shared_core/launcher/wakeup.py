"""Wakes the agent's selector from signal handlers and other threads."""

from __future__ import annotations

import selectors
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


class Wakeup:
    """A selector that ends its wait when a signal arrives or :meth:`tell` is called.

    Attributes:
        selector: register further descriptors here.
        received: numbers of the handled signals, in order.
        told: there is something to read in the job's store.
        apart: the signal that was set apart has come; later ones are received as others are.
    """

    def __init__(self) -> None:
        self.told = self.apart = False
        self._apart = 0
        self.selector = selectors.DefaultSelector()
        self.received: list[int] = []
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self.selector.register(self._read, selectors.EVENT_READ, None)
        self._old_handlers: dict[int, Any] = {}
        self._old_fd = -1

    def handle(self, names: Sequence[str]) -> None:
        """Take over the named signals (kept in :attr:`received`) and SIGCHLD (which only wakes). Main thread only."""
        # The C handler writes to the descriptor at once, wherever the interpreter is.
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        numbers = [signal.Signals[name] for name in names]
        for number in dict.fromkeys([*numbers, self._apart] if self._apart else numbers):
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        self._old_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _nothing)

    def set_apart(self, number: int) -> None:
        """Take this signal over too, which does not end the job when it comes first. Call before :meth:`handle`."""
        self._apart = number

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == self._apart and not self.apart:
            self.apart = self.told = True
        else:
            self.received.append(number)

    def tell(self) -> None:
        """End the wait: there is something to read in the job's store. Any thread may call."""
        self.told = True
        with suppress(OSError):
            self._write.send(b"p")

    def take(self) -> None:
        """Reset :attr:`told`. Call before the store is read."""
        self.told = False

    def wait(self, timeout_s: float) -> None:
        self.selector.select(max(0.0, timeout_s))
        with suppress(BlockingIOError):
            while self._read.recv(4096):
                pass

    def close(self) -> None:
        if self._old_handlers:
            signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()
        self.selector.close()
        self._read.close()
        self._write.close()


def _nothing(_number: int, _frame: object) -> None:
    pass
