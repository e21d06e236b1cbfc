"""What scripts share that wait for copies of the state, which are made while the others train."""

from __future__ import annotations

import time
from collections import Counter

import shared_core
from shared_core.events import read_events


class Copies:
    """Where to wait.

    Args:
        wanted: ``10:1,12:3``: step 12 waits for three copies to begin; empty for nowhere.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = {int(step): int(count) for step, _, count in (e.partition(":") for e in wanted.split(",") if e)}

    def wait(self, step: int) -> None:
        """Return when so many have begun, or if nobody was lost.

        Raises:
            TimeoutError: if they do not.
        """
        job = shared_core.current_job()
        if step not in self._wanted or job is None:
            return
        deadline = time.monotonic() + 60.0
        while (kinds := Counter(e.kind for e in read_events(job.env.events)))["lost"]:
            if kinds["copying"] >= self._wanted[step]:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited 60 s in step {step} for {self._wanted[step]} copies to begin: {kinds}")
            time.sleep(0.01)
