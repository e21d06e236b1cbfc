"""Every feature of Lightning with a fault in it ends, on every rank, with the bits of the run without one."""

from __future__ import annotations

import pytest
from harness import Jobs, few

from shared_core.faults import Fault
from tests.support.runner import check_survivors, compare, unconfirmed

#: Feature, faults. An epoch has six batches on two ranks unless the feature says otherwise.
CASES: dict[str, tuple[str, list[Fault]]] = {
    "last_batch_of_an_epoch": ("epochs", [Fault(0, 6, "update.after", "SIGKILL")]),
    "startup": ("epochs", [Fault(1, 0, "startup", "SIGKILL")]),
    "persistent_workers": ("persistent_workers", [Fault(0, 6, "collective.before", "SIGKILL")]),
    "uneven": ("uneven", [Fault(0, 5, "update.before", "segfault")]),
    "accumulate": ("accumulate", [Fault(1, 5, "forward", "os._exit")]),
    "clip_norm": ("clip_norm", [Fault(0, 4, "clip", "SIGKILL")]),
    "bf16": ("bf16", [Fault(1, 5, "update.during", "SIGKILL", nth=5)]),
    "scheduler_plateau": ("scheduler_plateau", [Fault(0, 9, "forward", "SIGKILL")]),
    "validation": ("validation", [Fault(1, 3, "validation", "SIGKILL")]),
    "checkpoint": ("checkpoint", [Fault(0, 5, "forward", "SIGKILL")]),
    "early_stopping": ("early_stopping", [Fault(1, 8, "collective.after", "SIGKILL")]),
    "batchnorm": ("batchnorm", [Fault(0, 4, "forward", "SIGKILL")]),
    "metrics": ("metrics", [Fault(1, 6, "update.after", "SIGKILL")]),
    "augment": ("augment", [Fault(1, 8, "bucket", "SIGSTOP")]),
    "manual_others_have_made_the_update": ("manual", [Fault(1, 9, "update.before", "SIGKILL")]),
    "gan_in_the_second_update": ("gan", [Fault(1, 5, "update.during", "SIGKILL", nth=45)]),
    "second_fit": ("fit_test_fit", [Fault(0, 15, "bucket", "SIGKILL")]),
    "between_calls_2": ("calls", [Fault(0, 12, "entry", "SIGKILL")]),
    "iterable": ("iterable", [Fault(1, 4, "forward", "SIGKILL")]),
    "no_sampler": ("no_sampler", [Fault(1, 5, "forward", "SIGKILL")]),
    "unused": ("unused", [Fault(0, 6, "bucket", "SIGKILL")]),
    "by_hand": ("by_hand", [Fault(1, 4, "update.after", "SIGKILL"), Fault(0, 9, "collective.before", "exception")]),
    "weight_averaging_update": ("weight_averaging", [Fault(1, 4, "update.after", "SIGKILL")]),
    "weight_averaging_exchanged": ("weight_averaging", [Fault(1, 6, "validation", "SIGKILL")]),
    "ema_update": ("ema", [Fault(1, 4, "update.after", "SIGKILL")]),
    "swa_averages": ("swa", [Fault(1, 10, "bucket", "SIGKILL")]),
    "swa_transfers": ("swa", [Fault(0, 16, "update.after", "SIGKILL")]),
    "swa_statistics": ("swa", [Fault(1, 18, "forward", "SIGKILL")]),
    "own_scheduler": ("own_scheduler", [Fault(1, 8, "forward", "SIGKILL")]),
    "own_logger": ("own_logger", [Fault(0, 5, "update.after", "SIGKILL")]),
    # Files of this window are there, and the update that ends it has been made.
    "saves_between_updates": ("saves_between_updates", [Fault(0, 6, "update.after", "SIGKILL")]),
    "lambda_callback": ("lambda", [Fault(1, 8, "forward", "SIGKILL")]),
    # The file of the configuration is there when a replacement of rank 0 begins, or skips a call.
    "command_line": (
        "command_line",
        [Fault(0, 4, "forward", "SIGKILL"), Fault(0, 15, "forward", "SIGKILL", incarnation=1)],
    ),
    "held_models": ("held", [Fault(1, 8, "forward", "SIGKILL")]),
    "prepared_data": ("prepared", [Fault(0, 3, "bucket", "SIGKILL")]),
    # Failed when a file of the end has been written.
    "resume_newest": ("prepared", [Fault(1, 18, "validation", "SIGKILL")]),
    "resume": ("resume", [Fault(1, 14, "forward", "SIGKILL")]),
}


