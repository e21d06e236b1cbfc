"""For scripts of tests: waiting for replacements' copies of the state, which are made while the others train."""

from __future__ import annotations

import shared_core
from shared_core.events import read_events
from shared_core.waiting import Wait, poll


class Copies:
    """Where to wait.

    Args:
        wanted: ``10:1,12:2:1``: in step 12, wait for two failures and for the replacements, all but one, to begin their
            copies; empty for nowhere.
    """

    def __init__(self, wanted: str) -> None:
        rows = [list(map(int, each.split(":"))) for each in wanted.split(",") if each]
        self._wanted = {step: (failures, sum(away)) for step, failures, *away in rows}

    def wait(self, step: int) -> None:
        """Return when so many workers failed and each replacement has begun to copy, or if nobody failed.

        Raises:
            WaitTimeout: if they do not.
        """
        job = shared_core.current_job()
        if step not in self._wanted or job is None or job.env.incarnation:
            return  # a replacement passes by the steps that it copies: the others wait for it
        events = job.env.events
        assert events is not None

        def begun() -> bool:
            failures, away = 0, set[int]()
            for event in read_events(events):
                if event.kind == "start":
                    failures, away = 0, set()
                elif event.kind == "failed":
                    failures, away = failures + 1, away | {event.rank}
                elif event.kind in ("copying", "admitted"):
                    away.discard(event.rank)
            return not failures or (failures >= wanted and len(away) <= most)

        wanted, most = self._wanted[step]
        poll(begun, lambda: False, Wait(f"step {step}", f"{wanted} failures and the copies to begin", 40.0))


def hold(rank: int) -> None:
    """In replacements of ``rank``: return when one of another rank was admitted.

    Raises:
        WaitTimeout: if none is.
    """
    job = shared_core.current_job()
    if job is not None and job.rank == rank and job.env.incarnation:
        events = job.env.events
        assert events is not None
        wait = Wait(f"rank {rank}", "another replacement to be admitted", 60.0)
        poll(lambda: any(event.kind == "admitted" for event in read_events(events)), lambda: False, wait)
