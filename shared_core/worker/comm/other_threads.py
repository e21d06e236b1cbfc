"""Collectives and receives that another thread than the program's calls, as ``async_save`` of
``torch.distributed.checkpoint`` does.

A replacement begins at a step boundary, and nobody repeats what a thread of the failed worker was doing there. So when
a worker fails while such a call reaches across a step boundary, the others would wait for ever.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import thread as pool
from dataclasses import dataclass

from shared_core.worker.comm.state import SharedState

_POOL_WORKER = pool._worker.__code__


@dataclass
class _Call:
    thread: threading.Thread
    what: str
    done: Callable[[], bool]
    across: bool


class OtherThreads:
    """Finds calls that no replacement can take part in. Callers hold the lock."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._program: threading.Thread = threading.main_thread()
        self._open: list[_Call] = []
        self._callers: set[threading.Thread] = set()
        self._busy_at_boundary: frozenset[threading.Thread] = frozenset()
        self._at_failure: frozenset[threading.Thread] = frozenset()

    def called(self, what: Callable[[], str], done: Callable[[], bool]) -> None:
        """The current thread calls a collective, or a receive; ``what`` gives it in words."""
        if threading.get_ident() == self._program.ident:
            return
        thread = threading.current_thread()
        # Threads of torch call in the middle of what the program calls, threads of this product on purpose.
        if isinstance(thread, threading._DummyThread) or thread.name.startswith("swift-"):
            return
        self._callers.add(thread)
        self._open = [call for call in self._open if not call.done()]
        self._open.append(_Call(thread, what(), done, thread in self._busy_at_boundary))
        self._check()

    @property
    def call(self) -> bool:
        """Whether threads that are alive have called some."""
        return any(thread.is_alive() for thread in self._callers)

    def at_boundary(self) -> None:
        """The program, on this thread, has published a step boundary."""
        self._program = threading.current_thread()
        alive = frozenset(threading.enumerate())
        self._at_failure &= alive
        self._callers &= alive
        self._busy_at_boundary = alive - {each for each in self._callers if _is_idle(each)}
        for call in self._open:
            call.across = True
        self._check()

    def at_failure(self) -> None:
        """A worker fails: calls from before are not made again by its replacement."""
        self._at_failure = frozenset(threading.enumerate())

    def recovered(self) -> None:
        """What others had finished is served; the replacement takes part in the rest."""
        self._check()

    def _check(self) -> None:
        state = self._state
        for call in self._open:
            if call.across and call.thread in self._at_failure and not call.done():
                state.fatal_actions.fall_back(
                    f"rank {state.rank}: thread {call.thread.name!r} of the script is in {call.what}, and what it does "
                    "began before the last step boundary. A worker failed meanwhile, and its replacement, which begins "
                    "at a step boundary, does not do this again. Wait for such work in the batch in which it begins "
                    "(async_save(...).result()), or have checkpoints made by checkpoint.dir"
                )


def _is_idle(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is _POOL_WORKER
