"""For scripts of tests: waiting for replacements' copies of the state, which are made while the others train."""

from __future__ import annotations

import shared_core
from shared_core.events import read_events
from shared_core.waiting import Wait, poll


class Copies:
    """Where to wait.

    Args:
        wanted: ``10:1,12:2:1``: in step 12, wait for two losses and for the replacements, all but one, to begin their
            copies; empty for nowhere.
    """

    def __init__(self, wanted: str) -> None:
        rows = [list(map(int, each.split(":"))) for each in wanted.split(",") if each]
        self._wanted = {step: (losses, sum(away)) for step, losses, *away in rows}

    def wait(self, step: int) -> None:
        """Return when so many workers were lost and each replacement has begun to copy, or if nobody was lost.

        Raises:
            WaitTimeout: if they do not.
        """
        job = shared_core.current_job()
        if step not in self._wanted or job is None or job.env.incarnation:
            return  # a replacement passes by the steps that it copies: the others wait for it
        events = job.env.events
        assert events is not None

        def begun() -> bool:
            losses, away = 0, set[int]()
            for event in read_events(events):
                if event.kind == "start":
                    losses, away = 0, set()
                elif event.kind == "lost":
                    losses, away = losses + 1, away | {event.rank}
                elif event.kind in ("copying", "let_in"):
                    away.discard(event.rank)
            return not losses or (losses >= wanted and len(away) <= most)

        wanted, most = self._wanted[step]
        poll(begun, lambda: False, Wait(f"step {step}", f"{wanted} losses and the copies to begin", 40.0))


def hold(rank: int) -> None:
    """In replacements of ``rank``: return when one of another rank was let in.

    Raises:
        WaitTimeout: if none is.
    """
    job = shared_core.current_job()
    if job is not None and job.rank == rank and job.env.incarnation:
        events = job.env.events
        assert events is not None
        wait = Wait(f"rank {rank}", "another replacement to be let in", 60.0)
        poll(lambda: any(event.kind == "let_in" for event in read_events(events)), lambda: False, wait)
