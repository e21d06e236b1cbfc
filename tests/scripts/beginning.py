"""How scripts of plain PyTorch begin, with and without this product."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from shared_core.job import Job


def begin() -> Job | None:
    """Make the process group. Returns the job, or None in a reference run, which does not import the product."""
    job = None
    if not os.environ.get("SWIFT_BASELINE"):
        import shared_core

        shared_core.install()
        job = shared_core.current_job()
    dist.init_process_group("gloo")
    return job
