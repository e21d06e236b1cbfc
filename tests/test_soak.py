"""The soak test: small in every run of the tests, whole at night; and the checks it relies on find what they should."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import Fault
from shared_core.faults.spec import KINDS, SLOW
from tests.support import draws, soak
from tests.support.namespaces import unavailable
from tests.support.runner import Mismatch, check_clean, check_survivors, compare, unconfirmed


def test_a_run_is_a_function_of_its_seed_and_number() -> None:
    plans = [draws.plan(3, number, draws.MODELS, 4, None, KINDS) for number in range(60)]
    assert plans == [draws.plan(3, number, draws.MODELS, 4, None, KINDS) for number in range(60)]
    failing = [[fault for fault in plan.faults if fault.kind != SLOW] for plan in plans]
    assert {len(faults) for faults in failing} == {1, 2, 3} and sum(map(len, failing)) < sum(p.strikes for p in plans)
    assert any(plan.drained for plan in plans)
    points = {fault.point for plan in plans for fault in plan.faults}
    assert {"update.during", "update.after", "validation", "bucket", "forward", "join"} <= points
    assert any(fault.rank == 0 for plan in plans for fault in plan.faults)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_some_random_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "soak.json"
    status = soak.main(["--faults", "2", "--seed", "1", "--world", "3", "--json", str(report)])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "seed 1" in out
    summary = json.loads(report.read_text())
    assert summary["struck"] >= 2 and not summary["failed"]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["strategy", "callback"])
def test_many_random_faults(how: str) -> None:
    assert soak.main(["--faults", "60", "--how", how]) == 0


def test_failures_of_rerouted_pipelines_leave_each_stage_a_replica() -> None:
    """What fails: both ends of a pipeline, two workers of a stage, a machine; when: in a step, in a copy, while
    replacements are admitted, while workers move.
    """
    kinds = Counter[str]()
    for model, world in draws.REROUTED.items():
        pipelines = world // draws.PIPELINES[model]
        for number in range(200):
            run = draws.plan(3, number, [model], 4, None, KINDS)
            ranks = {fault.rank for fault in run.faults} | set(run.cut.ranks if run.cut else ())
            stages = [[rank for rank in ranks if rank // pipelines == stage] for stage in range(2)]
            assert all(len(stage) < pipelines for stage in stages), ranks
            kinds["both ends"] += any({d, d + pipelines} <= ranks for d in range(pipelines))
            kinds["one stage"] += any(len(stage) > 1 for stage in stages)
            kinds["machine"] += run.cut is not None
            for fault in run.faults:
                kinds[fault.point] += 1
    assert all(kinds[each] > 150 for each in ("both ends", "one stage", "machine")), kinds
    assert kinds["copy.take"] > 20 and kinds["copy.give"] > 5 and kinds["reroute.move"] > 30, kinds
    assert all(
        kinds[each] > 3 for each in ("survivor_group.admit", "survivor_group.join_request", "recovery.installed")
    ), kinds


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", draws.REROUTED)
def test_many_random_faults_of_rerouted_pipelines(model: str) -> None:
    pytest.importorskip("deepspeed")
    if model in draws.ON_MACHINES and (why := unavailable()):
        pytest.skip(why)
    assert soak.main(["--faults", "20", "--model", model]) == 0


def test_a_difference_is_found_and_named(jobs: Jobs) -> None:
    short = jobs.reference("plain_ddp.py", args=["--norm", "--steps", "3"])
    long = jobs.reference("plain_ddp.py", args=["--norm", "--steps", "4"])
    compare(short, short)
    with pytest.raises(Mismatch, match=r"rank 1: buffers is \w{16}, expected \w{16}"):
        compare(long, short)
    missing = copy.copy(short)
    missing.reports = {0: short.reports[0]}
    with pytest.raises(Mismatch, match=r"ranks \[0\] reported, expected \[0, 1\]"):
        compare(missing, short)


def test_a_batch_run_twice_and_a_new_process_are_found(jobs: Jobs) -> None:
    reference = jobs.reference("plain_ddp.py", args=["--norm", "--steps", "3"])
    check_survivors(reference)
    check_survivors(reference, reference)
    twice = copy.deepcopy(reference)
    twice.reports[1]["counts"]["batch 2"] = 2
    with pytest.raises(Mismatch, match="rank 1 survived but ran batch 2 2 times instead of 1"):
        check_survivors(twice, reference)
    replaced = copy.deepcopy(reference)
    replaced.workers.append(replaced.workers[0] | {"pid": 1})
    with pytest.raises(Mismatch, match=r"rank \d survived but 2 processes ran it"):
        check_survivors(replaced, reference)
    other = copy.deepcopy(reference)
    other.reports[0]["start"] += 1
    with pytest.raises(Mismatch, match="rank 0 survived but its process changed"):
        check_survivors(other, reference)


def test_a_fault_that_did_not_strike_does_not_count(jobs: Jobs) -> None:
    result = copy.copy(jobs.reference("plain_ddp.py", args=["--norm", "--steps", "3"]))
    fault = Fault(1, 2, "bucket", "SIGKILL")
    result.faults = [fault]
    assert unconfirmed(result) == [f"{fault}: did not strike"]
    result.struck = [{"index": 0, "fault": fault.to_dict(), "pid": 1, "time": 0.0, "boundaries": 2}]
    assert unconfirmed(result) == [f"{fault}: struck, but the failure was reported as nothing"]


def test_what_a_job_leaves_is_found(jobs: Jobs, tmp_path: Path) -> None:
    result = copy.deepcopy(jobs.reference("plain_ddp.py", args=["--norm", "--steps", "3"]))
    result.workers[0]["job_dir"] = str(tmp_path)
    with pytest.raises(Mismatch, match=f"left behind:\n  folder {tmp_path}"):
        check_clean(result)
    result.workers[0]["job_dir"], result.status = None, 124
    with pytest.raises(Mismatch, match="hung and was killed"):
        check_clean(result)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_bits_that_flip() -> None:
    assert soak.main(["--faults", "100", "--model", draws.CORRUPTED]) == 0
