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
from harness import until

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
@pytest.mark.timeout(300)
def test_each_command_continues_with_its_own_or_adopts(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    _, plain = run(folder, "none")
    run(folder, "young", DIE="30")
    run(folder, "fixed", DIE="50")
    first, newest = following(folder, "young"), following(folder, "fixed")
    _, adopted, said = told(folder, "daly", ADOPT=str(folder))  # the newest, which is of "fixed"
    assert ends(adopted) == ends(plain) and said[0].endswith("checkpoints fixed'"), said
    assert newest.endswith(f"from step {continued(said)}") and following(folder, "young") == first
    for policy in ("young", "fixed"):
        expected = following(folder, policy)
        status, resumed, said = told(folder, policy)
        assert status == 0 and ends(resumed) == ends(plain) and expected.endswith(f"from step {continued(said)}")
        assert "starts from scratch: its last run has ended" in following(folder, policy)
    status, again, said = told(folder, "young")
    assert (
        status == 0 and again[0][0] == 0 and "of this command, which has ended; this run starts from scratch" in said[0]
    )


@pytest.mark.nightly
def test_two_commands_train_at_the_same_time(tmp_path: Path) -> None:
    """The first stands still until the other has ended, with checkpoints of the same step boundaries."""
    folder = tmp_path / "checkpoints"
    _, plain = run(folder, "none")
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(folder), "young"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as first:
        until(lambda: any(folder.glob("*/step-*/manifest.json")) or first.poll(), "a checkpoint")
        first.send_signal(signal.SIGSTOP)
        status, other, said = told(folder, "fixed")
        first.send_signal(signal.SIGCONT)
        out, _ = first.communicate()
    assert status == first.returncode == 0 and ends(other) == ends(plain) and plain[0][1] in out
    assert "of another command" in said[0]
    found = lineage.contents(folder)
    assert [len({each.run for each in found.saved if each.command == one}) for one in found.commands()] == [1, 1]


@pytest.mark.nightly
def test_told_to_end_while_storage_is_slow(tmp_path: Path) -> None:
    status, _, said = told(tmp_path, "fixed", END="40", SLOW="1")
    assert status == 128 + signal.SIGTERM
    verdicts = [line for line in said if "last checkpoint" in line]
    assert verdicts == said[-1:] and "was not written in time" in said[-1], said
    assert said[-1].endswith(f"; {following(tmp_path, 'fixed')}")
    status, _, again = told(tmp_path, "fixed")
    assert status == 0 and said[-1].endswith(f" continues from step {continued(again)}")


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


def test_averages_and_changes_by_hand(tmp_path: Path) -> None:
    _, plain = run(tmp_path / "checkpoints", "none", OUTSIDE="1")
    run(tmp_path / "checkpoints", "fixed", DIE="30", OUTSIDE="1")
    status, resumed = run(tmp_path / "checkpoints", "fixed", OUTSIDE="1")
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
