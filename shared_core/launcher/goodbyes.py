"""Workers that have finished wait for those that have not, and the launcher tells the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from shared_core.waiting import Wait, ranks_text


class ShutdownBarrier:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._wait: Wait | None = None
        self._left: Collection[int] = ()

    def look(self, finished: Collection[int], ranks: Collection[int]) -> None:
        """Call at each tick: ranks that have said goodbye, and all."""
        self._left = set(ranks) - set(finished)
        if not finished or not self._left:
            self._wait = None
            return
        if self._wait is None:
            # They stay until all have finished: if another rank fails, they hold the newest state.
            who, whom = ranks_text(finished), lambda: f"{ranks_text(self._left)}, which {_still(self._left)}"
            ends = "they leave when all have finished"
            self._wait = Wait(f"{who} (finished)", whom, math.inf, ends=ends, say=self._say)
        self._wait.look()


def _still(ranks: Collection[int]) -> str:
    return "still runs" if len(ranks) == 1 else "still run"
