"""Loops of Accelerate lose workers and end, on every rank, with the bits of the run in which nobody failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs, few

from shared_core.faults import Fault
from tests.support.runner import compare

#: Arguments of the script, faults. On two ranks an epoch has ten batches unless the arguments say otherwise.
CASES: dict[str, tuple[list[str], list[Fault]]] = {
    "second_epoch": ([], [Fault(0, 14, "update.during", "SIGKILL", nth=10)]),
    "evaluation": ([], [Fault(1, 10, "collective.before", "SIGKILL", nth=7)]),
    "startup": ([], [Fault(1, 0, "startup", "SIGKILL")]),
    "accumulate": (["--accumulate", "3"], [Fault(1, 5, "forward", "SIGKILL"), Fault(0, 16, "bucket", "SIGKILL")]),
    "workers": (["--workers", "1"], [Fault(1, 13, "bucket", "SIGKILL")]),
    "split_batches": (["--split-batches"], [Fault(1, 21, "bucket", "SIGSTOP")]),
    "dispatch_batches": (["--dispatch"], [Fault(1, 4, "bucket", "SIGKILL"), Fault(0, 16, "forward", "SIGKILL")]),
    "dispatch_the_rest": (["--dispatch", "--samples", "139"], [Fault(0, 18, "forward", "SIGKILL")]),
    "average": (["--average"], [Fault(0, 4, "update.after", "SIGKILL"), Fault(1, 14, "forward", "SIGKILL")]),
    "prepared_in_each_epoch": (
        ["--prepare-inside", "--epochs", "3"],
        [
            Fault(1, 4, "bucket", "SIGKILL"),
            Fault(0, 16, "bucket", "SIGKILL"),
            Fault(1, 25, "forward", "SIGKILL", incarnation=1),
        ],
    ),
    "numbered": (["--numbered"], [Fault(1, 2, "forward", "SIGKILL"), Fault(0, 17, "bucket", "SIGKILL")]),
    # A look at a batch counts as a pass of two batches.
    "look": (["--look"], [Fault(1, 9, "bucket", "SIGKILL"), Fault(0, 22, "bucket", "SIGKILL")]),
    "seedable_sampler": (["--seedable"], [Fault(0, 15, "bucket", "SIGKILL")]),
}


@pytest.mark.parametrize(
    "name",
    few(CASES, "numbered"),
)
def test_a_failure_changes_no_bit(name: str, jobs: Jobs) -> None:
    args, faults = CASES[name]
    jobs.check("acc.py", faults=faults, args=args)


@pytest.mark.nightly
def test_a_look_at_a_batch_that_rank_0_deals_out_is_refused_by_name(jobs: Jobs) -> None:
    args = ["--look", "--dispatch"]
    result = jobs.run("acc.py", args=args, faults=[Fault(1, 9, "bucket", "SIGKILL")])
    compare(result, jobs.reference("acc.py", args=args))
    [restart] = result.kinds("restart")
    assert "next()" in restart.fields["reason"], restart.fields["reason"]


@pytest.mark.nightly
def test_the_handler_alone_survives_failures_in_the_first_epoch_and_warns(jobs: Jobs) -> None:
    result = jobs.check("acc.py", faults=[Fault(1, 4, "bucket", "SIGKILL")], args=["--no-epochs"])
    assert result.stderr.count("for epoch in plugin.epochs(n)") == 1, result.tail()


@pytest.mark.nightly
def test_later_failures_then_go_back_to_the_checkpoint_and_name_the_plugin(jobs: Jobs, tmp_path: Path) -> None:
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path / "kept"), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "4"}
    result = jobs.run("acc.py", faults=[Fault(1, 14, "bucket", "SIGKILL")], args=["--no-epochs"], env=env)
    [restart] = result.kinds("restart")
    assert restart.fields["reason"].endswith("write 'for epoch in plugin.epochs(n)'"), result.tail()


TEXT: dict[str, tuple[list[str], list[Fault]]] = {
    "second_update": ([], [Fault(0, 12, "update.before", "SIGKILL", nth=2)]),
    "main_process_logging": ([], [Fault(0, 5, "collective.before", "SIGKILL", nth=3)]),
    "saving": ([], [Fault(0, 10, "collective.before", "SIGKILL", nth=4)]),
    "resumed": (["--resume"], [Fault(0, 4, "bucket", "SIGKILL"), Fault(1, 13, "forward", "SIGKILL")]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TEXT)
def test_a_language_model_its_trackers_and_checkpoints(name: str, jobs: Jobs) -> None:
    args, faults = TEXT[name]
    result = jobs.check("acc_text.py", faults=faults, args=args)
    reference = jobs.reference("acc_text.py", args=args)
    assert (result.out / "lines.jsonl").read_text() == (reference.out / "lines.jsonl").read_text(), result.tail()
    for folder in (result.out, reference.out):
        kept = sorted(path.name for path in (folder / "project" / "checkpoints").iterdir())
        assert kept == sorted(path.name for path in (reference.out / "project" / "checkpoints").iterdir())
    weights = "project/checkpoints/{}/model.safetensors"
    for name in kept:
        assert (result.out / weights.format(name)).read_bytes() == (reference.out / weights.format(name)).read_bytes()


@pytest.mark.parametrize(
    ("script", "arg", "said"),
    [
        ("acc.py", "--local", "gradients are not summed over the workers, as under LocalSGD"),
        ("hf_trainer.py", "--evaluate-first", "evaluate() or predict() before train() has this effect"),
    ],
)
def test_workers_that_would_train_apart_are_refused(script: str, arg: str, said: str, jobs: Jobs) -> None:
    result = jobs.run(script, args=[arg])
    assert result.status != 0 and result.told(said), result.tail()


#: On two ranks an epoch has nine micro-batches.
TRAINER: dict[str, tuple[list[str], list[Fault]]] = {
    "saving": ([], [Fault(0, 8, "update.after", "os._exit"), Fault(1, 16, "forward", "SIGKILL")]),
    "average": (["--average"], [Fault(1, 4, "update.after", "SIGKILL"), Fault(0, 13, "bucket", "SIGKILL")]),
    "accumulate": (["--accumulate", "2"], [Fault(1, 3, "forward", "SIGKILL", nth=2), Fault(0, 9, "bucket", "SIGKILL")]),
    "after_an_evaluation": (
        ["--eval-steps", "4"],
        [Fault(1, 5, "forward", "SIGKILL"), Fault(0, 13, "collective.before", "SIGKILL")],
    ),
    "stream": (
        ["--stream", "dealt", "--steps", "22"],
        [Fault(1, 4, "bucket", "SIGKILL"), Fault(0, 9, "collective.before", "SIGKILL", nth=9)],
    ),
    "own": (["--own"], [Fault(1, 5, "forward", "SIGKILL"), Fault(0, 14, "bucket", "SIGKILL")]),
    "best_model": (
        ["--best", "--eval-steps", "4", "--steps", "20"],
        [Fault(1, 20, "collective.before", "SIGKILL", nth=14)],
    ),
    "persistent_workers": (["--workers", "1"], [Fault(1, 14, "forward", "SIGKILL")]),
}


@pytest.mark.parametrize(
    "name",
    few(TRAINER, "own"),
)
def test_the_trainer_of_transformers(name: str, jobs: Jobs) -> None:
    args, faults = TRAINER[name]
    jobs.check("hf_trainer.py", faults=faults, args=args)


@pytest.mark.nightly
def test_a_trainer_that_resumes_from_its_own_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run("hf_trainer.py", launcher="plain", args=["--files", str(tmp_path), "--steps", "7"])
    faults = [
        Fault(1, 1, "forward", "SIGKILL"),
        Fault(0, 2, "bucket", "SIGKILL"),
        Fault(1, 6, "forward", "SIGKILL", incarnation=1),
    ]
    jobs.check("hf_trainer.py", faults=faults, args=["--resume", str(tmp_path / "checkpoint-7")])


@pytest.mark.nightly
@pytest.mark.parametrize("more", ["--twice", "--another"])
def test_a_second_call_of_train_starts_again_and_says_why(more: str, jobs: Jobs) -> None:
    result = jobs.run("hf_trainer.py", faults=[Fault(1, 25, "bucket", "SIGKILL")], args=[more])
    compare(result, jobs.reference("hf_trainer.py", args=[more]))
    [restart] = result.kinds("restart")
    assert "call 2 of Trainer.train()" in restart.fields["reason"]
