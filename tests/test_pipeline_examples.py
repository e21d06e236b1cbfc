"""The GPT-2 pipelines of the examples lose stages, with replicas and without, and end with the same parameters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import Fault
from tests.support.runner import ROOT, JobResult, unconfirmed

POINTS = "load forward backward send_activation recv_activation send_grad recv_grad reduce step".split()


def fingerprints(result: JobResult) -> list[str]:
    assert result.status == 0, result.tail()
    found = sorted(re.findall(r"rank \d: [0-9a-f]{16}", result.stdout))  # lines of several ranks may run together
    assert len(found) == 4, result.tail()
    return found


def check(jobs: Jobs, framework: str, stages: int, faults: list[Fault], tmp_path: Path) -> None:
    script = str(ROOT / "examples" / f"{framework}_gpt2_pipeline.py")
    args = ["--steps", "8" if framework == "lightning" else "4", "--stages", str(stages), "--blocks", "2"]
    reference = jobs.reference(script, nproc=4, args=args, timeout_s=100)
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "3"}
    result = jobs.run(script, nproc=4, args=args, faults=faults, env=env, timeout_s=100)
    assert not unconfirmed(result), result.tail()
    assert fingerprints(result) == fingerprints(reference)
    assert {event.fields["resolution"] for event in result.events if event.kind == "recovered"} == (
        {"replay"} if stages == 4 else {"replica"}
    )


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [2, 4])
def test_under_accelerate(stages: int, jobs: Jobs, tmp_path: Path) -> None:
    faults = [Fault(3, 2, "pipe.backward", "SIGKILL", nth=2), Fault(0, 6, "pipe.reduce", "SIGKILL")]
    check(jobs, "accelerate", stages, faults, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [4, pytest.param(2, marks=pytest.mark.nightly)])
def test_under_lightning(stages: int, jobs: Jobs, tmp_path: Path) -> None:
    faults = [Fault(1, 2, "pipe.forward", "SIGKILL", nth=3), Fault(3, 7, "update.during", "SIGKILL", nth=3)]
    check(jobs, "lightning", stages, faults, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_re_routed(framework: str, jobs: Jobs) -> None:
    """Tied embeddings, dropout: the peers compute for a failed stage, and all end with the parameters of the same run
    without a failure.
    """
    script = str(ROOT / "examples" / f"{framework}_gpt2_pipeline.py")
    args = ["--steps", "8" if framework == "lightning" else "4", "--stages", "2", "--blocks", "2"]
    env = {"SWIFT_RECOVERY_ON_FAILURE": "reroute", "SWIFT_RECOVERY_REROUTE_REDUCTION": "ordered"}
    reference = jobs.reference(script, nproc=4, args=args, env=env, launcher="swiftrun", timeout_s=100)
    faults = [Fault(3, 2, "reroute.action", "SIGKILL", nth=3), Fault(0, 4, "reroute.action", "SIGKILL", nth=3)]
    result = jobs.run(script, nproc=4, args=args, faults=faults, env=env, timeout_s=100)
    assert not unconfirmed(result) and result.kinds("rerouted") and not result.kinds("restart"), result.tail()
    assert fingerprints(result) == fingerprints(reference)
