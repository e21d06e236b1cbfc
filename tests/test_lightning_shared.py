"""Lightning with ``on_failure="reroute"``: survivors run ``training_step`` for the failed worker, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs, few

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import JobResult, compare, unconfirmed

pytest.importorskip("lightning")

ORDERED = {"SWIFT_RECOVERY_ON_FAILURE": "reroute", "SWIFT_RECOVERY_REROUTE_REDUCTION": "ordered"}
SCRIPT = "lit_shared.py"


def check(jobs: Jobs, faults: list[Fault], args: list[str], nproc: int = 3) -> JobResult:
    """Ends as the run without faults, on every rank."""
    reference = jobs.reference(SCRIPT, nproc=nproc, args=args, env=ORDERED, launcher="swiftrun")
    result = jobs.run(SCRIPT, nproc=nproc, args=args, env=ORDERED, faults=faults)
    assert not unconfirmed(result), "\n".join([*unconfirmed(result), result.tail()])
    compare(result, reference)
    assert result.kinds("rerouted") and not result.kinds("restart"), result.tail()
    assert {event.rank for event in result.kinds("admitted")} == {fault.rank for fault in faults}, result.tail()
    return result


#: Arguments, faults. On three ranks an epoch has seven batches; the place behind its last one is a step boundary, too.
CASES: dict[str, tuple[list[str], list[Fault]]] = {
    "clipping": (["--feature", "clip"], [Fault(1, 3, "clip", "SIGKILL")]),
    "in_the_update": ([], [Fault(1, 3, "update.during", "SIGKILL", nth=2)]),
    "behind_the_last_batch": ([], [Fault(2, 8, "step_boundary", "SIGKILL")]),
    "two_in_turn": ([], [Fault(0, 3, "reroute.forward", "SIGKILL"), Fault(1, 4, "survivor_group.wait", "SIGKILL")]),
    "replacement": (
        [],
        [
            Fault(1, 3, "reroute.forward", "SIGKILL"),
            Fault(1, ANY_STEP, "survivor_group.join_request", "SIGKILL", incarnation=1),
        ],
    ),
    "admitting": (
        [],
        [Fault(1, 3, "reroute.forward", "SIGKILL"), Fault(0, ANY_STEP, "survivor_group.admit", "SIGKILL")],
    ),
    "accumulate_short": (["--feature", "accumulate"], [Fault(0, 7, "reroute.forward", "SIGKILL")]),
    "half_epochs": (["--feature", "half_epochs"], [Fault(1, 2, "reroute.forward", "SIGKILL")]),
    "between_fits": (["--feature", "fits"], [Fault(1, 3, "reroute.forward", "SIGKILL")]),
    "files_of_rank_0_at_the_boundary": (["--feature", "files"], [Fault(0, 4, "step_boundary", "SIGKILL")]),
    "workers": (["--workers", "1"], [Fault(0, 3, "reroute.forward", "SIGKILL")]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_failure_changes_no_bit(name: str, jobs: Jobs) -> None:
    args, faults = CASES[name]
    check(jobs, faults, args)


@pytest.mark.nightly
def test_a_failure_before_the_first_step_is_answered_by_a_replacement(jobs: Jobs) -> None:
    """Nobody has anything to continue with yet."""
    reference = jobs.reference(SCRIPT, nproc=3, env=ORDERED, launcher="swiftrun")
    result = jobs.run(SCRIPT, nproc=3, env=ORDERED, faults=[Fault(0, ANY_STEP, "startup", "SIGKILL")])
    assert not unconfirmed(result), "\n".join([*unconfirmed(result), result.tail()])
    compare(result, reference)
    assert not result.kinds("restart"), result.tail()


@pytest.mark.nightly
def test_an_object_of_torchmetrics_counts_what_its_rank_has_computed(jobs: Jobs) -> None:
    """What is trained and what numbers are logged is not touched by it."""
    args, faults = ["--feature", "metrics"], [Fault(1, 3, "reroute.forward", "SIGKILL")]
    reference = jobs.reference(SCRIPT, nproc=3, args=args, env=ORDERED, launcher="swiftrun")
    result = jobs.run(SCRIPT, nproc=3, args=args, env=ORDERED, faults=faults)
    compare(result, reference, ["parameters", "optimizers", "schedulers", "seen", "generators", "loops"])
    for name in ("loss_epoch", "accuracy_epoch"):
        assert len({report["extra"]["logged"][name] for report in result.reports.values()}) == 1


@pytest.mark.nightly
def test_without_a_failure_it_trains_as_ddp(jobs: Jobs) -> None:
    """Two addends have one sum only, so two ranks can be compared with Lightning's own DDP."""
    args, parts = ["--feature", "exact"], ["parameters", "optimizers", "schedulers", "loops", "steps"]
    theirs = jobs.reference(SCRIPT, args=args)
    compare(jobs.run(SCRIPT, args=args, env=ORDERED | {"SWIFT_RECOVERY_REROUTE_REDUCTION": "sum"}), theirs, parts)


@pytest.mark.nightly
def test_a_failure_in_the_validation_goes_back_to_the_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    checkpoints = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "3"}
    reference = jobs.reference(SCRIPT, nproc=3, env=ORDERED, launcher="swiftrun")
    faults = [Fault(1, 8, "validation", "SIGKILL")]
    result = jobs.run(SCRIPT, nproc=3, env=ORDERED | checkpoints, faults=faults)
    compare(result, reference)
    assert result.kinds("restart"), result.tail()


@pytest.mark.nightly
def test_others_train_on_until_the_replacement_is_there(jobs: Jobs) -> None:
    """The next step is committed before the replacement is started, and it is admitted between two others."""
    args, faults = ["--epochs", "1", "--size", "600"], [Fault(1, 3, "reroute.forward", "SIGKILL")]
    result = jobs.run(SCRIPT, nproc=3, args=args, env=ORDERED, faults=faults)
    assert result.status == 0, result.tail()
    [admitted] = result.kinds("admitted")
    resumed = result.kinds("resumed")
    assert {event.rank for event in resumed} == {0, 2}, result.tail()
    assert max(event.time for event in resumed) < admitted.time
    assert 3 < admitted.fields["boundary"], result.tail()


#: What is said of each mistake.
MISTAKES = {
    "manual": "does not support manual optimization",
    "norm": "cannot be used with batch normalisation",
    "buffer": "the forward pass changes the buffer 'calls'",
    "gather": "training_step talks to other workers",
    "own_log": "rank_zero_only=True",
    "several": "needs one training loader, not a dict of several",
    "skip": "on_train_batch_start() that returns -1",
    "twice": "the closure of a batch was called twice",
    "frozen": "parameter net.0.weight was frozen when fit began",
    "timer": "Timer and max_time, which ask rank 0 in every batch",
    "interval": "ModelCheckpoint(train_time_interval)",
    "reload": "reload_dataloaders_every_n_epochs",
    "sampler": "the loader divides the data among 1 ranks, and there are 2",
}


@pytest.mark.parametrize("name", few(MISTAKES, "manual"))
def test_what_cannot_be_shared_is_refused(name: str, jobs: Jobs) -> None:
    result = jobs.run(SCRIPT, env=ORDERED, args=["--mistake", name])
    assert result.status == 1, result.tail()
    assert MISTAKES[name] in " ".join(result.stderr.split()), result.tail()
    assert not result.kinds("restart"), result.tail()
