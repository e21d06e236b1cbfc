"""What the tests of pipelines share: a run with faults against DeepSpeed's own engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import Jobs

from shared_core.config import variable_of
from shared_core.faults import Fault
from tests.support.runner import JobResult, check_survivors, compare, unconfirmed

SCRIPT, MICRO_BATCHES = "pipe.py", 4
#: Tied layers, clipping, activation checkpointing, a scheduler and evaluation; dropout is always there.
FULL = ("--tied", "--clip", "0.5", "--checkpointing", "1", "--schedule", "--evaluate")


def logging(folder: Path, every: int = 3, **more: Any) -> dict[str, str]:
    """Environment of a job with a checkpoint at every ``every``-th step boundary; ``more`` are options by name."""
    named = {"checkpoint.dir": folder / "checkpoints", "checkpoint.every_steps": every, "log.dir": folder}
    options = named | {"checkpoint.background": False, **more}  # so that it is certain which ones there are
    return {variable_of(name): str(value) for name, value in options.items()}


def run(
    jobs: Jobs,
    faults: Sequence[Fault],
    args: Sequence[str] = (),
    *,
    nproc: int = 4,
    env: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
    restarts: int = 0,
    together: Collection[int] = (),
) -> JobResult:
    """Train with faults and check the result, on every rank, by hash against DeepSpeed's own engine.

    Args:
        jobs: runs them.
        faults: all must strike.
        args: of the script, in both runs.
        nproc: ranks.
        env: of the run with faults only.
        extra: arguments of the run with faults only.
        restarts: how often all workers must have gone back to a checkpoint; where it is 0, no survivor may have been
            restarted or have computed any micro-batch again.
        together: survivors that must have started again together with a replacement, and no others.
    """
    reference = jobs.reference(SCRIPT, nproc=nproc, args=args)
    assert all(sum(report["counts"].values()) > 0 for report in reference.reports.values()), "forward is not counted"
    result = jobs.run(SCRIPT, nproc=nproc, faults=faults, args=[*args, *extra], env=env)
    compare(result, reference)
    assert not unconfirmed(result), "\n".join([*unconfirmed(result), result.tail()])
    assert len(result.kinds("restart")) == restarts, result.tail()
    assert {event.rank for event in result.kinds("together")} == set(together), result.tail()
    if not restarts:
        check_survivors(result, reference, together)
    return result


def resolutions(result: JobResult) -> set[str]:
    """How the recoveries of a run were made, as its survivors say."""
    return {event.fields["resolution"] for event in result.kinds("recovered")}


def starts(result: JobResult) -> list[tuple[int, int]]:
    """(rank, step boundary) from which each replacement that got ready started, in order; boundary 0 is the
    script's beginning.
    """
    return [(event.rank, event.fields["boundary"]) for event in result.kinds("replacement_ready")]


def instructions(stages: int, stage: int) -> int:
    """How many instructions one batch has at a stage, as DeepSpeed's own schedule says."""
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    return sum(len(list(slot)) for slot in schedule.TrainSchedule(MICRO_BATCHES, stages, stage).steps())
