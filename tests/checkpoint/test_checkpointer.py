"""A script in plain PyTorch, killed and told to end: the next start continues, and ends with the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shared_core
from shared_core.checkpoint import lineage
from shared_core.checkpoint.command import Command
from shared_core.errors import ConfigError, Unsupported

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "checkpointed.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


#: Of each rank where it began and how it ended.
Ends = dict[int, tuple[int, str]]


def told(folder: Path, policy: str, *launcher: str, **env: str) -> tuple[int, Ends, list[str]]:
    """Exit status, where ranks began and how they ended, and the lines of ours."""
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), str(folder), policy],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    found = re.findall(r"^rank (\d) began (\d+) (digest \w+ loss \S+)$", done.stdout, re.MULTILINE)
    assert found or done.returncode, done.stderr
    lines = [line.removeprefix("[swift] ") for line in done.stderr.splitlines() if line.startswith("[swift]")]
    return done.returncode, {int(rank): (int(began), end) for rank, began, end in found}, lines


def run(folder: Path, policy: str, *launcher: str, **env: str) -> tuple[int, Ends]:
    """The same without what was said."""
    return told(folder, policy, *launcher, **env)[:2]


def following(folder: Path, policy: str) -> str:
    """What the next start does, as it is said beforehand."""
    found = lineage.contents(folder)
    return str(lineage.next_start(found, Command.of(str(SCRIPT), [str(folder), policy])))


def continued(said: list[str]) -> int:
    """The step boundary from which a start says that it continues; 0 for none."""
    found = [re.search(r"continuing from the checkpoint at step boundary (\d+) ", line) for line in said]
    return next((int(match[1]) for match in found if match), 0)


def ends(found: Ends) -> dict[int, str]:
    return {rank: end for rank, (_, end) in found.items()}


def check(folder: Path, *launcher: str) -> None:
    status, plain = run(folder, "none", *launcher)
    assert status == 0 and not folder.exists()
    status, _ = run(folder, "young", *launcher, DIE="30")
    assert status != 0
    status, _, said = told(folder, "young", *launcher, END="40")
    assert status == (1 if launcher else 128 + signal.SIGTERM)
    verdicts = [line for line in said if "checkpoint" in line and "continuing from" not in line]
    assert len(verdicts) == 1 and verdicts[0].endswith(f"nothing is lost; {following(folder, 'young')}"), said
    status, resumed, said = told(folder, "young", *launcher)
    assert status == 0 and ends(resumed) == ends(plain)
    assert all(40 < began < 45 for began, _ in resumed.values()), "nothing was lost"
    assert verdicts[0].endswith(f" continues from step {continued(said)}")


@pytest.mark.nightly
def test_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    check(folder)
    # The run has ended: the next start starts from scratch, and so does another command; neither touches what is there.
    step = max(each.step for each in lineage.contents(folder).saved)
    assert "starts from scratch: its last run has ended" in following(folder, "young")
    status, other, said = told(folder, "fixed")
    assert status == 0 and other[0][0] == 0
    words = f"checkpointed.py {folder} young"
    left = f"{folder} holds step {step} of another command ({words})"
    assert said[0] == f"{left}; this run starts from scratch; resume_from adopts it"


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["fixed", "value", "coci"])
def test_killed_under_each_policy(policy: str, tmp_path: Path) -> None:
    _, plain = run(tmp_path / "checkpoints", "none")
    run(tmp_path / "checkpoints", policy, DIE="30")
    status, resumed = run(tmp_path / "checkpoints", policy)
    assert status == 0 and ends(resumed) == ends(plain) and resumed[0][0] > 0


@pytest.mark.nightly
def test_pending_gradients_belong_to_no_checkpoint(tmp_path: Path) -> None:
    """Every fourth batch one is due, every sixth is followed by an update."""
    _, plain = run(tmp_path / "checkpoints", "none", ACCUMULATE="6")
    run(tmp_path / "checkpoints", "fixed", DIE="30", ACCUMULATE="6")
    status, resumed = run(tmp_path / "checkpoints", "fixed", ACCUMULATE="6")
    assert status == 0 and ends(resumed) == ends(plain) and resumed[0][0] > 0


@pytest.mark.nightly
def test_averages_and_changes_by_hand_under_torchrun(tmp_path: Path) -> None:
    _, plain = run(tmp_path / "checkpoints", "none", *TORCHRUN, OUTSIDE="1")
    run(tmp_path / "checkpoints", "fixed", *TORCHRUN, DIE="30", OUTSIDE="1")
    status, resumed = run(tmp_path / "checkpoints", "fixed", *TORCHRUN, OUTSIDE="1")
    assert status == 0 and ends(resumed) == ends(plain) and resumed[0][0] > 0


@pytest.mark.nightly
def test_data_parallel_under_torchrun(tmp_path: Path) -> None:
    check(tmp_path / "checkpoints", *TORCHRUN)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_on_a_gpu_under_torchrun_over_nccl(tmp_path: Path) -> None:
    env = {"SWIFT_TEST_DEVICE": "cuda", "SWIFT_TEST_BACKEND": "nccl"}
    _, plain = run(tmp_path / "checkpoints", "none", *TORCHRUN, **env)
    status, _ = run(tmp_path / "checkpoints", "fixed", *TORCHRUN, DIE="30", **env)
    assert status != 0
    status, resumed = run(tmp_path / "checkpoints", "fixed", *TORCHRUN, **env)
    assert status == 0 and ends(resumed) == ends(plain) and resumed[0][0] > 0


@pytest.mark.nightly
def test_it_is_enough_that_one_rank_is_told_to_end(tmp_path: Path) -> None:
    status, _ = run(tmp_path / "checkpoints", "young", *TORCHRUN, END="40", END_RANK="1")
    assert status == 1
    status, resumed = run(tmp_path / "checkpoints", "young", *TORCHRUN)
    assert status == 0 and len(resumed) == 2
    assert all(40 < began < 45 for began, _ in resumed.values()), "nothing was lost"


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint.keep"):
        shared_core.Checkpointer(tmp_path, keep=1)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"torch\.optim\.Optimizer"):
        shared_core.Checkpointer(tmp_path, model)
    checkpointer = shared_core.Checkpointer(tmp_path, model, torch.optim.SGD(model.parameters(), 0.1))
    try:
        with pytest.raises(Unsupported, match="swiftrun"):
            checkpointer.shared_steps()
    finally:
        checkpointer.close()
