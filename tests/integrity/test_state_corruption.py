"""Bits of the replicated state flip on one rank (``state.verify_every``): found, named, and healed or refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import ANY_STEP, Fault
from shared_core.faults.spec import FLIPS as KINDS
from tests.support.runner import Mismatch, compare

TRAIN = "plain_ddp.py"
CHANGED = str(Path(__file__).parent / "scripts" / "changed.py")
EACH = {"SWIFT_RECOVERY_STATE_VERIFY_EVERY": "1"}
ARGS, SHORT = ["--norm", "--steps", "12"], ["--norm", "--steps", "7"]
#: Before a batch, in its forward, and between backward and update.
FLIPS = [
    Fault(1, 4, "step_boundary", "flip.parameter", bit=7001),
    Fault(2, 6, "step_boundary", "flip.optimizer", bit=9999),
    Fault(0, 8, "forward", "flip.parameter", bit=31),
    Fault(1, 10, "update.before", "flip.parameter", incarnation=1, bit=22000),
]


@pytest.mark.parametrize("flips", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_whatever_flips_on_one_of_three_the_run_ends_as_without_it(flips: int, jobs: Jobs) -> None:
    result = jobs.check(TRAIN, nproc=3, faults=FLIPS[:flips], env=EACH, args=SHORT if flips == 2 else ARGS)
    causes = [str(event.fields["cause"]) for event in result.kinds("failed")]
    assert len(causes) == flips and all(cause.startswith("corruption: replicas differ in ") for cause in causes), causes
    assert "parameter module.0.weight at update 3 (rank 1 against ranks 0, 2)" in causes[0], causes
    assert "exp_avg of parameter module.0.weight at update 5 (rank 2 against ranks 0, 1)" in causes[1], causes


def test_without_the_option_the_run_ends_with_other_bits(jobs: Jobs) -> None:
    result = jobs.run(TRAIN, nproc=3, faults=FLIPS[:1], args=SHORT)
    assert result.status == 0 and not result.kinds("failed") and len(result.struck) == 1, result.tail()
    with pytest.raises(Mismatch):
        compare(result, jobs.reference(TRAIN, nproc=3, args=SHORT))


def test_of_two_nobody_knows_who_is_right(jobs: Jobs) -> None:
    result = jobs.run(TRAIN, faults=FLIPS[:1], env=EACH, args=ARGS)
    assert result.status == 1, result.tail()
    says = "replicas differ in parameter module.0.weight at update 3 (no majority among ranks 0, 1)"
    assert f"ReplicaMismatch: corruption: {says}" in result.stderr, result.tail()


@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_what_may_have_spread_goes_back_to_a_compared_checkpoint(nproc: int, jobs: Jobs, tmp_path: Path) -> None:
    """Update 7 has been made with the flip, which is found before the checkpoint of step boundary 8."""
    env = {"SWIFT_RECOVERY_STATE_VERIFY_EVERY": "4", "SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    env |= {"SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "4"}
    result = jobs.run(
        TRAIN, nproc=nproc, faults=[Fault(1, 7, "forward", "flip.parameter", bit=7001)], env=env, args=ARGS
    )
    compare(result, jobs.reference(TRAIN, nproc=nproc, args=ARGS))
    (restart,) = result.kinds("restart")
    assert "corruption: replicas differ in parameter module.0.weight at update" in str(restart.fields), restart.fields
    assert all(report["restart"] == 1 for report in result.reports.values())
    ran = {int(key.split()[1]) for report in result.reports.values() for key in report["counts"]}
    assert min(ran) == 3, ran  # from the checkpoint at step boundary 4


@pytest.mark.nightly
def test_gradients_of_damaged_parameters_were_in_the_sums(jobs: Jobs) -> None:
    result = jobs.run(CHANGED, nproc=3, faults=FLIPS[:1], env=EACH, args=["unhealed", *ARGS])
    assert result.status == 0 and len(result.kinds("failed")) == 1, result.tail()
    with pytest.raises(Mismatch):
        compare(result, jobs.reference(TRAIN, nproc=3, args=ARGS))


@pytest.mark.nightly
def test_what_spreads_before_gradients_do_starts_all_again(jobs: Jobs) -> None:
    args = ["exchanging", *ARGS]
    result = jobs.run(CHANGED, nproc=3, faults=FLIPS[:1], env=EACH, args=args)
    compare(result, jobs.reference(CHANGED, nproc=3, args=args))
    (restart,) = result.kinds("restart")
    assert "corruption: rank 1 had given other ranks what it computed" in str(restart.fields["reason"]), restart.fields


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["", "view", "zeros", "accumulate", "metric", "builtin"])
@pytest.mark.parametrize("nproc", [3, 4])
def test_gradients_handled_in_each_way(way: str, nproc: int, jobs: Jobs) -> None:
    # A metric is computed before the next comparison, so it shows what has flipped before the update.
    faults = FLIPS[:3] if way == "metric" else FLIPS
    jobs.check(TRAIN, nproc=nproc, faults=faults, env=EACH, args=[*ARGS, "--way", way], timeout_s=120)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "second",
    [
        Fault(0, 4, "collective.before", "SIGKILL", nth=7),
        Fault(0, ANY_STEP, "recovery.exchanged", "SIGKILL"),
        Fault(1, ANY_STEP, "recovery.installed", "SIGKILL", incarnation=1),
        Fault(2, 4, "update.before", "SIGKILL"),
    ],
    ids=str,
)
def test_another_failure_while_it_is_healed(second: Fault, jobs: Jobs) -> None:
    jobs.check(TRAIN, nproc=4, faults=[FLIPS[0], second], env=EACH, args=ARGS, timeout_s=120)


@pytest.mark.parametrize(
    ("script", "args", "option", "why"),
    [
        (TRAIN, ARGS, {"SWIFT_RECOVERY_STATE_OVERLAPPED_UPDATE": "1"}, "with state.overlapped_update"),
        ("zero.py", ["--stage", "2"], {}, "here each rank trains a part of the model"),
        pytest.param("pipe.py", [], {}, "here each rank trains a part of the model", marks=pytest.mark.nightly),
    ],
)
def test_what_cannot_be_compared_is_refused(
    script: str, args: list[str], option: dict[str, str], why: str, jobs: Jobs
) -> None:
    result = jobs.run(script, nproc=4 if script == "pipe.py" else 2, env=EACH | option, args=args)
    assert result.status == 1, result.tail()
    assert f"Unsupported: state.verify_every compares replicas before their gradients are used, and {why}" in (
        result.stderr
    ), result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(24))
def test_flips_anywhere(seed: int, jobs: Jobs) -> None:
    """Also at the start, where a flip may be taken for a change by the script: then all workers start again."""
    draw = random.Random(seed)
    points = ("step_boundary", "forward", "bucket", "update.before", "update.after")
    ranks = draw.sample(range(4), 3)
    faults = [  # in batches 1 and 2 there may be no optimizer state yet
        Fault(rank, step, draw.choice(points), draw.choice(KINDS[: 1 + (step > 2)]), bit=draw.getrandbits(20))
        for rank, step in zip(
            ranks, (draw.choice((1, 2)), draw.choice((4, 5, 6)), draw.choice((8, 9, 10))), strict=True
        )
    ]
    result = jobs.run(TRAIN, nproc=4, faults=faults, env=EACH, args=ARGS, timeout_s=120)
    compare(result, jobs.reference(TRAIN, nproc=4, args=ARGS))
    found = [event.rank for event in result.kinds("failed") if "corruption" in str(event.fields["cause"])]
    assert found == ranks or result.kinds("restart"), result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "args"),
    [("acc.py", []), *[("lit.py", ["--feature", name]) for name in ("clip_norm", "accumulate", "batchnorm", "gan")]],
)
def test_frameworks(script: str, args: list[str], jobs: Jobs) -> None:
    faults = [Fault(1, 4, "forward", "flip.parameter", bit=99), Fault(2, 6, "step_boundary", "flip.optimizer", bit=999)]
    jobs.check(script, nproc=3, faults=faults, env=EACH, args=args, timeout_s=120)
