"""No wait is silent: after some seconds one line says who waits for whom and why, and at its bound the wait ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

from shared_core.errors import GenerationAbandoned, WaitTimeout
from shared_core.events import console

#: Seconds after which a wait says so; one whose bound is short says so at half of it.
QUIET_S = 5.0
#: Seconds of a wait that is meant to last: torch warns of each store wait that times out, and counts in 32 bits of ms.
FOREVER_S = 20 * 86400.0
HANGS = "It may hang in its start-up; raise detection.wait_timeout_s if it is only slow."
_STUCK = "It may hang: see what it printed last, or where each rank is with swiftctl status."


class Keys(Protocol):
    def check(self, keys: list[str], /) -> bool:
        """Whether all these are there."""


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 1``, or ``ranks 0, 2``."""
    each = sorted(ranks)
    return f"rank{'s' * (len(each) != 1)} {', '.join(map(str, each))}"


def quiet_s(limit_s: float) -> float:
    """Seconds for which a wait that is bounded by ``limit_s`` says nothing."""
    return min(QUIET_S, limit_s / 2)


def ends_text(left_s: float, bound: str, ends: str = "this ends with an error") -> str:
    return ends if math.isinf(left_s) else f"{ends} in {max(0.0, left_s):.0f} s ({bound})"


class Wait:
    """One wait. Whoever waits calls :meth:`look` now and then, or uses :meth:`until`.

    Args:
        who: waits, as the first words of the line.
        what: is waited for, and why; a function is asked when it is to be said.
        limit_s: seconds until the wait ends with an error; ``math.inf`` for none.
        bound: name of the option or time-out that sets the limit.
        ends: what happens at the limit; where there is none, until when the wait continues.
        advice: what the user can do, the end of the error; by the bound if none is given.
        speaks: asked once when there is something to say; False leaves it to others that wait for the same.
    """

    def __init__(
        self,
        who: str,
        what: str | Callable[[], str],
        limit_s: float,
        *,
        bound: str = "detection.wait_timeout_s",
        ends: str = "this ends with an error",
        advice: str | None = None,
        speaks: Callable[[], bool] = lambda: True,
        say: Callable[[str], None] = console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._who, self._what, self._limit_s = who, what, limit_s
        self._bound, self._ends, self._speaks = bound, ends, speaks
        self._advice = advice or (HANGS if "wait_timeout_s" in bound else _STUCK)
        self._say, self._clock = say, clock
        self._begin = clock()
        self._quiet_s: float = quiet_s(limit_s)

    def look(self) -> None:
        """Say the line when it is time. Raises WaitTimeout at the limit."""
        waited = self._clock() - self._begin
        if waited >= self._limit_s:
            raise WaitTimeout(f"{self._who} waited {self._limit_s:g} s ({self._bound}) for {self.text}. {self._advice}")
        if waited >= self._quiet_s:
            self._announce(waited)

    def _announce(self, waited: float) -> None:
        self._quiet_s = math.inf
        if self._speaks():
            ends = ends_text(self._limit_s - waited, self._bound, self._ends)
            verb = "wait" if self._who.startswith("ranks ") else "waits"
            self._say(f"{self._who} {verb} for {self.text}; {ends}")

    def until(self, changed: threading.Condition, done: Callable[[], bool]) -> None:
        """Wait until ``done()``, looked at when ``changed`` is notified; callers hold its lock. WaitTimeout at last."""
        while not changed.wait_for(done, self.next_s()):
            self.look()

    @contextmanager
    def announced(self) -> Iterator[None]:
        """For a call that blocks in here, and has the time-out itself: the line comes from a thread."""
        over = threading.Event()

        def announce() -> None:
            if not over.wait(self._quiet_s):
                self._announce(self._clock() - self._begin)

        thread = threading.Thread(target=announce, name="swift-waits", daemon=True)
        with suppress(RuntimeError):  # the system has no thread left: then nobody says it
            thread.start()
        try:
            yield
        finally:
            over.set()
            if thread.ident is not None:
                thread.join()

    def next_s(self) -> float:
        """Seconds until the next :meth:`look` has something to do; at most 1."""
        waited = self._clock() - self._begin
        return min(1.0, max(0.001, min(self._quiet_s, self._limit_s) - waited))

    @property
    def text(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()


def wait_for(
    store: Keys,
    keys: Mapping[int, str],
    abandoned: Callable[[], bool],
    limit_s: float,
    rank: int,
    what: str,
    *,
    bound: str = "detection.wait_timeout_s",
    ends: str = "this ends with an error",
    silent: bool = False,
) -> None:
    """Wait until all ``keys`` are in ``store``. Of several ranks that wait for the same, the lowest says so.

    Args:
        what: the ranks are to do, and why: ``to be ready``.
        silent: whoever depends on this says so itself.

    Raises:
        GenerationAbandoned: as soon as ``abandoned()`` holds.
        WaitTimeout: after ``limit_s`` seconds.
    """

    def missing() -> Collection[int]:
        return [each for each, key in keys.items() if not store.check([key])]

    def speaks() -> bool:
        if silent or rank not in keys or not store.check([keys[rank]]):
            return not silent
        return not any(store.check([key]) for each, key in keys.items() if each < rank)

    wanted = list(keys.values())
    wait = Wait(
        f"rank {rank}",
        lambda: f"{ranks_text(missing())} {what}",
        limit_s,
        bound=bound,
        ends=ends,
        speaks=speaks,
    )
    poll(lambda: store.check(wanted), abandoned, wait)


def poll(done: Callable[[], bool], abandoned: Callable[[], bool], wait: Wait) -> None:
    """Wait until ``done()``. GenerationAbandoned once ``abandoned()`` holds, WaitTimeout at the limit of ``wait``."""
    # Polled, because a store's own wait can neither be given up nor time out without a warning on the console; a look
    # takes some 50 microseconds.
    pause = 0.0002
    while not done():
        if abandoned():
            raise GenerationAbandoned(wait.text)
        wait.look()
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01)
