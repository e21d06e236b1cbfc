"""What scripts share that wait for copies of the state, which are made while the others train."""

from __future__ import annotations

import shared_core
from shared_core.events import read_events
from shared_core.waiting import Wait, poll


class Copies:
    """Where to wait.

    Args:
        wanted: ``10:1,12:2``: in step 12, wait for two losses and for the newcomers to begin their copies; empty for
            nowhere.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = {int(step): int(count) for step, _, count in (e.partition(":") for e in wanted.split(",") if e)}

    def wait(self, step: int) -> None:
        """Return when so many workers were lost and each newcomer has begun to copy, or if nobody was lost.

        Raises:
            WaitTimeout: if they do not.
        """
        job = shared_core.current_job()
        if step not in self._wanted or job is None or job.env.incarnation:
            return  # a newcomer passes by the steps that it copies: the others wait for it

        def begun() -> bool:
            losses, away = 0, set[int]()
            for event in read_events(job.env.events):
                if event.kind == "start":
                    losses, away = 0, set()
                elif event.kind == "lost":
                    losses, away = losses + 1, away | {event.rank}
                elif event.kind in ("copying", "let_in"):
                    away.discard(event.rank)
            return not losses or (losses >= self._wanted[step] and not away)

        poll(begun, lambda: False, Wait(f"step {step}", f"{self._wanted[step]} losses and the copies to begin", 40.0))
