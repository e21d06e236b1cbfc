"""How scripts of plain PyTorch begin, with and without this product."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist

BACKEND = "SWIFT_TEST_BACKEND"

if TYPE_CHECKING:
    from shared_core.job import Job


def begin() -> Job | None:
    """Make the process group. Returns the job, or None in a reference run, which does not import the product."""
    job = None
    if not os.environ.get("SWIFT_BASELINE"):
        import shared_core

        shared_core.install()
        job = shared_core.current_job()
    dist.init_process_group(backend())
    return job


def backend() -> str:
    """The backend that ``SWIFT_TEST_BACKEND`` names; gloo where it is not set. NCCL takes two ranks on one GPU only if
    it believes them to be on two hosts.
    """
    name = os.environ.get(BACKEND, "gloo")
    if name == "nccl":
        os.environ |= {"NCCL_HOSTID": f"rank{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo"}
    return name
