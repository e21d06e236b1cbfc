"""The rest of a pass over the data is dealt out to another number of workers; who continues with whose state."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared_core.errors import RecoveryFailed
from shared_core.loaders.reshard import (
    MARK,
    advance,
    at_path,
    divide,
    loader_states,
)
from shared_core.protocol.worker_env import Resized
from shared_core.worker.checkpoints.resharding import sources

#: The same examples in each run.
FIXED = settings(max_examples=100, deadline=None, derandomize=True, database=None)
WORKERS = st.integers(1, 7)


def batches(sizes: list[list[int]]) -> list[list[list[int]]]:
    """Rests of old workers with batches of these sizes; no sample appears twice."""
    numbers = iter(range(10**6))
    return [[[next(numbers) for _ in range(size)] for size in rest] for rest in sizes]


def samples_of(rests: list[list[Any]]) -> Counter[Any]:
    return Counter(sample for rest in rests for batch in rest for sample in batch)


@FIXED
@given(st.lists(st.lists(st.integers(1, 5), max_size=6), max_size=6), WORKERS)
@example([[1], [1, 1], [1]], 3)
@example([[2, 1], [2, 2]], 3)
@example([[2], [2]], 3)
def test_batches_are_dealt_out(sizes: list[list[int]], workers: int) -> None:
    rests = batches(sizes)
    before, dealt = samples_of(rests), divide(rests, workers)
    after = samples_of(dealt)
    assert len(dealt) == workers and len({len(rest) for rest in dealt}) == 1
    assert after.keys() == before.keys()
    if not before:
        assert dealt == [[]] * workers
        return
    largest = max(max(rest) for rest in sizes if rest)
    dealt_sizes = [[len(batch) for batch in rest] for rest in dealt]
    assert all(1 <= size <= largest for rest in dealt_sizes for size in rest)
    if before.total() < workers:
        assert all(rest == [1] for rest in dealt_sizes)
    elif largest > 1:
        assert after == before
    else:  # a batch of two is none that the program has ever seen
        assert after.total() == before.total() + -before.total() % workers
    # As few are used twice as can be, and none much more often than others.
    assert max(after.values()) - min(after.values()) <= 1
    # Only the last two steps may be smaller than those before.
    steps = list(zip(*dealt_sizes, strict=True))
    assert all(set(step) == {largest} for step in steps[:-2])
    assert all(max(step) - min(step) <= 1 for step in steps)


# -- the state of a loader --------------------------------------------------------------------------------------------


def loader(delivered: int, ahead: int = 0, order: str = "order.1", live: bool = True, count: int = 1) -> dict[str, Any]:
    """What a worker publishes of a loader, as far as it matters here."""
    iterations = [{"delivered": delivered, "order": order}] if live else []
    return {MARK: True, "ahead": ahead, "live": live, "count": count, "iterations": iterations}


def test_a_pass_that_began_while_a_worker_failed_is_not_guessed_at() -> None:
    with pytest.raises(RecoveryFailed, match="its order is not known"):
        advance(loader(9), loader(9), loader(1, count=2))
    with pytest.raises(RecoveryFailed, match="its order is not known"):
        advance(loader(0, live=False), loader(0, live=False), loader(1))


def nested(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Published parts: dictionaries, lists and tuples, with ``leaf`` somewhere inside."""
    keys = st.sampled_from(["a", "b", 0, 1])
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, max_size=3), st.lists(inner, max_size=3), st.tuples(inner, inner)
        ),
        max_leaves=12,
    )


@FIXED
@given(nested(st.one_of(st.none(), st.integers(), st.text(max_size=3), st.integers(0, 99).map(loader))), st.data())
def test_every_loader_is_found_and_found_again(parts: Any, data: st.DataObject) -> None:
    found = list(loader_states(parts))
    assert sum(1 for _ in found) == str(parts).count(f"'{MARK}': True")
    for path, state in found:
        assert at_path(parts, path) is state
        assert at_path(parts, (*path, "more")) is None
        if path:
            assert at_path(None, path) is None
    somewhere = data.draw(st.lists(st.sampled_from(["a", "b", 0, 1, 2, MARK]), max_size=4))
    there = at_path(parts, somewhere)
    assert there is None or any(state is there for _, state in found)


# -- whose state continues --------------------------------------------------------------------------------------------


@st.composite
def changes(draw: st.DrawFn) -> tuple[Resized, set[int], int]:
    """``(what was handed over, who published the step boundary, new number of workers)``."""
    world = draw(st.integers(1, 8))
    stay = draw(st.sets(st.integers(0, world - 1), min_size=1))
    published = stay | draw(st.sets(st.integers(0, world - 1)))
    order = draw(st.permutations(sorted(stay)))
    return Resized(1, world, tuple(order), 5), published, draw(st.integers(len(stay), 10))


@FIXED
@given(changes())
def test_ranks_continue_in_their_order(change: tuple[Resized, set[int], int]) -> None:
    resized, published, workers = change
    found = sources(resized.stay, published, workers)
    kept = len(resized.stay)
    assert len(found) == workers and found[kept:] == [None] * (workers - kept)
    old = [rank for rank in found[:kept] if rank is not None]
    assert len(old) == kept and old == sorted(set(old)) and set(old) <= published
    if 0 in published:
        assert old == [0, *sorted(resized.stay)[1:]]
    else:
        assert old == sorted(resized.stay)


def test_what_is_dealt_out_does_not_depend_on_who_asks() -> None:
    """Each new worker computes the whole division and takes its own part."""
    sizes = [[random.Random(3).randint(1, 4) for _ in range(9)] for _ in range(5)]
    assert divide(batches(sizes), 3) == divide(batches(sizes), 3)
