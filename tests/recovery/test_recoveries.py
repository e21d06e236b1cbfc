"""Failures while a recovery runs, silent corruption, the failure of everybody."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import check_survivors, compare

CORRUPT = str(Path(__file__).parent / "scripts" / "corrupt.py")
ALL_DIE = str(Path(__file__).parent / "scripts" / "all_die.py")
TRAIN = "plain_ddp.py"
FIRST = Fault(1, 4, "bucket", "SIGKILL")
#: Who fails, besides rank 1, at which stage of the recovery of rank 1.
STAGES: dict[str, list[Fault]] = {
    "survivor_severed": [Fault(0, ANY_STEP, "recovery.severed", "SIGKILL")],
    "survivor_frontier": [Fault(2, ANY_STEP, "recovery.frontier", "SIGKILL")],
    "survivor_connecting": [Fault(2, ANY_STEP, "recovery.connecting", "SIGKILL")],
    "survivor_connected": [Fault(0, 4, "recovery.connected", "SIGKILL")],
    "donor_exchanged": [Fault(0, 4, "recovery.exchanged", "SIGKILL")],
    "survivor_installed": [Fault(2, 4, "recovery.installed", "SIGKILL")],
    # It comes last, so it decides for all.
    "replacement_deciding": [Fault(1, ANY_STEP, "recovery.deciding", "SIGKILL", incarnation=1)],
    "replacement_join": [Fault(1, ANY_STEP, "join", "SIGKILL", incarnation=1)],
    "replacement_startup": [Fault(1, ANY_STEP, "collective.before", "SIGKILL", incarnation=1)],
    "replacement_exchanged": [Fault(1, ANY_STEP, "recovery.exchanged", "SIGKILL", incarnation=1)],
    "replacement_installed": [Fault(1, ANY_STEP, "recovery.installed", "SIGKILL", incarnation=1)],
    "replacement_replaying": [Fault(1, 4, "bucket", "SIGKILL", incarnation=1)],
    "both": [
        Fault(0, 4, "recovery.exchanged", "SIGKILL"),
        Fault(1, ANY_STEP, "recovery.connected", "SIGKILL", incarnation=1),
    ],
}
#: Of the many, those that are run each time.
ALWAYS = ("replacement_deciding", "survivor_connecting", "donor_exchanged", "replacement_replaying")


@pytest.mark.parametrize("name", [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.nightly) for n in STAGES])
def test_a_second_failure_at_each_stage_of_a_recovery(name: str, jobs: Jobs) -> None:
    # Some of these points are met when groups are first formed, too: there, a step says which time is meant.
    result = jobs.check(TRAIN, nproc=3, faults=[FIRST, *STAGES[name]], args=["--norm", "--steps", "7"])
    assert "willRetry" not in result.stderr and "connectFullMesh" not in result.stderr, result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "giver", [2, pytest.param(0, marks=pytest.mark.nightly)], ids=["one_of_several", "the_donor_of_all"]
)
def test_a_failure_while_a_large_state_is_given_leaves_nothing_half_installed(giver: int, jobs: Jobs) -> None:
    """Its parameters are received in place, from two at once: what the other had sent when this one fails is of no
    use."""
    faults = [FIRST, Fault(giver, ANY_STEP, "recovery.giving", "SIGKILL")]
    result = jobs.check(TRAIN, nproc=3, faults=faults, args=["--steps", "6", "--width", "2500", "--bucket-mb", "25"])
    assert result.kinds("replacement_ready")[0].fields["bytes_moved"] > 64 << 20, result.tail()


def test_the_minority_of_three_is_replaced(jobs: Jobs) -> None:
    result = jobs.run(CORRUPT, nproc=3, faults=[Fault(1, 4, "bucket", "SIGKILL")], args=["2", "40"])
    assert result.status == 0, result.tail()
    assert [event.rank for event in result.kinds("failed")] == [1, 2], result.tail()
    assert "differs from its replicas" in str(result.kinds("failed")[1].fields["cause"])
    assert len({report["digests"]["all"] for report in result.reports.values()}) == 1, "all agree again"
    assert [report["incarnation"] for _, report in sorted(result.reports.items())] == [0, 1, 1]


def test_of_two_that_differ_nobody_knows_who_is_right(jobs: Jobs) -> None:
    result = jobs.run(CORRUPT, nproc=2, faults=[Fault(1, 4, "bucket", "SIGKILL")], args=["0", "200"])
    assert result.status == 1, result.tail()
    assert "ReplicaMismatch: after the recovery in generation 1 the replicas differ in parameter" in result.stderr
    assert "second.weight" in result.stderr, result.tail()


def test_replicas_that_agree_are_left_alone(jobs: Jobs) -> None:
    result = jobs.run(CORRUPT, nproc=2, faults=[Fault(1, 4, "bucket", "SIGKILL")], args=["99", "8"])
    assert result.status == 0, result.tail()
    assert len(result.kinds("failed")) == 1
    check_survivors(result)


@pytest.mark.nightly
def test_when_all_fail_the_newest_checkpoint_is_where_it_continues(jobs: Jobs, tmp_path: Path) -> None:
    args = ["--norm", "--steps", "12"]
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path / "checkpoints"), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "4"}
    # In the second attempt one fails, who is replaced as ever.
    faults = [Fault(2, 10, "collective.after", "SIGKILL")]
    result = jobs.run(ALL_DIE, nproc=3, faults=faults, env=env, args=args)
    compare(result, jobs.reference(TRAIN, nproc=3, args=args))
    assert len(result.kinds("restart")) == 1, result.tail()
    assert len(result.struck) == 1 and result.kinds("checkpoint"), result.tail()
    assert all(report["restart"] == 1 for report in result.reports.values())
    # It did not start over: batches before the checkpoint were not run again.
    ran = {int(key.split()[1]) for report in result.reports.values() for key in report["counts"]}
    assert min(ran) >= 3, ran


@pytest.mark.nightly
def test_without_a_checkpoint_everything_starts_over(jobs: Jobs) -> None:
    args = ["--steps", "9"]
    result = jobs.run(ALL_DIE, args=args)
    compare(result, jobs.reference(TRAIN, args=args))
    assert len(result.kinds("restart")) == 1, result.tail()
