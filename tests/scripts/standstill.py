"""A place where a job waits to be killed."""

from __future__ import annotations

import os
from pathlib import Path

from shared_core.testing.report import OUT


def stand_still(batch: int) -> None:
    """In rank 0, at the batch ``STOP_AT``: stand still for good. Nothing of this is state that a next start takes up.

    Args:
        batch: number of this batch, from 0.
    """
    if os.environ.get("RANK") == "0" and batch == int(os.environ.get("STOP_AT", "-1")):
        pipe = Path(os.environ[OUT], "never")
        os.mkfifo(pipe)
        pipe.read_bytes()
