"""Jobs on several machines lose workers, machines and the network between them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_server import Etcd, needs_etcd
from harness import SCRIPTS, Jobs

from shared_core.checkpoint.spool import FOLDER, Spool
from shared_core.cli.watch import ask
from shared_core.errors import SwiftError
from shared_core.faults import Fault
from tests.support.cluster import Cluster, alive
from tests.support.namespaces import Machine, machines, unavailable
from tests.support.runner import JobResult, check_clean, check_survivors, compare, unconfirmed

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "machines can be made")

SCRIPT = "plain_ddp.py"
LONG = ["--norm", "--steps", "150"]


class Site:
    """Machines and the jobs on them."""

    def __init__(self, jobs: Jobs, made: list[Machine]) -> None:
        self.machines = made
        self._jobs = jobs
        self._running: list[Cluster] = []

    def start(self, on: list[Machine], args: list[str], script: str = SCRIPT, **more: Any) -> Cluster:
        out = self._jobs.folder("machines")
        cluster = Cluster(self._jobs.warm, on, out, SCRIPTS / script, args=args, **more)
        self._running.append(cluster)
        return cluster

    def check(self, cluster: Cluster, args: list[str], ranks: int = 4) -> Any:
        result, statuses = cluster.finish()
        compare(result, self._jobs.reference(SCRIPT, nproc=ranks, args=args))
        check_clean(result)
        assert len({event.run for event in result.events}) == 1, "all machines and attempts are one run"
        return result, statuses

    def spare(self, cluster: Cluster) -> int:
        """Which of the three machines waits."""
        waiting = [place for place in (1, 2) if "waits as a spare" in cluster.said(place)]
        assert len(waiting) == 1, cluster.result(0, []).tail()
        return waiting[0]

    def close(self) -> None:
        for cluster in self._running:
            cluster.stop()


@pytest.fixture
def site(jobs: Jobs) -> Iterator[Site]:
    with machines(3) as made, contextlib.closing(Site(jobs, made)) as running:
        yield running


@pytest.mark.nightly
def test_workers_are_replaced_by_their_own_machines(site: Site, jobs: Jobs) -> None:
    args, faults = ["--norm"], [Fault(1, 4, "bucket", "SIGKILL"), Fault(2, 4, "bucket", "SIGKILL")]
    cluster = site.start(site.machines[:2], args, faults=faults)
    result, statuses = site.check(cluster, args)
    assert statuses == [0, 0]
    assert not unconfirmed(result), result.tail()
    check_survivors(result, jobs.reference(SCRIPT, nproc=4, args=args))


@pytest.mark.nightly
def test_a_spare_machine_takes_the_place_of_a_failed_one(site: Site) -> None:
    cluster = site.start(site.machines, LONG)
    cluster.until(lambda: cluster.boundaries(2) >= 20)
    failed = 3 - site.spare(cluster)
    site.machines[failed].kill()
    result, statuses = site.check(cluster, LONG)
    assert sorted(statuses) == [-9, 0, 0]
    assert statuses[failed] == -9


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["asked", "notice"])
def test_a_machine_leaves_as_planned(how: str, site: Site, tmp_path: Path) -> None:
    """The spare one takes its ranks at the next step boundary; its launcher ends. That of the store stays."""
    (tmp_path / "swift.json").write_text(json.dumps({"notice": "SIGUSR1"}))
    cluster = site.start(site.machines, LONG, options=[f"--swift-config={tmp_path / 'swift.json'}"])
    cluster.until(lambda: cluster.boundaries(2) >= 20)
    leaves = 3 - site.spare(cluster)
    if how == "asked":
        job_dir = Path(cluster.workers(0)[0]["job_dir"])
        with pytest.raises(SwiftError, match="hosts the job's store"):
            ask(job_dir, site.machines[0].address)
        ask(job_dir, site.machines[leaves].address)
    else:
        os.kill(cluster.pids[leaves], signal.SIGUSR1)
    result, statuses = site.check(cluster, LONG)
    assert statuses == [0, 0, 0] and "this machine has left the job" in cluster.said(leaves), result.tail()
    assert {event.rank for event in result.kinds("drained")} == {2, 3} and not result.kinds("failed"), result.tail()
    assert "no worker failed" in cluster.said(0)


@pytest.mark.nightly
def test_a_replacement_on_another_machine_that_cuts_off_a_log_says_so(site: Site, tmp_path: Path) -> None:
    """The machines share the folder of the log, and that of the events, which say since when the job has trained."""
    env = {"TMPDIR": str(tmp_path)}
    cluster = site.start(site.machines, ["--epochs", "250", "--log", "w"], "loop.py", env=env)

    def has_trained() -> bool:
        began = [event.time for event in cluster.result(0, []).kinds("began")]
        log = cluster.out / "log2.txt"
        return bool(began) and log.exists() and log.stat().st_mtime > began[0] + 1.5

    cluster.until(has_trained)
    site.machines[3 - site.spare(cluster)].kill()
    result, _ = cluster.finish(timeout_s=80.0)
    assert result.status == 0, result.tail()
    said = re.findall(r"^\[swift\] rank (\d): the script opens .* and cuts it off", result.stderr, re.M)
    replacements = [event.rank for event in result.kinds("replacement_start") if event.fields["how"] != "prepared"]
    assert sorted(map(int, said)) == sorted(replacements) and {2, 3} <= set(replacements), result.tail()


@pytest.mark.nightly
def test_with_c10d_the_failure_of_the_store_s_machine_ends_the_job(site: Site, tmp_path: Path) -> None:
    """Started again, it continues from its checkpoint."""
    (tmp_path / "swift.json").write_text(
        json.dumps({"checkpoint.every_steps": 10, "checkpoint.dir": str(tmp_path), "checkpoint.background": False})
    )
    options = [f"--swift-config={tmp_path / 'swift.json'}"]
    cluster = site.start(site.machines[:2], LONG, options=options, name="again")
    cluster.until(lambda: cluster.boundaries(2) >= 20)
    for pid in site.machines[0].processes():
        os.kill(pid, signal.SIGKILL)
    result, statuses = cluster.finish()
    assert statuses == [-9, 1]
    assert "the machine that hosted the rendezvous failed, which with c10d ends the job" in cluster.said(1)
    assert not result.reports
    again = site.start(site.machines[1:], LONG, options=[*options, "--resume"], name="again")
    result, statuses = site.check(again, LONG)
    assert statuses == [0, 0] and "continues from the checkpoint at step boundary" in result.stderr


@pytest.mark.nightly
def test_without_a_spare_machine_the_job_waits_for_one_that_comes_back(site: Site) -> None:
    cluster = site.start(site.machines[:2], LONG)
    cluster.until(lambda: cluster.boundaries(2) >= 10)
    site.machines[1].cut()
    cluster.until(lambda: "failed, and no spare one is there" in cluster.said(0))
    site.machines[1].heal()
    result, statuses = site.check(cluster, LONG)
    assert statuses == [0, 0]
    assert max(one["incarnation"] for one in cluster.workers(2)) == 2  # one failure, one taking over


@pytest.mark.nightly
def test_a_frozen_agent_loses_its_place(site: Site) -> None:
    """It cannot fence its workers, which run on; they see that others have their ranks, and go."""
    cluster = site.start(site.machines, LONG)
    cluster.until(lambda: cluster.boundaries(2) >= 10)
    spare = site.spare(cluster)
    frozen, workers = 3 - spare, cluster.workers(2, 3)
    os.kill(cluster.pids[frozen], signal.SIGSTOP)
    cluster.until(lambda: "takes over ranks 2 and 3" in cluster.said(spare))
    cluster.until(lambda: not any(map(alive, workers)))
    os.kill(cluster.pids[frozen], signal.SIGCONT)
    result, statuses = site.check(cluster, LONG)
    assert statuses == [0, 0, 0], result.tail()


def _kept_by(cluster: Cluster, rank: int) -> int:
    """The newest step of which the machine of a rank has another machine's copy; 0 for none."""
    folders = [Path(one["job_dir"]) for one in cluster.workers(rank)]
    return (Spool(folders[-1] / FOLDER / "kept").newest_complete() or 0) if folders else 0


