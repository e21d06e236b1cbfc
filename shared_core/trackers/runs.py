"""Which runs a job writes to: noted by the worker that opens them, taken up by its replacements.

The names of runs reach a replacement in its environment, where Weights & Biases and MLflow look for them by themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from shared_core.job import Job
from shared_core.protocol.worker_env import leave_environment

_KIND = "trackers"
#: Seconds after which Weights & Biases writes to its file; 15 by default, and what was not written is lost with rank 0.
_FLUSH = "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"


def prepare() -> None:
    """Before the script opens a run: have Weights & Biases write its file each second, unless the user has chosen."""
    os.environ.setdefault(_FLUSH, "1")


def note_runs(job: Job, **more: str) -> dict[str, str]:
    """Call in rank 0 when runs were opened: leave their names to its replacements.

    ``more``: further variables that replacements find in their environment. Returns the variables, for :func:`take_up`.
    """
    names = dict(more)
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None and isinstance(run.id, str):
        names |= {"WANDB_RUN_ID": run.id, "WANDB_RESUME": "allow"}
        note_file(job, run)
    mlflow: Any = sys.modules.get("mlflow")
    active = mlflow.active_run() if mlflow is not None else None
    if active is not None:
        names["MLFLOW_RUN_ID"] = active.info.run_id
    leave_environment(job.env.job_dir, job.rank, names)
    return names


def take_up(names: Mapping[str, str] | None) -> None:
    """In a replacement on another machine: put into its environment what :func:`note_runs` has returned."""
    for name, value in (names or {}).items():
        os.environ.setdefault(name, value)


def note_file(job: Job, run: Any) -> None:
    file = str(run.settings.sync_file)
    if file not in job.notes.kept(_KIND):
        job.notes.keep(_KIND, file, run.id)


def files_of(job: Job, run: str) -> list[str]:
    """Files that Weights & Biases has written of a run, oldest first."""
    return [file for file, known in job.notes.kept(_KIND).items() if known == run]
