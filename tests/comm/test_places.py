"""Ranks that exchange something from different places of the program are found out; those that mean to are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import Jobs, few

from shared_core.faults import Fault
from shared_core.protocol.place import CollectivePlace, apart
from shared_core.worker.comm.places import GroupPlaces
from tests.support.cluster import Cluster
from tests.support.namespaces import machines, unavailable
from tests.support.runner import compare

SCRIPT = str(Path(__file__).parent / "scripts" / "places.py")
#: A replacement does not get the variables of the script back, as if they were of a kind that cannot be captured.
BLIND = {"SWIFT_TEST_NO_VARIABLES": "1"}
KILL = [Fault(1, 2, "update.after", "SIGKILL")]
#: Faults, and the two places that the error names.
MISTAKES = {
    "by_rank": ([], "epoch 1, pass 1, batch 0", "epoch 0, pass 1, batch 3"),
    "by_replacement": (KILL, "epoch 1, pass 1, batch 0", "epoch 0, pass 1, batch 3"),
    "skips": (KILL, "epoch 0, pass 1, batch 3", "epoch 0, pass 1, batch 4"),
    "receives": ([Fault(1, 3, "step_boundary", "SIGKILL")], "epoch 0, pass 1, batch 3", "epoch 0, pass 1, batch 4"),
}
#: Ways in which ranks are at different places and mean to.
MEANT = ("local", "cycles", "main_alone", "late")


@pytest.mark.parametrize("way", few(MISTAKES, "skips"))
def test_ranks_at_different_places_end_with_an_error_that_names_both(way: str, jobs: Jobs) -> None:
    faults, *places = MISTAKES[way]
    result = jobs.run(SCRIPT, faults=faults, args=[way], env=BLIND)
    assert result.status == 1, result.tail()
    (line,) = result.told("the job failed")
    found = re.search(r"PlaceMismatch: rank (\d) calls .* from (.*), and rank (\d) calls it from (.*?)\. ", line)
    assert found is not None, result.tail()
    assert {found[1], found[3]} == {"0", "1"} and {found[2], found[4]} == set(places), line


def test_a_plain_counter_gives_the_same_bits_or_the_error(jobs: Jobs) -> None:
    """Whether a replacement gets it back or not."""
    result = jobs.run(SCRIPT, faults=[Fault(1, 23, "update.after", "SIGKILL")], args=["plain_counter"])
    if result.status:
        (line,) = result.told("the job failed")
        assert "PlaceMismatch" in line and "from epoch 3, pass 1, batch 0" in line, result.tail()
    else:
        compare(result, jobs.reference(SCRIPT, args=["plain_counter"]))


def test_no_rank_makes_a_step_with_what_was_mixed(jobs: Jobs) -> None:
    """Up to there each has made three steps."""
    result = jobs.run(SCRIPT, faults=MISTAKES["by_rank"][0], args=["by_rank"], env=BLIND)
    assert result.status == 1 and not result.reports, result.tail()
    assert (result.out / "steps0.txt").read_text().split() == ["0"] * 3
    assert (result.out / "steps1.txt").read_text().split() == ["0"] * 3


@pytest.mark.parametrize("way", few(MISTAKES, "by_rank"))
def test_control_nothing_else_notices_that(way: str, jobs: Jobs) -> None:
    result = jobs.run(SCRIPT, faults=MISTAKES[way][0], args=[way, "--blind"], env=BLIND)
    assert result.status == 0 and len(result.reports) == 2, result.tail()


@pytest.mark.parametrize("way", few(MEANT, "late"))
def test_places_that_differ_on_purpose_are_no_error(way: str, jobs: Jobs) -> None:
    reference = jobs.reference(SCRIPT, args=[way])
    without = jobs.run(SCRIPT, args=[way])
    assert without.status == 0, without.tail()
    assert {rank: each["digests"] for rank, each in without.reports.items()} == {
        rank: each["digests"] for rank, each in reference.reports.items()
    }


@pytest.mark.parametrize("way", few([way for way in MEANT if way != "local"], "cycles"))
def test_nor_after_a_failure(way: str, jobs: Jobs) -> None:
    jobs.check(SCRIPT, faults=[Fault(1, 11, "step_boundary", "SIGKILL")], args=[way])


@pytest.mark.parametrize("framework", few(("lightning", "fabric", "accelerate"), "lightning"))
def test_epochs_of_a_framework_are_compared_too(framework: str, jobs: Jobs) -> None:
    result = jobs.run(str(Path(__file__).parent / "scripts" / "places_in.py"), args=[framework])
    assert result.status == 1, result.tail()
    (line,) = result.told("the job failed")
    assert "PlaceMismatch" in line and "epoch 1, pass 1, batch 0" in line and "epoch 0, pass 1, batch 3" in line, line


@pytest.mark.nightly
@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "machines can be made")
@pytest.mark.parametrize("blind", [False, True])
def test_ranks_on_two_machines_are_compared_too(blind: bool, jobs: Jobs) -> None:
    with machines(2) as made:
        args = ["by_rank", *(["--blind"] if blind else [])]
        cluster = Cluster(jobs.warm, made, jobs.folder("machines"), Path(SCRIPT), nproc=1, args=args)
        try:
            result, _ = cluster.finish()
        finally:
            cluster.stop()
    found = re.findall(
        r"PlaceMismatch: rank \d calls .* from epoch \d.* and rank \d calls it from epoch", result.stderr
    )
    assert bool(found) != blind and (result.status == 0) == blind, result.tail()


E0, E1 = CollectivePlace(epoch=0, phase=1, pass_=1, batch=4), CollectivePlace(epoch=1, phase=1, pass_=1, batch=1)


def test_only_what_no_program_means_is_refused_without_a_failure() -> None:
    next_batch, later = E0._replace(batch=5), E0._replace(pass_=2, batch=1)
    assert not apart((E0, E0), (E1, E1), recovered=False)
    assert not apart((E0, E0), (E0, next_batch), recovered=False), "other numbers of local batches"
    assert not apart((E0, E0), (later, next_batch), recovered=False), "own passes over own data"
    assert not apart((E0, E1), (E1, E1._replace(epoch=2)), recovered=False), "each has begun an epoch"
    assert apart((E0, E0), (E1, next_batch), recovered=False), "only one has begun an epoch"
    assert not apart((None, E0), (E1, next_batch), recovered=False), "it is not known"
    assert apart((E0, E0), (E0, next_batch), recovered=True)
    assert not apart((None, None), (E0, E0), recovered=True)


def _members(path: Path) -> list[GroupPlaces]:
    return [GroupPlaces(path, (4, 7), own) for own in (0, 1)]


def test_members_see_where_others_have_called(tmp_path: Path) -> None:
    one, two = _members(tmp_path / "places")
    for seq in range(2000):
        for member in (one, two):
            member.called(seq, E0.packed())
        assert one.elsewhere(seq, E0.packed(), recovered=True) is None
    one.called(2000, E1.packed())
    assert one.elsewhere(2000, E1.packed(), recovered=True) is None, "the other has not called it yet"
    two.called(2000, E0.packed())
    assert one.elsewhere(2000, E1.packed(), recovered=True) == (7, E0)
    assert two.elsewhere(2000, E0.packed(), recovered=False) == (4, E1)
    assert two.own_before(2001)[-1] == (2000, E0)


def test_members_that_differ_before_a_failure_may_differ_after_it(tmp_path: Path) -> None:
    one, two = _members(tmp_path / "places")
    late = E0._replace(batch=9)
    for recovered in (False, True):
        one.called(0, E0.packed())
        two.called(0, late.packed())
        assert two.elsewhere(0, late.packed(), recovered=recovered) is None
        one.sent((0, 1, 5), 3, E0.packed())
        assert two.sent_elsewhere((0, 1, 5), 3, late.packed(), recovered=recovered) is None
    other, _ = _members(tmp_path / "others")
    other.sent((0, 1, 5), 3, E0.packed())
    assert other.sent_elsewhere((0, 1, 5), 3, late.packed(), recovered=True) == (4, E0)
    assert other.sent_elsewhere((0, 1, 5), 4, late.packed(), recovered=True) is None, "it is another message"
