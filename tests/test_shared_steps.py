"""Data-parallel loops that continue without a failed worker: the bits are those of the run in which nobody failed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Jobs, few

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import JobResult, compare, unconfirmed

REROUTE = {"SWIFT_RECOVERY_ON_FAILURE": "reroute"}
ORDERED = REROUTE | {"SWIFT_RECOVERY_REROUTE_REDUCTION": "ordered"}


def check(jobs: Jobs, script: str, faults: list[Fault], args: list[str], nproc: int = 3) -> JobResult:
    """Ends as the run without faults, on every rank that is there at the end."""
    reference = jobs.reference(script, nproc=nproc, args=args, env=ORDERED, launcher="swiftrun")
    result = jobs.run(script, nproc=nproc, args=args, env=ORDERED, faults=faults)
    assert not unconfirmed(result), "\n".join([*unconfirmed(result), result.tail()])
    away = {fault.rank for fault in faults} - result.reports.keys()  # the others may end before a replacement comes
    kept = {rank: report for rank, report in reference.reports.items() if rank not in away}
    compare(result, replace(reference, reports=kept))
    assert result.kinds("rerouted") and not result.kinds("restart"), result.tail()
    return result


#: Arguments, faults. On three ranks an epoch has six steps.
CASES: dict[str, tuple[list[str], list[Fault]]] = {
    "in_the_sum": ([], [Fault(0, 3, "survivor_group.wait", "SIGKILL", nth=2)]),
    "at_the_step": ([], [Fault(1, 3, "reroute.step", "SIGKILL")]),
    "in_the_update": ([], [Fault(1, 3, "update.during", "SIGKILL", nth=2)]),
    "first_step": ([], [Fault(0, 1, "survivor_group.connect", "SIGKILL"), Fault(1, 6, "reroute.forward", "SIGKILL")]),
    "last_step": ([], [Fault(2, 18, "reroute.forward", "SIGKILL")]),
    "two_at_once": ([], [Fault(0, 4, "reroute.forward", "SIGKILL"), Fault(2, 4, "reroute.reduce", "SIGKILL")]),
    "admitted": (["--evaluate"], [Fault(1, 3, "reroute.forward", "SIGKILL")]),
    "replacement": (
        ["--evaluate"],
        [
            Fault(1, 3, "reroute.forward", "SIGKILL"),
            Fault(1, ANY_STEP, "survivor_group.join_request", "SIGKILL", incarnation=1),
        ],
    ),
    "admitting": (
        ["--evaluate"],
        [Fault(1, 3, "reroute.forward", "SIGKILL"), Fault(0, ANY_STEP, "survivor_group.admit", "SIGKILL")],
    ),
    "accumulate": (["--evaluate", "--accumulate", "4"], [Fault(1, 3, "reroute.backward", "SIGKILL", nth=3)]),
    "workers": (["--workers", "1", "--evaluate"], [Fault(2, 4, "reroute.forward", "SIGKILL")]),
}


@pytest.mark.parametrize("name", few(CASES, "admitted"))
def test_a_failure_changes_no_bit(name: str, jobs: Jobs) -> None:
    args, faults = CASES[name]
    result = check(jobs, "shared_steps.py", faults, args)
    if "--evaluate" in args:
        assert {event.rank for event in result.kinds("admitted")} == {fault.rank for fault in faults}, result.tail()


#: Faults around a copy of the state that is made while the others train; steps that wait for losses and their copies.
COPIES: dict[str, tuple[list[Fault], str]] = {
    "copied": ([Fault(1, 3, "reroute.forward", "SIGKILL")], "10:1"),
    "two": ([Fault(0, 3, "reroute.forward", "SIGKILL"), Fault(1, 3, "reroute.forward", "SIGKILL")], "10:2"),
    "the_donor": ([Fault(1, 3, "reroute.forward", "SIGKILL"), Fault(0, ANY_STEP, "copy.give", "SIGKILL")], "10:2"),
    "the_replacement": (
        [Fault(1, 3, "reroute.forward", "SIGKILL"), Fault(1, ANY_STEP, "copy.take", "SIGKILL", incarnation=1)],
        "10:2",
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", COPIES)
def test_replacements_copy_the_state_while_the_others_train(name: str, jobs: Jobs) -> None:
    faults, copies = COPIES[name]
    result = check(jobs, "shared_steps.py", faults, ["--epochs", "45", "--copies", copies])
    assert {event.rank for event in result.kinds("admitted")} == {fault.rank for fault in faults}, result.tail()
    copied = [event.rank for event in result.kinds("copied") if not event.fields["why"]]
    assert {*copied} == {fault.rank for fault in faults}, result.tail()


#: The replacement of rank 2 waits until another one is in; who fails besides.
HELD: dict[str, list[Fault]] = {
    "nobody": [],
    "the_replacement_when_admitted": [Fault(0, ANY_STEP, "recovery.installed", "SIGKILL", incarnation=1)],
    "the_donor": [Fault(1, ANY_STEP, "survivor_group.agreed", "SIGKILL")],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", HELD)
def test_a_replacement_does_not_wait_for_another(name: str, jobs: Jobs) -> None:
    """The others copy their state to the first, admit it, and train on while the second is still starting."""
    failed = [Fault(rank, 3, "reroute.forward", "SIGKILL") for rank in (0, 2)]
    args = ["--epochs", "45", "--copies", "10:2:1", "--hold", "2"]
    result = check(jobs, "shared_steps.py", [*failed, *HELD[name]], args, nproc=4)
    assert len(result.struck) == 2 + len(HELD[name]), result.tail()
    boundaries = {event.rank: event.fields["boundary"] for event in result.kinds("admitted")}
    assert boundaries.keys() == {fault.rank for fault in [*failed, *HELD[name]]}, result.tail()
    if name == "nobody":
        assert boundaries[0] < boundaries[2], result.tail()
        copied = [event.rank for event in result.kinds("copied") if not event.fields["why"]]
        assert copied == [0, 2], result.tail()


ACCELERATE: dict[str, tuple[list[str], list[Fault]]] = {
    "rank_0": (["--seedable", "--workers", "1"], [Fault(0, 6, "survivor_group.wait", "SIGKILL")]),
    "accumulate": (["--accumulate", "3", "--bf16"], [Fault(2, 3, "reroute.backward", "SIGKILL", nth=2)]),
    "split_batches": (["--split-batches"], [Fault(2, 3, "reroute.step", "SIGKILL")]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ACCELERATE)
def test_a_failure_under_accelerate(name: str, jobs: Jobs) -> None:
    pytest.importorskip("accelerate")
    args, faults = ACCELERATE[name]
    result = check(jobs, "acc_shared.py", faults, args)
    assert result.kinds("admitted"), result.tail()  # evaluation needs all


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["shared_steps.py", "acc_shared.py"])
def test_without_a_failure_it_is_plain_data_parallelism(script: str, jobs: Jobs) -> None:
    """Two addends have one sum only, so two ranks can be compared with gloo's own."""
    theirs = jobs.reference(script)
    compare(jobs.run(script, env=REROUTE), theirs)
    compare(jobs.run(script), theirs)


