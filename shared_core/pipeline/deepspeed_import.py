"""The import of DeepSpeed, set up as recovery needs it."""

from __future__ import annotations

import os
from typing import Any

from shared_core.errors import ConfigError, MissingExtra


def import_deepspeed() -> Any:
    """The module ``deepspeed``, set up as recovery needs it. Call it before the process group is created.

    DeepSpeed trains on the CPU, also where there is a GPU, and leaves out its all-reduce through shared memory, which
    training does not use: that is compiled at start-up under a lock that a killed worker leaves behind, for which all
    later ones on the machine would wait for ever.

    Raises:
        ConfigError: if DeepSpeed was imported already and has chosen another device.
        MissingExtra: if it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise MissingExtra("pipelines need DeepSpeed: pip install 'swift-recovery[deepspeed]'") from error
    chosen = get_accelerator().device_name()
    if chosen != "cpu":
        raise ConfigError(
            f"DeepSpeed has chosen {chosen!r} when it was imported, and this version trains on CPUs only: set "
            "DS_ACCELERATOR=cpu in the environment, or import DeepSpeed later"
        )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
