"""Pipelines over several machines: a worker, or a whole machine with its logs, fails.

Machines share the disk here, but each keeps its logs in a folder of its own, which no other looks into.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Jobs
from pipelines import SCRIPT, starts

from shared_core.faults import Fault
from tests.support.cluster import Cluster
from tests.support.namespaces import machines, unavailable
from tests.support.runner import JobResult, check_clean, compare, unconfirmed

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "machines can be made")

#: Of two machines with two stages each; long enough for a machine to fail by the way.
BASE = ["--stages", "4", "--steps", "40", "--tied", "--clip", "0.5"]
EVERY = 5


@contextlib.contextmanager
def pipeline(
    jobs: Jobs, folder: Path, count: int, args: Sequence[str] = BASE, *, options: dict[str, Any], **more: Any
) -> Iterator[Cluster]:
    """A pipeline on so many machines, the spare ones among them; ``more`` as for :class:`Cluster`."""
    config = folder / "swift.json"
    named: dict[str, Any] = {
        "checkpoint.dir": str(folder / "checkpoints"),
        "checkpoint.every_steps": EVERY,
        "log.dir": str(folder),
    }
    named["checkpoint.background"] = False  # so that it is certain which ones there are
    config.write_text(json.dumps(named | options))
    with machines(count) as made:
        out = jobs.folder("machines")
        more["options"] = [f"--swift-config={config}"]
        cluster = Cluster(jobs.warm, made, out, SCRIPTS / SCRIPT, args=args, **more)
        try:
            yield cluster
        finally:
            cluster.stop()


def lose(cluster: Cluster, *ranks: int) -> None:
    """Kill the machines of these ranks at once, past the second checkpoint."""
    cluster.until(lambda: cluster.boundaries(ranks[0]) >= 2 * EVERY + 2)
    places = [cluster.place_of(rank) for rank in ranks]
    for place in places:
        cluster.machines[place].cut()
    for place in places:
        cluster.machines[place].kill()


def check(jobs: Jobs, cluster: Cluster, args: Sequence[str] = BASE, *, restarts: int = 0) -> JobResult:
    """Every rank has ended with the bits of DeepSpeed's own engine."""
    result, _ = cluster.finish()
    compare(result, jobs.reference(SCRIPT, nproc=4, args=args))
    check_clean(result)
    assert not unconfirmed(result), result.tail()
    assert len({event.fields["attempt"] for event in result.kinds("restart")}) == restarts, result.tail()
    return result


def processes(result: JobResult, rank: int) -> int:
    """How many processes have held a rank."""
    return len([one for one in result.workers if one["rank"] == rank])


@pytest.mark.nightly
def test_a_machine_without_replicas_fails(jobs: Jobs, tmp_path: Path) -> None:
    """Only what crosses between machines is logged; the failed one's ranks start from the checkpoint, on a spare."""
    with pipeline(jobs, tmp_path, 3, options={"log.groups": "machine"}) as cluster:
        lose(cluster, 2)
        result = check(jobs, cluster)
    assert {rank for rank, _ in starts(result)} == {2, 3} and min(
        boundary for _, boundary in starts(result)
    ) >= 2 * EVERY
    assert processes(result, 0) == processes(result, 1) == 1, result.tail()


@pytest.mark.nightly
def test_machines_next_to_each_other_fail(jobs: Jobs, tmp_path: Path) -> None:
    """Neither's log, nor what each had published, is left anywhere. Both start from the checkpoint and send each other
    again what was in them."""
    with pipeline(jobs, tmp_path, 6, options={"log.groups": "machine"}, nnodes=4, nproc=1) as cluster:
        lose(cluster, 2, 3)
        result = check(jobs, cluster)
    assert {rank for rank, _ in starts(result)} == {2, 3} and min(
        boundary for _, boundary in starts(result)
    ) >= 2 * EVERY
    assert processes(result, 0) == processes(result, 1) == 1, result.tail()


@pytest.mark.nightly
def test_machines_fail_one_after_the_other(jobs: Jobs, tmp_path: Path) -> None:
    """What the second needs of the first is in the log that its replacement has written again, on another machine."""
    args = ["--stages", "4", "--steps", "60", "--tied", "--clip", "0.5"]
    with pipeline(jobs, tmp_path, 6, args, options={}, nnodes=4, nproc=1) as cluster:
        lose(cluster, 2)
        cluster.until(lambda: len(cluster.workers(2)) == 2)
        lose(cluster, 3)
        result = check(jobs, cluster, args)
    assert {rank for rank, _ in starts(result)} == {2, 3} and processes(result, 0) == processes(result, 1) == 1


@pytest.mark.nightly
def test_a_worker_of_a_machine_starts_again_with_the_others_there(jobs: Jobs, tmp_path: Path) -> None:
    """First on the one machine, then, with the replay behind, on the other."""
    failed = [Fault(3, 13, "pipe.forward", "SIGKILL", 2), Fault(1, 24, "pipe.backward", "SIGKILL", 2)]
    with pipeline(jobs, tmp_path, 2, options={"log.groups": "machine"}, faults=failed) as cluster:
        result = check(jobs, cluster)
    assert sorted(starts(result)) == [(0, 20), (1, 20), (2, 10), (3, 10)]


@pytest.mark.nightly
@pytest.mark.parametrize("log_groups", ["machine", "worker"])
def test_a_worker_on_each_machine_at_once(jobs: Jobs, tmp_path: Path, log_groups: str) -> None:
    """By machine, nobody is left who has not to start again."""
    failed = [Fault(1, 13, "pipe.forward", "SIGKILL", 2), Fault(2, 13, "pipe.forward", "SIGKILL", 1)]
    with pipeline(jobs, tmp_path, 2, options={"log.groups": log_groups}, faults=failed) as cluster:
        result = check(jobs, cluster, restarts=int(log_groups == "machine"))
    if log_groups == "worker":
        assert sorted(starts(result)) == [(1, 10), (2, 10)]


@pytest.mark.nightly
@pytest.mark.parametrize("log_messages", ["auto", "always"])
def test_a_machine_with_both_replicas_of_a_stage_fails(jobs: Jobs, tmp_path: Path, log_messages: str) -> None:
    """Two pipelines of two stages: ranks 2 and 3 are the second stage of both. Without logs all go back."""
    args = ["--stages", "2", "--steps", "40", "--tied", "--clip", "0.5"]
    options = {"log.groups": "machine", "log.messages": log_messages}
    with pipeline(jobs, tmp_path, 3, args, options=options) as cluster:
        lose(cluster, 2)
        result = check(jobs, cluster, args, restarts=int(log_messages == "auto"))
    if log_messages == "always":
        assert {rank for rank, _ in starts(result)} == {2, 3} and processes(result, 0) == 1, result.tail()
