"""Where a job whose number of workers changes is cut: nothing that a survivor lacks is built upon."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.errors import RecoveryFailed
from shared_core.protocol.cut import Cut, Offer, choose_cut

#: The same examples in each run.
FIXED = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def offer(rank: int, *boundaries: int, version: int | None = None, slot: int = 0, kind: str = "batch") -> Offer:
    """A worker that has published these boundaries, each one update after the one before."""
    made = tuple((boundary, boundary - 1, kind) for boundary in boundaries)
    return Offer(rank, slot, made, (boundaries[-1] - 1 if boundaries else 0) if version is None else version)


def cut_of(*offers: Offer) -> Cut:
    """The cut, which must not depend on the order of the offers or on who computes it."""
    found = choose_cut({each.rank: each for each in offers})
    assert found == choose_cut({each.rank: Offer.from_json(each.to_json()) for each in reversed(offers)})
    return found


@st.composite
def survivors(draw: st.DrawFn) -> list[Offer]:
    """Workers of one job: boundaries have the same version everywhere, the newest few are kept, and some are
    replacements.
    """
    steps = draw(st.lists(st.integers(0, 2), min_size=8, max_size=8))  # updates of each batch
    versions = [sum(steps[:index]) for index in range(9)]
    found = []
    for rank in draw(st.sets(st.integers(0, 6), min_size=1, max_size=5)):
        newest = draw(st.integers(0, 8))
        oldest = draw(st.integers(max(1, newest - 2), max(1, newest)))
        boundaries = tuple((index, versions[index], "batch") for index in range(oldest, newest + 1))
        reached = versions[newest]
        version = draw(st.none() | st.sampled_from([reached, reached + 1, reached + 2]))
        found.append(Offer(rank, draw(st.integers(0, 2)), boundaries, version))
    return found


@FIXED
@given(survivors())
def test_the_cut_is_the_newest_boundary_that_all_have(offers: list[Offer]) -> None:
    published = [{boundary[0]: boundary for boundary in each.boundaries} for each in offers]
    try:
        cut = cut_of(*offers)
    except RecoveryFailed as error:
        if "has the state" in str(error):
            newest = min(max(boundaries) for boundaries in published)
            assert all(each.version is None for each in offers if each.boundaries[-1][0] == newest)
        else:
            assert "in common" in str(error) and any(published)
            newest = min(max(boundaries, default=0) for boundaries in published)
            assert not all(newest in boundaries for boundaries in published)
        return
    if not any(published):
        assert cut == Cut(0, 0, {})
        return
    # Nobody is asked for a boundary that it has not published or does not keep any more, and none newer could be taken.
    assert all(cut.boundary in boundaries and boundaries[cut.boundary][1] == cut.version for boundaries in published)
    assert not any(all(newer in boundaries for boundaries in published) for newer in range(cut.boundary + 1, 9))
    assert cut.donors
    by_rank = {each.rank: each for each in offers}
    for slot, donor in cut.donors.items():
        chosen = by_rank[donor]
        # What it has published last it can go back to: updates since then are kept.
        assert chosen.slot == slot and chosen.boundaries[-1][0] == cut.boundary
        assert chosen.version is not None and chosen.version >= cut.version
        able = [
            e.rank for e in offers if e.slot == slot and e.boundaries[-1][0] == cut.boundary and e.version is not None
        ]
        assert donor == min(able)
    # Every machine on which someone can hand on does so.
    assert {e.slot for e in offers if e.boundaries[-1][0] == cut.boundary and e.version is not None} == set(cut.donors)


def test_whoever_is_ahead_goes_back_to_who_is_behind() -> None:
    assert cut_of(offer(0, 4, 5, version=5), offer(2, 3, 4, version=4)) == Cut(4, 3, {0: 2})


def test_the_donor_may_have_made_updates_since() -> None:
    assert cut_of(offer(1, 5, 6, version=7), offer(3, 5, 6, version=5)) == Cut(6, 5, {0: 1})


def test_each_machine_has_a_donor_where_it_can() -> None:
    found = cut_of(offer(0, 5, 6, slot=0), offer(1, 5, slot=0), offer(2, 4, 5, slot=1), offer(3, 5, 6, slot=2))
    assert found == Cut(5, 4, {0: 1, 1: 2})


def test_before_the_first_boundary_all_start_over() -> None:
    assert cut_of(offer(0), Offer(2, 0, (), None)) == Cut(0, 0, {})


@pytest.mark.parametrize(
    ("offers", "words"),
    [
        ([offer(0, 1), offer(1)], "no step boundary in common: {0: [1], 1: []}"),
        ([offer(0, 1, 2), offer(1, 4, 5)], "no step boundary in common"),
        (
            [Offer(0, 0, ((4, 3, "batch"),), None), offer(1, 4, 5)],
            "no worker that stays has the state of step boundary 4",
        ),
        ([offer(0, 4, version=2)], "no worker that stays has the state"),
        ([offer(0, 7, kind="end"), offer(1, 7, kind="end")], "just finished a call of the trainer"),
    ],
    ids=["one_has_none", "too_far_apart", "a_replacement_behind", "a_donor_that_is_behind", "between_two_calls"],
)
def test_where_nobody_can_serve(offers: list[Offer], words: str) -> None:
    with pytest.raises(RecoveryFailed) as raised:
        cut_of(*offers)
    assert words in str(raised.value)


def test_the_start_of_an_evaluation_is_a_cut_as_well() -> None:
    assert cut_of(offer(0, 3, kind="eval"), offer(1, 3, kind="eval")) == Cut(3, 2, {0: 0})
