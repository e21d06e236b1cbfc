"""The device that a job of the tests trains on.

``SWIFT_TEST_DEVICE`` names it: ``cpu`` (also where it is not set), ``sim`` (the simulated one of ``tests/device``;
``SIMDEV_DELAY`` is the least time of each of its kernels, in microseconds) or ``cuda`` (the first GPU for all ranks,
with stable bits).
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from pathlib import Path

import torch

DEVICE = "SWIFT_TEST_DEVICE"
#: What a device needs in the environment of a job. The kernels of the simulated one take their time, as a GPU's do.
_ENVIRONMENT: dict[str, dict[str, str]] = {
    "cpu": {},
    "sim": {"SWIFT_RECOVERY_DEVICE_EXPERIMENTAL": "true", "SIMDEV_BYTES": str(1 << 27), "SIMDEV_DELAY": "20"},
    # is_available() must not start CUDA in a process that is forked later.
    "cuda": {
        "SWIFT_RECOVERY_DEVICE_EXPERIMENTAL": "true",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    },
}
DEVICES = tuple(_ENVIRONMENT)


def environment(name: str) -> dict[str, str]:
    """Environment of a job on a device."""
    return {DEVICE: name, **_ENVIRONMENT[name]}


@cache
def device() -> torch.device:
    """The device. The first call makes it usable; no worker may have been forked from this process after it."""
    name = os.environ.get(DEVICE) or "cpu"
    if name == "sim":
        sys.path.append(str(Path(__file__).parents[2] / "tests" / "device"))
        importlib.import_module("simdev").delay(int(os.environ.get("SIMDEV_DELAY", "0")))
    if name == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return torch.device(name, 0) if name != "cpu" else torch.device(name)
