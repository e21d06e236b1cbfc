"""Jobs with checkpoints: a place where one waits to be killed, and what a policy has heard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.report import OUT


def stand_still(batch: int) -> None:
    """In rank 0, at the batch ``STOP_AT``: stand still for good. Nothing of this is state that a next start takes up.

    Args:
        batch: number of this batch, from 0.
    """
    if os.environ.get("RANK") == "0" and batch == int(os.environ.get("STOP_AT", "-1")):
        pipe = Path(os.environ[OUT], "never")
        os.mkfifo(pipe)
        pipe.read_bytes()


def noted(job: Any) -> list[tuple[int, float]]:
    """Losses that the policy of checkpoints has heard of in rank 0 and not fitted yet, with their step boundaries."""
    pricing = None if job is None else job._worker.start.checkpoints.pricing
    return [] if pricing is None else [(boundary, float(loss)) for boundary, loss in pricing._losses]
