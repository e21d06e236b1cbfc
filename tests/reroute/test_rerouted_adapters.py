"""Pipelines of Lightning's and Accelerate's continue without a failed worker, and admit a replacement
where all are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from harness import Jobs, few
from rerouted import ORDERED

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import JobResult, compare

pytest.importorskip("deepspeed")

LIGHTNING = "lit_pipe.py"
BF16, ZERO = ["--precision", "bf16-true"], ["--zero"]
#: Three steps an epoch, after each of which there are a validation, a checkpoint and a row of the log: ranks 0 and 1
#: are the first stage. Rows of the log of steps that rank 0 was not there for are missing.
CASES: dict[str, tuple[list[str], list[Fault]]] = {
    # The step before a validation hears that the replacement waits; the validation admits it, after that step.
    "waits_at_the_validation": (
        ["--wait"],
        [Fault(1, 2, "reroute.action", "SIGKILL", nth=3), Fault(3, 5, "reroute.action", "SIGKILL", nth=4)],
    ),
    "rank_0_in_the_last_step": ([], [Fault(0, 6, "reroute.action", "SIGKILL", nth=5)]),
    "both_ends_in_a_validation": (
        [],
        [Fault(1, 3, "reroute.evaluate", "SIGKILL"), Fault(3, 3, "reroute.evaluate", "SIGKILL", nth=2)],
    ),
    "calls": (["--calls"], [Fault(1, 3, "reroute.action", "SIGKILL", nth=2)]),
    "fits_again": (["--resume"], [Fault(1, 8, "reroute.action", "SIGKILL", nth=3)]),
    "both": ([*BF16, *ZERO], [Fault(2, 2, "reroute.step", "SIGKILL"), Fault(1, 6, "reroute.action", "SIGKILL")]),
}


def run(
    jobs: Jobs, script: str, faults: Sequence[Fault], args: Sequence[str], parts: Sequence[str] | None = None
) -> JobResult:
    """Train with faults; equal by hash to stock DeepSpeed, on every rank, and nobody goes back to a checkpoint."""
    reference = jobs.reference(script, nproc=4, args=args)
    result = jobs.run(script, nproc=4, args=args, faults=faults, env=ORDERED)
    compare(result, reference, parts)
    assert not result.kinds("restart") and len(result.struck) == len(faults), result.tail()
    assert len(result.kinds("admitted")) == len(faults) and result.kinds("rerouted"), result.tail()
    return result


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_stage_fails_under_lightning(name: str, jobs: Jobs) -> None:
    args, faults = CASES[name]
    run(jobs, LIGHTNING, faults, ["--no-dropout", *args])


ACCELERATE = "acc_pipe.py"
#: Three steps an epoch.
LOOPS: dict[str, tuple[list[str], list[Fault]]] = {
    "first_and_last_stage": (
        ["--tied", "--shuffled", "--clip", "0.5", "--evaluate", "--save", "--gather"],
        [Fault(0, 2, "reroute.action", "SIGKILL", nth=3), Fault(3, 6, "reroute.action", "SIGKILL", nth=4)],
    ),
    "both_ends_in_an_evaluation": (
        ["--plain-data", "--evaluate", "--save"],
        [Fault(0, ANY_STEP, "reroute.evaluate", "SIGKILL"), Fault(2, ANY_STEP, "reroute.evaluate", "SIGKILL", nth=2)],
    ),
    "both": (
        ["--precision", "bf16", *ZERO, "--plain-data", "--save"],
        [Fault(0, 2, "update.during", "SIGKILL"), Fault(1, 5, "reroute.action", "SIGKILL", nth=3)],
    ),
}
#: Not the generators: a replacement has those of the peer that it is a copy of.
COMPARED = ("parameters", "buffers", "optimizers", "schedulers", "losses", "trained")


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOOPS)
def test_a_stage_fails_under_accelerate(name: str, jobs: Jobs) -> None:
    args, faults = LOOPS[name]
    run(jobs, ACCELERATE, faults, ["--no-dropout", *args], COMPARED)


#: What is refused: script, its arguments, what is said.
REFUSED: dict[str, tuple[str, list[str], str]] = {
    "changed": (LIGHTNING, ["--no-dropout", "--change-gradients"], "so hooks may only look at them"),
    "epochs": (ACCELERATE, ["--start", "3"], "plugin.epochs(2, 3): the end of the range comes first"),
    "shapes": (LIGHTNING, ["--no-dropout", "--rows", "40"], "With on_failure='reroute' they must stay the same"),
}


@pytest.mark.parametrize("name", few(REFUSED, "epochs"))
def test_what_cannot_be_rerouted_is_refused(name: str, jobs: Jobs) -> None:
    script, args, message = REFUSED[name]
    result = jobs.run(script, nproc=4, args=args, env=ORDERED)
    assert result.status != 0 and message in result.stderr, result.tail()


@pytest.mark.nightly
def test_the_launcher_must_know(jobs: Jobs) -> None:
    result = jobs.run(LIGHTNING, nproc=4, args=["--no-dropout", "--reroute"])
    assert result.status != 0 and "on_failure='reroute' is set in the script alone" in result.stderr, result.tail()
