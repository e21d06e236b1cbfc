"""A machine with shards fails: a spare one takes its place with the copies that another machine has of them."""

from __future__ import annotations

import contextlib

import pytest
from harness import SCRIPTS, Jobs

from tests.support.cluster import Cluster
from tests.support.namespaces import machines, unavailable
from tests.support.runner import check_clean, compare

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "machines can be made")

#: Ranks 0 and 1, and 2 and 3, are on one machine. Of HSDP that is the only machine with one replica of each shard.
JOBS: dict[str, tuple[str, list[str]]] = {
    "fsdp2": ("sharded.py", []),
    "hsdp": ("sharded.py", ["--replicas", "2"]),
    "zero_3": ("zero.py", ["--stage", "3"]),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "at"), [("fsdp2", 1), ("fsdp2", 7), ("hsdp", 20), ("zero_3", 20)])
def test_a_machine_fails(kind: str, at: int, jobs: Jobs) -> None:
    """In the first batch, at the end of an epoch, and in the middle of one."""
    script, args = JOBS[kind]
    args = [*args, "--epochs", "10"]
    reference = jobs.reference(script, nproc=4, args=args)
    with machines(3) as made, contextlib.ExitStack() as at_end:
        cluster = Cluster(jobs.warm, made, jobs.folder("machines"), SCRIPTS / script, args=args)
        at_end.callback(cluster.stop)
        cluster.until(lambda: cluster.boundaries(2) >= at, 60.0)
        assert 0 < len(cluster.kept(0)) < 6, "what no replacement can ask for is let go of"
        failed = cluster.place_of(2)
        made[failed].kill()
        result, statuses = cluster.finish(120.0)
    assert sorted(statuses) == [-9, 0, 0] and statuses[failed] == -9, result.tail()
    compare(result, reference)
    check_clean(result)
    assert {event.rank for event in result.kinds("failed")} == {2, 3}, result.tail()
    assert "continues from the checkpoint" not in result.stderr
