"""Plain PyTorch loops on ``shared_core.attach`` lose workers and end with the bits of the run in
which nobody failed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from harness import Jobs, few

import shared_core
from shared_core.errors import Unsupported
from shared_core.faults import ANY_STEP, Fault
from shared_core.loop import UNMARKED as WARNINGS
from tests.support.report import AWAIT
from tests.support.runner import JobResult, compare

UNMARKED = WARNINGS["job"]
#: Arguments of the script, faults. On two ranks an epoch has six batches and seven boundaries, the last one for its
#: end.
CASES: dict[str, tuple[list[str], list[Fault]]] = {
    "last_batch_of_a_pass_without_collectives_after_it": (["--alone"], [Fault(1, 13, "update.after", "SIGKILL")]),
    "evaluation": ([], [Fault(1, 14, "collective.before", "SIGKILL")]),
    "startup": ([], [Fault(1, 0, "startup", "SIGKILL")]),
    "others_have_made_the_update": ([], [Fault(1, 10, "update.before", "SIGKILL")]),
    "replacement": ([], [Fault(0, 9, "bucket", "os._exit"), Fault(0, ANY_STEP, "join", "SIGKILL", incarnation=1)]),
    "accumulate": (["--accumulate", "4"], [Fault(1, 6, "forward", "SIGKILL"), Fault(0, 15, "bucket", "SIGKILL")]),
    "workers": (["--workers", "1"], [Fault(1, 10, "bucket", "SIGKILL")]),
    "left_early": (["--break-at", "4"], [Fault(0, 6, "update.after", "SIGKILL")]),
    "second_loader": (["--second"], [Fault(0, 31, "update.before", "SIGKILL")]),
}


@pytest.mark.parametrize("name", few(CASES, "startup"))
def test_a_failure_changes_no_bit(name: str, jobs: Jobs) -> None:
    args, faults = CASES[name]
    jobs.check("loop.py", faults=faults, args=args)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_nothing_grows_with_each_replacement(jobs: Jobs, tmp_path: Path) -> None:
    steps = [step for step in range(3, 71, 2) if step % 7 not in (0, 1)][:25]
    faults = [Fault(1, step, "bucket", "SIGKILL", incarnation=number) for number, step in enumerate(steps)]
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "1000"}
    args = ["--epochs", "11"]
    result = jobs.run("growth.py", faults=faults, env=env, args=args, timeout_s=300.0)
    compare(result, jobs.reference("loop.py", args=args))
    assert len(result.struck) == len(faults) == 25, result.tail()
    notes = [json.loads(line) for line in (result.out / "notes.jsonl").read_text().splitlines()]
    early, late = notes[2:10], notes[-8:]
    for key in notes[0]:
        most, least = max(note[key] for note in early), min(note[key] for note in late)
        assert least <= 1.1 * most, (key, [note[key] for note in notes])


@pytest.mark.nightly
def test_epochs_that_the_script_counts_survive_failures_in_the_first(jobs: Jobs) -> None:
    jobs.check("loop.py", faults=[Fault(1, 4, "bucket", "SIGKILL")], args=["--no-epochs"])


@pytest.mark.nightly
def test_later_failures_then_go_back_to_the_checkpoint_and_say_why(jobs: Jobs, tmp_path: Path) -> None:
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path / "kept"), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "4"}
    result = jobs.run("loop.py", faults=[Fault(1, 10, "bucket", "SIGKILL")], args=["--no-epochs"], env=env)
    [restart] = result.kinds("restart")
    assert restart.fields["reason"].endswith("write 'for epoch in job.epochs(n)'"), result.tail()
    told = [
        each for each in result.kinds("warning") if each.fields["message"].startswith("a second pass over the data")
    ]
    assert told and told[0].time < result.kinds("failed")[0].time, "it was said when the second pass began"


def test_a_script_need_not_call_install(jobs: Jobs) -> None:
    """Groups are ready before it begins."""
    jobs.check("loop.py", faults=[Fault(1, 10, "bucket", "SIGKILL")], args=["--no-install"])


@pytest.mark.nightly
def test_batches_that_nothing_marks_are_computed_again_and_the_user_is_told_once(jobs: Jobs) -> None:
    faults = [Fault(1, ANY_STEP, "update.after", "SIGKILL", nth=9)]
    result = jobs.check("loop.py", faults=faults, args=["--unmarked"])
    assert result.stderr.count(UNMARKED) == 1, result.tail()
    [warning] = [each for each in result.kinds("warning") if each.fields["message"] == UNMARKED]
    assert warning.rank == 0
    [ready] = result.kinds("replacement_ready")
    assert ready.fields["boundary"] == 0
    [back] = re.findall(r"rank 1 is back after ([\d.]+) s", result.stderr)
    stalls = [each.fields["stall_s"] for each in result.kinds("resumed") if each.rank == 0]
    assert float(back) > 0.5 * stalls[0], f"the stall of {stalls[0]:.2f} s was said to be over after {back} s"


def test_marked_batches_need_no_warning(jobs: Jobs) -> None:
    assert UNMARKED not in jobs.run("loop.py", args=["--accumulate", "4", "--second"]).stderr


def test_an_evaluation_in_steps_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(2, 1)
    loop = shared_core.Checkpointer(tmp_path, model, torch.optim.SGD(model.parameters()))
    for epoch in loop.epochs(2):
        with torch.no_grad():
            assert [index for index, _ in loop.steps([3, 4])] == [0, 1], epoch
    assert capsys.readouterr().err.count("job.steps(loader) is used with gradients off") == 1
    with torch.inference_mode(), pytest.raises(Unsupported, match=r"without job\.steps"):
        next(loop.steps([3]))
    loop.close()


@pytest.mark.parametrize("mode", ["w", pytest.param("a", marks=pytest.mark.nightly)])
def test_a_replacement_that_cuts_off_a_log_says_so(mode: str, jobs: Jobs, tmp_path: Path) -> None:
    """Not of a file that all workers write before the loop, with the same content."""
    env = {"TMPDIR": str(tmp_path)}
    result = jobs.check("loop.py", faults=[Fault(1, 10, "bucket", "SIGKILL")], args=["--log", mode], env=env)
    said = [line for line in result.stderr.splitlines() if "cuts it off" in line]
    assert len(said) == (mode == "w"), result.tail()
    assert len(_warned_of_logs(result)) == len(said)
    for line in said:
        assert line.startswith("[swift] rank 1: ") and "log1.txt" in line and 'open the file with "a"' in line


@pytest.mark.nightly
@pytest.mark.parametrize("checkpoints", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_workers_that_start_again_and_cut_off_a_log_say_so(checkpoints: bool, jobs: Jobs, tmp_path: Path) -> None:
    """Where they continue from a checkpoint: else they write all of it again."""
    env = {"TMPDIR": str(tmp_path), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "4"}
    options = ["--on-failure=restart", "--checkpoint-dir=kept"] if checkpoints else []
    faults = [Fault(rank, 10, "bucket", "SIGKILL") for rank in ((1,) if checkpoints else (0, 1))]
    result = jobs.run("loop.py", faults=faults, args=["--log", "w"], launcher_args=options, env=env)
    assert result.status == 0 and len(result.kinds("restart")) == 1, result.tail()
    said = [line for line in result.stderr.splitlines() if "cuts it off" in line]
    assert len(said) == checkpoints, result.tail()
    assert _warned_of_logs(result) == [0, 1] * checkpoints, result.tail()
    assert all("Each worker runs the script from its start again" in line for line in said)


def _warned_of_logs(result: JobResult) -> list[int]:
    """The ranks; a busy machine may give reasons to warn of other things."""
    return sorted(event.rank for event in result.kinds("warning") if "cuts it off" in event.fields["message"])


@pytest.mark.nightly
def test_a_standby_that_cuts_off_a_log_says_so_at_once(jobs: Jobs, tmp_path: Path) -> None:
    """Nobody fails, so that what it writes itself is never shown."""
    awaited = json.dumps({8: (1, 0)})
    env = {"SWIFT_RECOVERY_STANDBY_PREPARED": "1", AWAIT: awaited, "TMPDIR": str(tmp_path)}
    result = jobs.run("loop.py", args=["--log", "w"], env=env)
    assert result.status == 0 and not result.kinds("failed"), result.tail()
    # A busy machine may have the next rank's standby ready too, before the job ends.
    [said] = [line for line in result.stderr.splitlines() if "cuts it off" in line and "standby of rank 1: " in line]
    assert said.startswith("[swift] ") and "log1.txt" in said, result.tail()
