"""From ``python train.py`` and ``accelerate launch`` to ``swiftrun``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shared_core import SwiftConfig
from shared_core.adapters import (
    hand_over,
    leave_torchrun,
    say_alone_once,
    started_alone,
    under_plain_torchrun,
    warn_plain_torchrun_once,
    warn_srun_once,
)

#: Set by ``accelerate launch`` in every process it starts.
_BY_ACCELERATE = "ACCELERATE_MIXED_PRECISION"


def hand_over_if_needed(num_processes: int, standbys: int, config: SwiftConfig) -> None:
    """Become ``swiftrun`` where the script was started in a way that cannot replace a failed worker.

    ``python train.py`` with ``num_processes`` above 1, or with checkpoints, becomes the launcher. So does the one
    process that ``accelerate launch`` starts on a CPU, with the number it was asked for. Where ``accelerate launch``
    starts several through torchrun, and under torchrun with checkpoints, the worker of local rank 0 does, on one
    machine, and the others wait for its end. Under plain ``torchrun`` else, in several tasks of ``srun``, and for a
    single process, there is a line. Raises SwiftError where it cannot be: in a notebook, or after a process group was
    created.
    """
    if under_plain_torchrun():
        if _BY_ACCELERATE in os.environ or config.checkpoint.dir is not None:
            leave_torchrun(standbys, config.changed)
        warn_plain_torchrun_once()
        return
    if num_processes <= 1 and _BY_ACCELERATE in os.environ:
        num_processes = _asked_for(_command_line(os.getppid()))
    if num_processes > 1 or (config.checkpoint.dir is not None and started_alone()):
        hand_over(max(1, num_processes), standbys, config.changed)
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
