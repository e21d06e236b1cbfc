"""A machine fails under ``on_failure="reroute"``: the others continue where each stage keeps a replica."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from harness import SCRIPTS, Jobs
from rerouted import ORDERED, SCRIPT

from tests.support.cluster import Cluster
from tests.support.namespaces import machines, unavailable
from tests.support.runner import JobResult, compare

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "machines can be made")

#: Steps so long that the machines fail in forwards.
LONG = ("--work-ms", "40")


@dataclass(frozen=True)
class Layout:
    """How a job lies on machines.

    Attributes:
        machines: places.
        nproc: workers of each.
        failed: machines that fail at once; the first, which has the store, is never one.
        spares: machines that wait for a place.
        args: of the script.
        restarts: all go back to the checkpoint.
    """

    machines: int
    nproc: int
    failed: tuple[int, ...]
    spares: int = 0
    args: tuple[str, ...] = ("--steps", "14")
    restarts: bool = False


LAYOUTS = {
    # A worker a machine: two pipelines of two stages.
    "one_worker": Layout(4, 1, (3,)),
    "both_ends_on_two_machines": Layout(4, 1, (1, 3), 2),
    "a_whole_pipeline_that_others_read": Layout(2, 2, (1,), 0, ("--in-a-row", "--shared", "--steps", "14")),
    # A machine a stage: nobody has its parameters.
    "a_whole_stage": Layout(2, 2, (1,), 1, restarts=True),
}


def run(jobs: Jobs, layout: Layout, folder: Path) -> JobResult:
    """Lose the machines, and end with the bits of the run in which nobody failed, on every rank that reports."""
    args = [*LONG, *layout.args]
    nproc = layout.machines * layout.nproc
    reference = jobs.reference(SCRIPT, nproc=nproc, args=args, env=ORDERED, launcher="swiftrun")
    (folder / "swift.json").write_text(json.dumps({"on_failure": "reroute", "reroute.reduction": "ordered"}))
    with (
        machines(layout.machines + layout.spares) as made,
        contextlib.closing(_Running(jobs, made[: layout.machines + layout.spares], layout, args, folder)) as running,
    ):
        cluster = running.cluster
        places = [cluster.place_of(rank) for rank in (place * layout.nproc for place in layout.failed)]
        cluster.until(lambda: cluster.boundaries(0) >= 4, 60.0)
        for place in places:
            made[place].cut()
        for place in places:
            made[place].kill()
        result, statuses = cluster.finish(120.0)
    assert [statuses[place] for place in places] == [-9] * len(places), result.tail()
    kept = {rank: report for rank, report in reference.reports.items() if rank in result.reports}
    compare(result, replace(reference, reports=kept))
    return result


class _Running:
    def __init__(self, jobs: Jobs, made: Sequence[object], layout: Layout, args: Sequence[str], folder: Path) -> None:
        self.cluster = Cluster(
            jobs.warm,
            made,  # type: ignore[arg-type]
            jobs.folder("machines"),
            SCRIPTS / SCRIPT,
            nnodes=layout.machines,
            nproc=layout.nproc,
            args=args,
            options=[f"--swift-config={folder / 'swift.json'}"],
        )
        last = layout.machines * layout.nproc - 1
        self.cluster.until(lambda: bool(self.cluster.workers(last)) and self.cluster.boundaries(last) >= 2, 60.0)

    def close(self) -> None:
        self.cluster.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_machine_fails(jobs: Jobs, name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    result = run(jobs, layout, tmp_path)
    assert bool(result.kinds("restart")) == layout.restarts, result.tail()
    assert layout.restarts or result.kinds("rerouted"), result.tail()