@pytest.mark.nightly
def test_all_start_again_from_a_failed_machine_s_copy(site: Site, tmp_path: Path) -> None:
    """Storage fails while they train. The spare machine gets its ranks' parts from the neighbor that kept them."""
    storage = tmp_path / "storage"
    each = {"checkpoint.every_steps": 20, "checkpoint.dir": str(storage)}
    (tmp_path / "swift.json").write_text(json.dumps(each))
    options = [f"--swift-config={tmp_path / 'swift.json'}", "--on-failure=restart"]
    cluster = site.start(site.machines, LONG, options=options)
    cluster.until(lambda: cluster.boundaries(0) >= 1)
    if storage.exists():
        storage.rename(tmp_path / "away")
    storage.touch()  # a file: nothing can be written below it
    cluster.until(lambda: _kept_by(cluster, 0) >= 40 and _kept_by(cluster, 2) >= 40)
    failed = 3 - site.spare(cluster)
    site.machines[failed].kill()
    cluster.until(lambda: "continues from the checkpoint" in cluster.said(0))
    assert storage.is_file()
    storage.unlink()  # whatever is left to be written at the end is
    result, statuses = site.check(cluster, LONG)
    assert statuses[failed] == -9 and len(result.kinds("restart")) == 1
    [boundary] = set(re.findall(r"continues from the checkpoint at step boundary (\d+) \(neighbour\)", result.stderr))
    assert int(boundary) >= 40


