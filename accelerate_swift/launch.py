"""From ``python train.py`` and ``accelerate launch`` to ``swiftrun``."""

from __future__ import annotations

import dataclasses
import os
import select
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

from shared_core import SwiftConfig, hand_over
from shared_core.cluster.handover import under_plain_torchrun, warn_plain_torchrun_once
from shared_core.events import console

#: Set by ``accelerate launch`` in every worker it starts.
_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
_KEY = "swift-recovery/launcher"


def hand_over_if_needed(num_processes: int, standbys: int, config: SwiftConfig) -> None:
    """Become ``swiftrun`` where the script was started in a way that cannot replace a lost worker.

    ``python train.py`` with ``num_processes`` above 1 becomes the launcher. Under ``accelerate launch`` on one machine
    the worker of local rank 0 does, and the others wait for its end. Under plain ``torchrun`` there is a warning.

    Raises:
        SwiftError: where it cannot be: in a notebook, or after a process group was created.
    """
    if under_plain_torchrun():
        if _ACCELERATE in os.environ and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            _leave_torchrun(standbys, config)
        warn_plain_torchrun_once()
    elif num_processes > 1:
        _export(config)
        hand_over(num_processes, standbys)


def _export(config: SwiftConfig) -> None:
    defaults = dataclasses.asdict(SwiftConfig())
    for name, value in dataclasses.asdict(config).items():
        if value != defaults[name]:
            os.environ.setdefault(f"SWIFT_RECOVERY_{name.upper()}", str(value))


def _leave_torchrun(standbys: int, config: SwiftConfig) -> NoReturn:
    """Under ``accelerate launch``: local rank 0 becomes ``swiftrun``, the others end when it does."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60)
    )
    workers = int(os.environ["LOCAL_WORLD_SIZE"])
    if int(os.environ["LOCAL_RANK"]) == 0:
        store.set(_KEY, str(os.getpid()))
        del store
        console("started by accelerate launch: going on under swiftrun, which can replace a lost worker")
        _export(config)
        for name in [each for each in os.environ if each.startswith("TORCHELASTIC_") or each in _TORCHRUN]:
            del os.environ[name]
        hand_over(workers, standbys)
    launcher = int(store.get(_KEY))
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(launcher)], [], [])
    os._exit(0)  # if it failed, torchrun has seen that


_TORCHRUN = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME "
    "MASTER_ADDR MASTER_PORT".split()
)
