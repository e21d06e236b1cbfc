"""Bits flip in what one rank computes (``state.recompute_every``): found by a copy that computes the batch again."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import Fault
from tests.support.runner import Mismatch, compare

TRAIN = "plain_ddp.py"
CHANGED = str(Path(__file__).parent / "scripts" / "changed.py")
EACH = {"SWIFT_RECOVERY_STATE_RECOMPUTE_EVERY": "1"}
ARGS = ["--norm", "--steps", "10"]
#: In a batch, in what the model gives, and in a gradient before it is reduced.
FLIPS = [
    Fault(1, 4, "forward.before", "flip.value", bit=30),
    Fault(0, 6, "forward", "flip.value", bit=62),
    Fault(1, 8, "collective.before", "flip.value", nth=4, incarnation=1, bit=30),
]


def test_what_one_rank_computes_wrongly_is_computed_again(jobs: Jobs) -> None:
    result = jobs.check(TRAIN, faults=FLIPS, env=EACH, args=ARGS)
    causes = [str(event.fields["cause"]) for event in result.kinds("failed")]
    assert causes == [
        f"corruption: rank {rank} computed gradients at update {update} that two copies of the worker did not"
        for rank, update in ((1, 3), (0, 5), (1, 7))
    ], causes
    seen = result.kinds("computed_again")
    assert len(seen) >= 14 and not any(event.fields["why"] for event in seen), [event.fields for event in seen]


@pytest.mark.parametrize("flip", FLIPS, ids=str)
def test_without_the_option_the_run_ends_with_other_bits(flip: Fault, jobs: Jobs) -> None:
    result = jobs.run(TRAIN, faults=[replace(flip, incarnation=0)], args=ARGS)
    assert result.status == 0 and not result.kinds("failed") and len(result.struck) == 1, result.tail()
    with pytest.raises(Mismatch):
        compare(result, jobs.reference(TRAIN, args=ARGS))


def test_a_copy_changes_nothing_outside(jobs: Jobs) -> None:
    """What writes to a file is not computed again, and says so; a file that is read on from stays where it was."""
    for what, lines in (("writing", 6), ("reading", 8)):
        args = [what, "--steps", "6"]
        result = jobs.run(CHANGED, env=EACH, args=args)
        compare(result, jobs.reference(CHANGED, args=args))
        seen = [event.fields["why"] for event in result.kinds("computed_again")]
        log = Path(result.out, "lines0")
        assert len(log.read_text().splitlines()) == lines, log.read_text()
        if what == "writing":
            says = f"a copy ended, because the batch calls open to write {log}"
            assert says in result.stderr and all("to write" in why for why in seen), result.tail()
        else:
            assert len(seen) >= 6 and not any(seen), seen


def test_a_copy_that_computes_wrongly_takes_nobody_out(jobs: Jobs) -> None:
    args = ["misled", "--steps", "5"]
    result = jobs.run(CHANGED, env=EACH, args=args)
    compare(result, jobs.reference(CHANGED, args=args))
    assert "its copy had computed something else, and another copy did not" in result.stderr, result.tail()
    assert not result.kinds("failed"), result.tail()


@pytest.mark.parametrize(
    ("script", "args", "env", "why"),
    [
        (TRAIN, [], {"OMP_NUM_THREADS": "2"}, "operations of torch use 2 threads: set OMP_NUM_THREADS=1"),
        (CHANGED, ["sharing"], {}, "this worker shares memory ("),
    ],
)
def test_where_a_copy_cannot_compute_it_is_refused(
    script: str, args: list[str], env: dict[str, str], why: str, jobs: Jobs
) -> None:
    result = jobs.run(script, env=EACH | env, args=[*args, "--steps", "6"])
    says = f"Unsupported: state.recompute_every has a copy of each worker compute a batch again, and {why}"
    assert result.status == 1 and says in result.stderr, result.tail()


def test_what_differs_each_time_is_no_corruption(jobs: Jobs) -> None:
    result = jobs.run(TRAIN, env=EACH, args=["--steps", "6", "--mistake", "unseeded"])
    assert result.status == 1 and not result.kinds("restart"), result.tail()
    assert "and its copy have computed other gradients from the same batch at update" in result.stderr, result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(24))
def test_flips_anywhere(seed: int, jobs: Jobs) -> None:
    """A flip of a bit that changes no gradient is no fault; nothing else than one that does is found."""
    draw = random.Random(seed)
    env = EACH | ({"SWIFT_RECOVERY_STATE_VERIFY_EVERY": "1"} if seed % 2 else {})
    points = [("forward.before", 1), ("forward", 1), ("collective.before", draw.choice((3, 4)))]
    faults = []
    for rank, step in zip(draw.sample(range(3), 3), (4, 6, 8), strict=True):
        point, nth = draw.choice(points)
        faults.append(Fault(rank, step, point, "flip.value", nth=nth, bit=draw.getrandbits(20)))
    result = jobs.run(TRAIN, nproc=3, faults=faults, env=env, args=ARGS, timeout_s=120)
    compare(result, jobs.reference(TRAIN, nproc=3, args=ARGS))
    found = [event.rank for event in result.kinds("failed")]
    assert set(found) <= {fault.rank for fault in faults} and len(found) == len(set(found)), result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "args", "steps"),
    [
        ("acc.py", [], (4, 6)),
        ("lit.py", ["--feature", "clip_norm"], (4, 6)),
        ("lit.py", ["--feature", "accumulate"], (10, 14)),
        ("lit.py", ["--feature", "batchnorm"], (4, 6)),
    ],
)
def test_frameworks(script: str, args: list[str], steps: tuple[int, int], jobs: Jobs) -> None:
    faults = [Fault(rank, step, "forward.before", "flip.value", bit=30) for rank, step in enumerate(steps)]
    result = jobs.check(script, faults=faults, env=EACH, args=args, timeout_s=120)
    assert len(result.kinds("computed_again")) > 4 and not any(e.fields["why"] for e in result.kinds("computed_again"))
