"""After a loss there is one version of each log, no step in it is lost or doubled, and the checkpoints are the same."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from harness import Jobs

from shared_core.testing import Fault
from shared_core.testing.runner import JobResult

ARGS = ["--feature", "loggers"]


def _rows(result: JobResult) -> list[dict[str, str]]:
    """Rows of the only ``metrics.csv``, without empty cells and the product's own columns."""
    folders = sorted(path.name for path in (result.out / "csv").iterdir())
    assert folders == ["version_0"], folders
    with open(result.out / "csv" / "version_0" / "metrics.csv", newline="") as file:
        rows = [{k: v for k, v in row.items() if v and not k.startswith("swift")} for row in csv.DictReader(file)]
    return [row for row in rows if row.keys() - {"step", "epoch"}]


def _scalars(result: JobResult) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every scalar in the only TensorBoard folder, the product's own left out."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    folders = sorted(path.name for path in (result.out / "board").iterdir())
    assert folders == ["version_0"], folders
    scalars: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(Path(result.out, "board", "version_0").glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if not value.tag.startswith(("swift", "hp_metric")):
                    scalars.setdefault(value.tag, []).append((event.step, make_ndarray(value.tensor).item()))
    return scalars


@pytest.mark.parametrize(
    "fault",
    [
        Fault(0, 3, "forward", "SIGKILL"),
        Fault(0, 6, "validation", "SIGKILL"),
        Fault(0, 9, "update.after", "os._exit"),
        Fault(1, 9, "bucket", "SIGKILL"),
    ],
    ids=str,
)
def test_logs_and_checkpoints_are_those_of_the_run_without_a_loss(fault: Fault, jobs: Jobs) -> None:
    reference = jobs.reference("lit.py", args=ARGS)
    result = jobs.check("lit.py", faults=[fault], args=ARGS)
    assert _rows(result) == _rows(reference)
    assert _scalars(result) == _scalars(reference)
    files = [sorted(str(p.relative_to(job.out)) for p in job.out.rglob("*.ckpt")) for job in (result, reference)]
    assert files[0] == files[1]
    assert result.reports[0]["extra"]["checkpoints"] == reference.reports[0]["extra"]["checkpoints"]