@pytest.mark.nightly
def test_two_machines_at_once(jobs: Jobs) -> None:
    """None keeps the other's copies, so both places are taken over in place."""
    with machines(6) as six, contextlib.closing(Site(jobs, six)) as site:
        cluster = site.start(six, LONG, nnodes=4, nproc=1)
        cluster.until(lambda: cluster.boundaries(3) >= 10)
        failed = [cluster.place_of(rank) for rank in (1, 3)]
        for place in failed:
            six[place].cut()
        for place in failed:
            six[place].kill()
        result, statuses = site.check(cluster, LONG)
        assert [statuses[place] for place in failed] == [-9, -9]
        assert not result.kinds("restart"), result.tail()


@pytest.mark.nightly
@needs_etcd
def test_checkpoints_come_from_one_side_only(jobs: Jobs, tmp_path: Path) -> None:
    """The machine of rank 0 is cut off. The others continue from its last checkpoint, and none is written twice."""
    kept = tmp_path / "kept"
    each = {"checkpoint.every_steps": 5, "checkpoint.dir": str(kept), "checkpoint.background": False}
    (tmp_path / "swift.json").write_text(json.dumps(each))
    options = [f"--swift-config={tmp_path / 'swift.json'}"]
    with machines(4) as four, Etcd(tmp_path, on=four[3:]) as one, contextlib.closing(Site(jobs, four)) as site:
        cluster = site.start(four[:3], LONG, endpoint=one.endpoints, backend="etcd", options=options)
        cluster.until(lambda: cluster.boundaries(0) >= 20 and cluster.boundaries(2) >= 20)
        cut, workers = cluster.place_of(0), cluster.workers(0, 1)
        four[cut].cut()
        cluster.until(lambda: len(cluster.workers(0)) == 2)  # the others have started over
        assert not any(map(alive, workers))
        four[cut].heal()
        cluster.until(lambda: "waits as a spare" in cluster.said(cut))
        result, statuses = site.check(cluster, LONG)
        assert statuses == [0, 0, 0], result.tail()
        written = [event.fields["boundary"] for event in result.kinds("checkpoint")]
        assert len(written) > 20 and written == sorted(set(written)), written


@pytest.mark.nightly
@needs_etcd
@pytest.mark.parametrize("which", ["store", "other", "store_cut_off", "etcd"])
def test_with_etcd_the_failure_of_any_machine_is_survived(which: str, jobs: Jobs, tmp_path: Path) -> None:
    with machines(4) as four, Etcd(tmp_path, on=four[3:]) as one, contextlib.closing(Site(jobs, four)) as site:
        cluster = site.start(four[:3], LONG, endpoint=one.endpoints, backend="etcd")
        cluster.until(lambda: cluster.boundaries(0) >= 20 and cluster.boundaries(2) >= 20)
        failed = cluster.place_of(2 if which == "other" else 0)
        if which == "store_cut_off":
            workers = cluster.workers(0, 1)
            four[failed].cut()
            cluster.until(lambda: len(cluster.workers(0)) == 2)  # the others have started over
            assert not any(map(alive, workers))
            four[failed].heal()
            cluster.until(lambda: "waits as a spare" in cluster.said(failed))
        elif which == "etcd":
            one.members[0].kill()
            cluster.until(lambda: "its lease in etcd could not be renewed" in cluster.said(failed))
            one.restart()
        else:
            four[failed].kill()
        result, statuses = site.check(cluster, LONG)
        assert sorted(statuses) == ([-9, 0, 0] if which in ("store", "other") else [0, 0, 0])
        restarts = [event.fields["restart"] for event in result.kinds("start")]
        assert max(restarts) == (0 if which == "other" else 1), result.tail()


