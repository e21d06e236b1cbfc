"""Workers that have finished wait for those that have not, and the launcher says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from shared_core.waiting import Wait, ranks_text


class ShutdownBarrier:
    """Looks at the goodbyes of one machine's workers.

    Args:
        say: prints a line for the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._wait: Wait | None = None
        self._left: Collection[int] = ()

    def look(self, finished: Collection[int], ranks: Collection[int]) -> None:
        """Call now and then while the job runs.

        Args:
            finished: ranks that have said goodbye.
            ranks: all.
        """
        self._left = set(ranks) - set(finished)
        if not finished or not self._left:
            self._wait = None
            return
        if self._wait is None:
            # They are there for whoever fails among the others: what they hold is the newest state.
            who, whom = ranks_text(finished), lambda: f"{ranks_text(self._left)}, which {_still(self._left)}"
            ends = "they leave when all have finished"
            self._wait = Wait(f"{who} (finished)", whom, math.inf, ends=ends, say=self._say)
        self._wait.look()


def _still(ranks: Collection[int]) -> str:
    return "still runs" if len(ranks) == 1 else "still run"
