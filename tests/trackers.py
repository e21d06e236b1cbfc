"""What trackers have written offline, read back for comparison."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from shared_core.trackers.compat import entries
from tests.support.runner import JobResult

Values = dict[str, list[tuple[int, float]]]


@contextmanager
def mlflow_store() -> Iterator[Path]:
    """An empty store with the experiment ``tests``. In memory where possible: making one takes a hundred commits."""
    folder = Path(tempfile.mkdtemp(prefix="trackers-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    make = f"import mlflow; mlflow.set_tracking_uri('sqlite:///{folder}/empty.db'); mlflow.set_experiment('tests')"
    try:
        subprocess.run([sys.executable, "-c", make], check=True, capture_output=True, env=os.environ | QUIET)
        yield folder / "empty.db"
    finally:
        shutil.rmtree(folder)


QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_SILENT": "true", "WANDB_MODE": "offline"}


def offline(store: Path, name: str) -> dict[str, str]:
    """Environment of a job whose trackers write here; its own copy of the store is ``name``.db."""
    shutil.copy(store, store.with_name(f"{name}.db"))
    uri = f"sqlite:///{store.with_name(name)}.db"
    return QUIET | {"MLFLOW_TRACKING_URI": uri, "MLFLOW_EXPERIMENT_NAME": "tests"}


def csv_file(result: JobResult) -> Path:
    """The only ``metrics.csv`` of a job whose ``CSVLogger`` is called ``csv``."""
    [file] = (result.out / "csv").rglob("*.csv")
    assert file.parent.name == "version_0"
    return file


def of_tensorboard(folder: Path) -> Values:
    """Step and value of every scalar below ``folder``, all in one folder."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    folders, values = set(), Values()
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars" and value.tag != "hp_metric":
                    folders.add(path.parent)
                    values.setdefault(value.tag, []).append((event.step, make_ndarray(value.tensor).item()))
    assert len(folders) == 1, folders
    return values


def of_wandb(folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Rows of the only run below ``folder``, in the order in which ``wandb sync`` sends its parts, and exit codes."""
    from wandb.proto import wandb_internal_pb2

    protocol: Any = wandb_internal_pb2
    rows, codes, runs = [], [], set()
    for file in sorted(folder.rglob("*.wandb")):
        if file.parent.is_symlink():  # latest-run
            continue
        for entry in entries(file.read_bytes()):
            record = protocol.Record.FromString(entry)
            if record.HasField("run"):
                runs.add(record.run.run_id)
            elif record.HasField("exit"):
                codes.append(record.exit.exit_code)
            elif record.HasField("history"):
                items = {each.key or "/".join(each.nested_key): each.value_json for each in record.history.item}
                rows.append({name: json.loads(value) for name, value in items.items()})
    assert len(runs) == 1, runs
    return rows, codes


def of_mlflow(file: Path) -> tuple[Values, str]:
    """Step and value of each metric of the only run in a store, in the order of writing, and the run's status."""
    with closing(sqlite3.connect(file)) as store:
        [(run, status)] = store.execute("select run_uuid, status from runs").fetchall()
        values: Values = {}
        for key, step, value in store.execute(
            "select key, step, value from metrics where run_uuid = ? order by key, step, timestamp, rowid", (run,)
        ):
            values.setdefault(key, []).append((step, value))
    return values, status
