"""Rank 0 fails twice in the middle of an epoch: each tracker has one run, and in it each row of the run without a
loss once.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import Jobs
from trackers import Values, csv_file, mlflow_store, of_mlflow, of_tensorboard, of_wandb, offline

from shared_core.faults import Fault
from tests.support.runner import JobResult, compare, unconfirmed

pytestmark = pytest.mark.timeout(300)  # three workers of rank 0 open their runs
LIGHTNING = ["--feature", "loggers"]
TWICE = [Fault(0, 4, "forward", "SIGKILL"), Fault(0, 12, "update.after", "SIGKILL", incarnation=1)]


@pytest.fixture(scope="module")
def store() -> Iterator[Path]:
    with mlflow_store() as path:
        yield path


def _run(jobs: Jobs, store: Path, script: str, args: Sequence[str], faults: Sequence[Fault], like: JobResult) -> Any:
    """The job, and the file of its store."""
    name = f"{Path(script).stem}-{len(list(store.parent.iterdir()))}"
    result = jobs.run(script, args=args, faults=faults, env=offline(store, name), timeout_s=100)
    # Services draw random numbers when they open a run.
    compare(result, like, [part for part in like.reports[0]["digests"] if part != "generators"])
    assert not unconfirmed(result), result.tail()
    return result, store.with_name(f"{name}.db")


def _values(rows: Sequence[Mapping[str, Any]], step: str) -> Values:
    """Values of each name in the order of rows; ``step`` is the name of the step's own."""
    values = Values()
    for row in rows:
        for name, value in row.items():
            if name != step:
                values.setdefault(name, []).append((int(row[step]), float(value)))
    return values


def _check_wandb(result: JobResult, rows: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> None:
    """The run has these rows, numbered so, and ended well."""
    written, codes = of_wandb(result.out)
    assert [row["_step"] for row in written] == list(steps)
    assert [{k: v for k, v in row.items() if not k.startswith("_")} for row in written] == list(rows)
    assert codes[-1] == 0


def _check_mlflow(store: Path, values: Values) -> None:
    written, status = of_mlflow(store)
    assert written == values
    assert status == "FINISHED"


@pytest.mark.nightly
def test_loggers_of_lightning(jobs: Jobs, store: Path) -> None:
    reference = jobs.reference("lit.py", args=LIGHTNING)
    result, file = _run(jobs, store, "lit_trackers.py", [], TWICE, reference)
    assert csv_file(result).read_text() == csv_file(reference).read_text()
    assert of_tensorboard(result.out / "board") == of_tensorboard(reference.out / "board")
    with open(csv_file(reference), newline="") as lines:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(lines)]
    _check_mlflow(file, {f"p-{name}": value for name, value in _values(rows, "step").items()})
    named = [{"trainer/global_step" if name == "step" else name: v for name, v in row.items()} for row in rows]
    _check_wandb(result, named, range(len(rows)))


@pytest.mark.nightly
def test_trackers_of_accelerate(jobs: Jobs, store: Path) -> None:
    reference = jobs.reference("acc_text.py")
    result, file = _run(jobs, store, "acc_text.py", ["--trackers"], TWICE, reference)
    lines = (reference.out / "lines.jsonl").read_text()
    assert (result.out / "lines.jsonl").read_text() == lines
    rows = [json.loads(line) for line in lines.splitlines()]
    values = _values(rows, "step")
    _check_mlflow(file, values)
    assert of_tensorboard(result.out) == {
        name: [(step, pytest.approx(value)) for step, value in pairs] for name, pairs in values.items()
    }
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update({name: value for name, value in row.items() if name != "step"})
    _check_wandb(result, list(merged.values()), list(merged))


@pytest.mark.nightly
def test_reports_of_transformers(jobs: Jobs, store: Path) -> None:
    reference = jobs.reference("hf_trainer.py")
    result, file = _run(jobs, store, "hf_trainer.py", ["--trackers"], TWICE, reference)
    rows = reference.reports[0]["extra"]["history"]
    written, status = of_mlflow(file)
    assert {name: pairs for name, pairs in written.items() if not _timed(name)} == _values(rows, "step")
    assert status == "FINISHED"
    named = [{_named(name): value for name, value in row.items()} for row in rows]
    scalars = of_tensorboard(result.out)
    assert {name: pairs for name, pairs in scalars.items() if not _timed(name)} == {
        name: [(step, pytest.approx(value)) for step, value in pairs]
        for name, pairs in _values(named, "train/global_step").items()
    }
    reported, codes = of_wandb(result.out)
    assert [row["_step"] for row in reported] == list(range(len(rows)))
    alone = {"train/train_loss", "train/total_flos"}  # in the summary
    assert [{k: v for k, v in row.items() if k[0] != "_" and not _timed(k)} for row in reported] == [
        {name: value for name, value in row.items() if name not in alone} for row in named
    ]
    assert codes[-1] == 0
    _check_speed(result)


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["lit_trackers.py", "acc_text.py", "hf_trainer.py"])
def test_as_the_same_trackers_without_this_product(script: str, jobs: Jobs, store: Path) -> None:
    """Weights & Biases writes its file so late that all rows are lost with rank 0."""
    args = [] if script == "lit_trackers.py" else ["--trackers"]
    stock = jobs.run(script, args=args, env=offline(store, "stock"), launcher="plain", timeout_s=100)
    late = {"WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "15"}
    faults = [Fault(0, 7, "bucket", "SIGKILL")]
    result = jobs.run(script, args=args, faults=faults, env=offline(store, "failed") | late, timeout_s=100)
    compare(result, stock)
    assert not unconfirmed(result), result.tail()
    kept = [[{k: v for k, v in row.items() if not _clock(k)} for row in of_wandb(r.out)[0]] for r in (result, stock)]
    assert kept[0] == kept[1]
    stores = [of_mlflow(store.with_name(f"{name}.db")) for name in ("failed", "stock")]
    assert {k: v for k, v in stores[0][0].items() if not _timed(k)} == {
        k: v for k, v in stores[1][0].items() if not _timed(k)
    }
    assert [status for _, status in stores] == ["FINISHED", "FINISHED"]


def _clock(name: str) -> bool:
    return name in ("_timestamp", "_runtime") or _timed(name)


def _check_speed(result: JobResult) -> None:
    """The whole training counts, not what the last worker of rank 0 has seen of it."""
    began, speed = (result.reports[0]["extra"][name] for name in ("began", "speed"))
    [start], [first, _] = result.kinds("start"), result.kinds("fault")
    assert start.time < began < first.time
    steps = speed["train_steps_per_second"] * speed["train_runtime"]
    assert steps == pytest.approx(18, rel=0.01)


def _timed(name: str) -> bool:
    return "time" in name or "per_second" in name


def _named(name: str) -> str:
    if name == "step":
        return "train/global_step"
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