@pytest.mark.parametrize(
    "name",
    few(CASES, "own_scheduler", "saves_between_updates", "command_line"),
)
def test_feature_with_a_failure(name: str, jobs: Jobs) -> None:
    feature, faults = CASES[name]
    result = jobs.check("lit.py", faults=faults, args=["--feature", feature])
    reference = jobs.reference("lit.py", args=["--feature", feature])
    for rank in reference.reports.keys() - result.struck_ranks():
        assert result.reports[rank]["extra"] == reference.reports[rank]["extra"]


def test_a_failure_after_a_call_that_raised_restarts_all(jobs: Jobs) -> None:
    args = ["--feature", "raised"]
    result = jobs.run("lit.py", faults=[Fault(1, 9, "forward", "SIGKILL")], args=args)
    compare(result, jobs.reference("lit.py", args=args))
    assert "had ended with an exception" in result.kinds("restart")[0].fields["reason"], result.tail()


@pytest.mark.nightly
def test_a_replacement_leaves_out_the_start_banner(jobs: Jobs) -> None:
    """And says what comes after it has taken its place."""
    args = ["--feature", "epochs"]
    plain, failed = (
        jobs.run("lit.py", faults=faults, args=args) for faults in ([], [Fault(0, 5, "bucket", "SIGKILL")])
    )
    assert failed.kinds("replacement_ready"), failed.tail()
    for said in ("GPU available", "Initializing distributed", "distributed_backend", "`Trainer.fit` stopped"):
        assert failed.stderr.count(said) == plain.stderr.count(said) > 0, f"{said}\n{failed.tail()}"


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["callback", "env"])
def test_other_ways_in(how: str, jobs: Jobs) -> None:
    env = {"SWIFT_RECOVERY": "1"} if how == "env" else {}
    args = ["--feature", "all", "--how", how]
    reference = jobs.reference("lit.py", args=["--feature", "all"])
    faults = [Fault(0, 4, "bucket", "SIGKILL")]
    result = jobs.run("lit.py", faults=faults, args=args, env=env)
    compare(result, reference)
    assert not unconfirmed(result), result.tail()
    check_survivors(result, reference)


@pytest.mark.nightly
def test_seeded_data(jobs: Jobs) -> None:
    """An item's randomness is then another, so the reference is the same strategy without a failure."""
    args = ["--feature", "augment", "--how", "seeded"]
    reference = jobs.run("lit.py", args=args)
    result = jobs.run("lit.py", faults=[Fault(1, 6, "forward", "SIGKILL")], args=args)
    compare(result, reference)
    assert not unconfirmed(result), result.tail()
    check_survivors(result, reference)


@pytest.mark.nightly
def test_four_ranks_lose_two_at_once(jobs: Jobs) -> None:
    faults = [Fault(0, 4, "bucket", "SIGKILL"), Fault(2, 4, "update.during", "SIGKILL", nth=9)]
    jobs.check("lit.py", nproc=4, faults=faults, args=["--feature", "all"])


def test_without_a_failure_the_run_is_the_stock_run(jobs: Jobs) -> None:
    args = ["--feature", "all"]
    compare(jobs.run("lit.py", args=args), jobs.reference("lit.py", args=args))


@pytest.mark.nightly
def test_a_static_graph_is_learned_again(jobs: Jobs) -> None:
    faults = [Fault(1, 3, "bucket", "SIGKILL"), Fault(0, 8, "update.after", "SIGKILL")]
    jobs.check("lit.py", args=["--feature", "static_graph"], faults=faults)
