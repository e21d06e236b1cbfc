"""Losses everywhere in a step: the same bits as without, on every rank, and no survivor does anything twice."""

from __future__ import annotations

import random

import pytest
import torch
from harness import Jobs
from rerouted import SCRIPT, go, kill, once

from shared_core.faults import ANY_STEP, Fault

pytest.importorskip("deepspeed")
VARIANTS = ("staggered", "decoupled", "coupled")
#: Actions in a row of 4 micro-batches, if nothing is split and nothing re-routed.
ROW = 9
#: What is in no row, or inside an action, with the occurrences in one step.
PLACES = (
    ("step_boundary", 1),
    ("survivor_group.wait", 2),
    ("survivor_group.wait", 7),
    ("survivor_group.wait", 11),
    ("survivor_group.wait", 13),
    ("reroute.reduce", 1),
    ("reroute.step", 1),
    ("update.before", 1),
    ("update.during", 1),
    ("update.after", 1),
)


def variant(name: str) -> dict[str, str]:
    return {"SWIFT_RECOVERY_REROUTE_PLAN": name}


@pytest.mark.nightly
def test_who_has_sent_gradients_fails_after_its_update(jobs: Jobs) -> None:
    """Rank 1 reads late. Nobody can make its gradients again after the update, so it is not made before it has them."""
    once(jobs, [kill(3, 2, 1, "reroute.step")], ("--slow-ms", "100", "--steps", "4"))


@pytest.mark.nightly
def test_the_last_worker_of_a_stage_fails(jobs: Jobs) -> None:
    """Then the job goes back to its beginning: there is no checkpoint."""
    result = go(jobs, [kill(2, 3, 4), kill(3, 3, 6)])
    assert result.kinds("restart"), result.tail()


#: A layer that the first and the last stage have.
TIED = ("--tied", "two")


@pytest.mark.nightly
@pytest.mark.parametrize("rank", range(8))
def test_layers_tied_between_three_stages(jobs: Jobs, rank: int) -> None:
    draw = random.Random(rank)
    other = draw.choice([each for each in range(8) if each not in (rank, rank ^ 1, (rank + 6) % 12)])
    faults = [kill(rank, 3, draw.randint(1, ROW)), kill(other, 4, draw.randint(1, ROW))]
    once(jobs, faults, ("--tied", "three", "--stages", "4"), 8)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", VARIANTS)
@pytest.mark.parametrize("nth", range(1, ROW + 1))
@pytest.mark.parametrize("rank", range(4))
def test_every_action(jobs: Jobs, rank: int, nth: int, plan: str) -> None:
    once(jobs, [kill(rank, 3, nth)], env=variant(plan))


@pytest.mark.nightly
@pytest.mark.parametrize(("point", "nth"), PLACES)
@pytest.mark.parametrize("rank", range(4))
def test_every_place(jobs: Jobs, rank: int, point: str, nth: int) -> None:
    once(jobs, [kill(rank, 3, nth, point)], ("--clip", "1.0"))


@pytest.mark.nightly
@pytest.mark.parametrize("later", (0, 1), ids=("same-step", "next-step"))
@pytest.mark.parametrize("first", range(6))
def test_two_failures_of_three_pipelines(jobs: Jobs, first: int, later: int) -> None:
    draw = random.Random(10 * first + later)
    for second in range(6):
        ends = {first, second} in ({0, 3}, {1, 4}, {2, 5})
        if second == first or ends:
            continue
        once(jobs, [kill(first, 3, draw.randint(1, ROW)), kill(second, 3 + later, draw.randint(1, ROW))], nproc=6)


#: Steps that take long enough for a replacement to come.
LONG = ("--steps", "16", "--work-ms", "30", "--micro-batches", "2")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "point", ["survivor_group.join_request", "survivor_group.agreed", "recovery.installed", "reroute.action"]
)
def test_a_replacement_fails_again(jobs: Jobs, point: str) -> None:
    again = Fault(3, ANY_STEP, point, "SIGKILL", incarnation=1)
    assert len(once(jobs, [kill(3, 2, 3), again], LONG).struck) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["survivor_group.admit", "survivor_group.agreed", "recovery.installed"])
def test_a_survivor_fails_while_a_replacement_is_admitted(jobs: Jobs, point: str) -> None:
    once(jobs, [kill(3, 2, 3), Fault(0, ANY_STEP, point, "SIGKILL")], LONG)


@pytest.mark.nightly
def test_sums_in_any_order_are_equal_to_rounding(jobs: Jobs) -> None:
    env = {"SWIFT_RECOVERY_ON_FAILURE": "reroute", "SWIFT_RECOVERY_REROUTE_REDUCTION": "sum"}
    reference = jobs.reference(SCRIPT, nproc=4, args=TIED, env=env, launcher="swiftrun")
    result = jobs.run(SCRIPT, nproc=4, args=TIED, env=env, faults=[kill(3, 3, 4)])
    assert result.status == 0 and result.kinds("rerouted") and not result.kinds("restart"), result.tail()
    for each, report in result.reports.items():
        for part in ("losses", "parameters"):
            got, want = report["extra"][part], reference.reports[each]["extra"][part]
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