@pytest.mark.nightly
@needs_etcd
def test_the_failure_of_etcd_s_machine_is_survived(jobs: Jobs, tmp_path: Path) -> None:
    """Of any of its three members, one after the other; and then of a machine."""
    with machines(6) as six, Etcd(tmp_path, on=six[3:]) as three, contextlib.closing(Site(jobs, six)) as site:
        cluster = site.start(six[:3], LONG, endpoint=three.endpoints, backend="etcd")
        for place in range(3):
            cluster.until(lambda place=place: cluster.boundaries(2) >= 20 * place + 10)  # type: ignore[misc]
            six[3 + place].kill()
            cluster.until(lambda place=place: cluster.boundaries(2) >= 20 * place + 20)  # type: ignore[misc]
            six[3 + place].heal()
            three.restart(place)
        failed = cluster.place_of(2)
        six[3].kill()
        six[failed].kill()
        result, statuses = site.check(cluster, LONG)
        assert sorted(statuses) == [-9, 0, 0] and not result.kinds("restart"), result.tail()


@pytest.mark.nightly
def test_a_machine_that_was_cut_off_stops_and_comes_back(site: Site) -> None:
    """Only the side with the store continues; the other comes back and takes the next failed machine's place."""
    cluster = site.start(site.machines, LONG, options=["--lease=3"])
    cluster.until(lambda: cluster.boundaries(2) >= 20)
    spare = site.spare(cluster)
    cut = 3 - spare
    site.machines[cut].cut()
    workers = cluster.workers(2, 3)
    assert len(workers) == 2
    cluster.until(lambda: not any(map(alive, workers)))
    # Fenced before anybody takes it for failed: no other machine has its place yet.
    assert "takes over" not in cluster.said(spare)
    cluster.until(lambda: "the workers of this machine are stopped" in cluster.said(cut))
    cluster.until(lambda: "takes over ranks 2 and 3" in cluster.said(spare))
    site.machines[spare].kill()
    cluster.until(lambda: len(re.findall(r" failed(,| and) ", cluster.said(0))) == 2)
    site.machines[cut].heal()
    result, statuses = site.check(cluster, LONG)
    assert statuses[spare] == -9 and statuses[0] == statuses[cut] == 0
    assert "takes over ranks 2 and 3" in cluster.said(cut) and not result.kinds("restart"), result.tail()


def check_exact(cluster: Cluster, worlds: set[int]) -> JobResult:
    """All ranks have the same state at the end, which has seen each sample once an epoch."""
    result, _ = cluster.finish()
    check_clean(result)
    extra = result.reports[0]["extra"] if result.reports else {"exact": [], "worlds": []}
    assert len({report["digests"]["all"] for report in result.reports.values()}) == 1, result.tail()
    assert extra["exact"] and all(extra["exact"]), (extra, result.tail())
    assert worlds <= set(extra["worlds"]), (extra, result.tail())
    return result


@pytest.mark.nightly
def test_fewer_machines_continue_and_more_are_admitted(site: Site) -> None:
    """One is cut off: the other continues alone, until the first is there again."""
    cluster = site.start(site.machines[:2], ["--epochs", "8", "--until", "4"], "resize.py", nnodes="1:2")
    cluster.until(lambda: cluster.boundaries(2) >= 5)
    site.machines[1].cut()
    cluster.until(lambda: "2 workers continue after" in cluster.said(0))
    site.machines[1].heal()
    result = check_exact(cluster, {4})
    assert [event.fields["workers"] for event in result.kinds("resize")] == [2, 4]


FEWER: dict[str, tuple[str, list[int], set[int]]] = {
    # machines, those that fail, numbers of workers
    "one_of_three": ("2:3", [2], {4}),
    # the memory that held the failed ranks' publications is lost as well: all start again
    "two_at_once": ("1:3", [1, 2], {2}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FEWER)
def test_fewer_machines_continue(name: str, site: Site) -> None:
    nnodes, failed, worlds = FEWER[name]
    cluster = site.start(site.machines, ["--epochs", "4"], "resize.py", nnodes=nnodes)
    cluster.until(lambda: cluster.boundaries(0) >= 5)
    for place in failed:
        site.machines[place].kill()
    check_exact(cluster, worlds)
