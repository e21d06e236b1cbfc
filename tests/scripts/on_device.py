"""The device that a job trains on, and what it says at its end.

``SWIFT_TEST_DEVICE`` names it: ``cpu`` (also where it is not set), ``sim`` (the simulated one; ``SIMDEV_DELAY`` is the
least time of each of its kernels, in microseconds) or ``cuda`` (all ranks on the first GPU, with stable bits).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shared_core.testing.digest import digest
from shared_core.testing.report import Report, generators_digest

DEVICE = "SWIFT_TEST_DEVICE"


@cache
def device() -> torch.device:
    """The device. The first call makes it usable; no worker may have been forked from this process after it."""
    name = os.environ.get(DEVICE) or "cpu"
    if name == "sim":
        sys.path.append(str(Path(__file__).parents[1] / "device"))
        import simdev

        simdev.delay(int(os.environ.get("SIMDEV_DELAY", "0")))
    if name == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return torch.device(name, 0) if name != "cpu" else torch.device(name)


def finish(report: Report, digests: Mapping[str, str], **extra: Any) -> None:
    """Report the end of a rank, with the generators of the host and of the device, and say one line of it."""
    every = dict(digests) | {"generators": generators_digest()}
    if device().type != "cpu":
        every["device_generator"] = digest(torch.get_device_module(device()).get_rng_state())
    # One write: the lines of two ranks do not mix.
    sys.stdout.write(f"rank {report.who['rank']} on {device().type}: {digest(every)}\n")
    sys.stdout.flush()
    report.finish(every, **extra)
