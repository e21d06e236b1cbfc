"""Several replicas send a large state at once, bit for bit; a replica whose state differs declines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shared_core.protocol.frontier import StepBoundary
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.recovery import exchange
from shared_core.worker.recovery.copies import StateCopies
from shared_core.worker.recovery.exchange import Donor, Giving, helpers
from shared_core.worker.spans import Span, bundled, divided
from shared_core.worker.state.local_state import BoundaryPosition
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.updates import Updates

REPLACEMENT = 3
BOUNDARY = StepBoundary(index=1, version=0, entry=0, kind="batch", groups={})


class Rank:
    """One worker with its state."""

    def __init__(self, rank: int, *, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 7))
        optimizer = torch.optim.AdamW(self.net.parameters())
        self.replicated = Replicated([self.net], [optimizer])
        self.updates = Updates("never")
        self.updates.attach(self.replicated)
        env: Any = SimpleNamespace(config=SimpleNamespace(detection=SimpleNamespace(wait_timeout_s=20.0)))
        unused: Any = None
        context: Any = SimpleNamespace(env=env, runtime=unused, store=unused, events=unused)
        copies = StateCopies(context, self.updates, lambda: ())
        self.giving = Giving(rank, Donor(env, unused, self.updates, BoundaryPosition()), copies)
        for _ in range(steps):
            for parameter in self.net.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60.0) for future in [pool.submit(call) for call in calls]]


def connect(store: dist.Store, rank: int) -> InnerGroup:
    limits = {"connect_timeout_s": 20.0, "wait_timeout_s": 20.0}
    long = timedelta(seconds=60)
    return InnerGroup.connect(
        store, rank, range(4), operation_timeout=long, abandoned=lambda: False, what="a test", **limits
    )


@pytest.fixture
def inners() -> Iterator[list[InnerGroup]]:
    store = dist.HashStore()
    found = together([lambda rank=rank: connect(store, rank) for rank in range(4)])  # type: ignore[misc]
    yield found
    for each in found:
        each.discard()


def moved(inners: list[InnerGroup], steps: list[int]) -> tuple[list[Rank], list[int]]:
    """Workers of which the last has taken the state of rank 0, and the bytes that each of the others has given."""
    ranks = [Rank(rank, seed=1, steps=count) for rank, count in enumerate(steps)]
    replacement = Rank(REPLACEMENT, seed=9, steps=0)
    places = [parameter.data_ptr() for parameter in replacement.net.parameters()]
    given = together(
        [
            lambda: ranks[0].giving.give(inners[0], REPLACEMENT, BOUNDARY),
            lambda: ranks[1].giving.help(inners[1], REPLACEMENT, BOUNDARY),
            lambda: ranks[2].giving.help(inners[2], REPLACEMENT, BOUNDARY),
            lambda: replacement.giving.take(inners[REPLACEMENT], 0, [1, 2]),
        ]
    )
    replacement.updates.load(0, *given.pop(), owned=True)
    assert places == [parameter.data_ptr() for parameter in replacement.net.parameters()]
    states = zip(replacement.replicated.summed(), ranks[0].replicated.summed(), strict=True)
    assert all(torch.equal(mine, theirs) for (*_, mine), (*_, theirs) in states)
    for each in (*ranks, replacement):
        for handle in each.updates._handles:
            handle.remove()
    return ranks, given


def test_all_give_a_third(inners: list[InnerGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_SEVERAL", 1)
    _, given = moved(inners, [3, 3, 3])
    assert min(given) > 0.8 * sum(given) / 3


def test_who_has_another_state_gives_nothing(inners: list[InnerGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_SEVERAL", 1)
    _, given = moved(inners, [3, 2, 3])
    assert given[1] == 0 and given[0] > 1.7 * given[2]


def test_a_small_state_comes_from_the_donor(inners: list[InnerGroup]) -> None:
    _, given = moved(inners, [1, 1, 1])
    assert given[0] > 0 and given[1:] == [0, 0]


def test_helpers_are_other_replicas_that_are_there() -> None:
    assert helpers(0, range(8), {3}) == [1, 2]
    assert helpers(6, range(8), {7}) == [0, 1]
    assert helpers(2, [0, 2, 4], {4}) == [0]
    assert helpers(1, range(2), {0}) == []


def test_tensors_are_divided_into_equal_parts() -> None:
    rng = random.Random(3)
    for _ in range(200):
        sizes = [rng.choice([0, 3, 64, rng.randrange(1, 5000)]) for _ in range(rng.randrange(7))]
        count, unit = rng.randrange(1, 6), rng.choice([1, 64])
        found = divided(sizes, count, unit)
        assert len(found) == count
        in_order = [span for part in found for span in part]
        for place, size in enumerate(sizes):
            mine = [span for span in in_order if span.tensor == place]
            assert [span.start for span in mine] + [size] == [0] * (size > 0) + [span.stop for span in mine] or not size
            assert all(span.start % unit == 0 for span in mine)
        share = sum(sizes) / count
        assert all(sum(span.size for span in part) < share + 1 + unit for part in found)


def test_small_spans_travel_in_bundles() -> None:
    spans = [Span(0, 0, 10), Span(1, 0, 90), Span(2, 0, 200), Span(3, 0, 60), Span(4, 0, 60), Span(5, 0, 1)]
    rows = [[span.tensor for span in bundle] for bundle in bundled(spans, alone=150, most=110)]
    assert rows == [[0, 1], [2], [3], [4, 5]]
    assert list(bundled([], 1, 1)) == []