@pytest.mark.nightly
def test_sums_that_are_not_ordered_are_equal_to_rounding(jobs: Jobs) -> None:
    reference = jobs.reference("shared_steps.py", nproc=3, env=ORDERED, launcher="swiftrun")
    faults = [Fault(1, 3, "reroute.forward", "SIGKILL")]
    result = jobs.run(
        "shared_steps.py", nproc=3, env=REROUTE | {"SWIFT_RECOVERY_REROUTE_REJOIN_AFTER_S": "60"}, faults=faults
    )
    assert result.status == 0 and result.kinds("rerouted"), result.tail()
    ours, theirs = (run.reports[0]["extra"]["loss"] for run in (result, reference))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.nightly
def test_the_same_loop_replaces_workers(jobs: Jobs) -> None:
    jobs.check("shared_steps.py", faults=[Fault(1, 5, "collective.before", "SIGKILL")], args=["--evaluate"])


@pytest.mark.nightly
def test_a_failure_in_the_scripts_own_collective_goes_back_to_the_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    checkpoints = {
        "SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path),
        "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "4",
    }
    args, faults = ["--evaluate"], [Fault(1, 7, "collective.before", "SIGKILL")]
    reference = jobs.reference("shared_steps.py", nproc=3, args=args, env=ORDERED, launcher="swiftrun")
    result = jobs.run("shared_steps.py", nproc=3, args=args, env=ORDERED | checkpoints, faults=faults)
    compare(result, reference)
    assert result.kinds("restart"), result.tail()


#: What is said of each mistake.
MISTAKES = {
    "ddp": "needs a loop in which any worker can compute the share of a failed one",
    "own": "write 'for step in job.shared_steps(loader, epochs)'",
    "norm": "batch normalisation",
    "buffer": "the forward pass changes the buffer '4.calls'",
    "gather": "the loss function talks to other workers",
    "sampler": "the loader divides the data among 1 ranks, and there are 2",
    "late": "wait_for_all() was called after backward()",
    "twice": "backward() was called twice in step 0",
}


@pytest.mark.parametrize("name", few(MISTAKES, "ddp", "gather"))
def test_what_cannot_be_shared_is_refused(name: str, jobs: Jobs) -> None:
    result = jobs.run("shared_steps.py", env=ORDERED, args=["--mistake", name])
    assert result.status == 1, result.tail()
    assert MISTAKES[name] in " ".join(result.stderr.split()), result.tail()
    assert not result.kinds("restart"), result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arg", "said"), [("--own", "plugin.shared_steps(model, loader, epochs)"), ("--dispatch", "dispatch_batches=False")]
)
def test_what_accelerate_cannot_share_is_refused(arg: str, said: str, jobs: Jobs) -> None:
    result = jobs.run("acc_shared.py", env=ORDERED, args=[arg])
    assert result.status == 1 and said in " ".join(result.stderr.split()), result.tail()


@pytest.mark.nightly
def test_the_example_in_the_docs_runs_and_loses_a_worker(jobs: Jobs, tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "elasticity.md").read_text()
    [code] = re.findall(r"```python\n# train_shared.py: [^\n]*\n(.*?)```", text, re.S)
    script = tmp_path / "train_shared.py"
    script.write_text(code)
    faults = [Fault(1, 7, "reroute.forward", "SIGKILL")]
    result = jobs.run(str(script), nproc=3, launcher_args=["--on-failure=reroute"], faults=faults)
    assert result.status == 0 and result.kinds("rerouted"), result.tail()
