"""From ``python train.py`` and ``accelerate launch`` to ``swiftrun``."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from shared_core import SwiftConfig
from shared_core.adapters import (
    hand_over,
    say_alone_once,
    under_plain_torchrun,
    warn_plain_torchrun_once,
    warn_srun_once,
)
from shared_core.events import console

#: Set by ``accelerate launch`` in every process it starts.
_BY_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
_KEY = "swift-recovery/launcher"


def hand_over_if_needed(num_processes: int, standbys: int, config: SwiftConfig) -> None:
    """Become ``swiftrun`` where the script was started in a way that cannot replace a failed worker.

    ``python train.py`` with ``num_processes`` above 1 becomes the launcher. So does the one process that ``accelerate
    launch`` starts on a CPU, with the number it was asked for; where it starts several through torchrun, on one
    machine, the worker of local rank 0 does, and the others wait for its end. Under plain ``torchrun``, in several
    tasks of ``srun``, and for a single process, there is a line. Raises SwiftError where it cannot be: in a notebook,
    after a process group was created, or in several tasks of ``srun``.
    """
    if under_plain_torchrun():
        if _BY_ACCELERATE in os.environ and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            _leave_torchrun(standbys, config)
        warn_plain_torchrun_once()
        return
    if num_processes <= 1 and _BY_ACCELERATE in os.environ:
        num_processes = _asked_for(_command_line(os.getppid()))
    if num_processes > 1:
        hand_over(num_processes, standbys, config.changed)
    say_alone_once(", or SwiftPlugin(num_processes=N)")
    warn_srun_once(alone=int(os.environ.get("WORLD_SIZE", "1") or "1") == 1)


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _asked_for(command: Sequence[str]) -> int:
    """Processes that this command line of ``accelerate launch``, or its configuration file, asks for; else 1.

    Accelerate itself starts only one on a CPU unless there is MPI, and does not tell it how many were wanted.
    """
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    begin = next((i for i, word in enumerate(command) if word == "launch" or word.endswith("commands.launch")), None)
    if begin is None:
        begin = next((i for i, word in enumerate(command) if Path(word).name == "accelerate-launch"), None)
    if begin is None:
        return 1
    try:
        given, _ = launch_command_parser().parse_known_args(list(command[begin + 1 :]))
    except SystemExit:
        return 1
    if given.num_processes:
        return int(given.num_processes)
    file = given.config_file or default_config_file
    return int(load_config_from_file(file).num_processes) if os.path.isfile(file) else 1


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
        console("started by accelerate launch: continuing under swiftrun, which can replace a failed worker")
        for name in [each for each in os.environ if each.startswith("TORCHELASTIC_") or each in _TORCHRUN]:
            del os.environ[name]
        hand_over(workers, standbys, config.changed)
    launcher = int(store.get(_KEY))
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(launcher)], [], [])
    os._exit(0)  # if it failed, torchrun has seen that


_TORCHRUN = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME "
    "MASTER_ADDR MASTER_PORT".split()
)
