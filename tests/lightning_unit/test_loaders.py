"""A loader is put back, in fresh objects, to the middle of an epoch, and continues bit for bit."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from shared_core.errors import Unsupported
from shared_core.loaders import wrap_loader

Batch = torch.Tensor


class Augmented(Dataset[Batch]):
    """Items with noise from all three global generators, and a counter in the data set itself."""

    def __init__(self, size: int = 22) -> None:
        self.size, self.reads = size, 0
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        self.reads += 1
        noise = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *noise, float(self.own.random())], dtype=torch.float64)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "distributed": lambda: DataLoader(
        d := Augmented(), batch_size=3, sampler=DistributedSampler(d, num_replicas=2, rank=1, seed=4)
    ),
    "workers": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=2),
}


def run(
    make: Callable[[], Any], stop: tuple[int, int], resume: bytes | None, **options: Any
) -> tuple[list[Batch], bytes]:
    """The batches of four epochs from ``stop`` on, and the state pickled there; with ``resume``, those after it."""
    torch.manual_seed(5), random.seed(6), np.random.seed(7)
    loader = wrap_loader(make(), ahead=0, lazy=resume is not None, **options)
    iterator, seen, state = iter(loader), list[Batch](), b""
    first, number = (0, 0) if resume is None else stop
    if resume is not None:
        loader.restore(pickle.loads(resume))
    for epoch in range(first, 4):
        if epoch > first:
            iterator, number = iter(loader), 0
        if isinstance(sampler := getattr(loader, "sampler", None), DistributedSampler):
            sampler.set_epoch(epoch)
        while True:
            if (epoch, number) == stop and resume is None:
                state, seen = pickle.dumps(loader.state(iterator)), []
            if number == 5 or (batch := next(iterator, None)) is None:
                break
            torch.rand(3), np.random.rand(2)  # what a training step does to the generators
            seen.append(batch)
            number += 1
    return seen, state


def assert_same(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b), (a, b)


class Pure(Augmented):
    """Items that depend on nothing but the global generators."""

    def __init__(self, size: int = 22) -> None:
        super().__init__(size)
        self.indices: list[int] = []

    def __getitem__(self, index: int) -> Batch:
        self.indices.append(index)
        return torch.tensor([float(index), float(torch.rand(())), random.random(), float(np.random.rand())])


@pytest.mark.parametrize("stop", [(0, 3), (2, 0)])
@pytest.mark.parametrize("name", LOADERS)
def test_seeded_continues_without_reading(name: str, stop: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Augmented", Pure)
    datasets: list[Pure] = []

    def make() -> Any:
        loader = LOADERS[name]()
        datasets.append(loader.dataset)
        return loader

    options = {"mode": "seeded", "seed": 9, "rank": 1}
    expected, state = run(make, stop, None, **options)
    resumed, _ = run(make, stop, state, **options)
    assert_same(expected, resumed)
    if name != "workers":
        rows = sum(1 if batch.dim() == 1 else len(batch) for batch in resumed)
        assert len(datasets[1].indices) == rows, "skipped items were read"


def test_seeded_items_do_not_depend_on_the_model() -> None:
    def batches(draws: int) -> list[Batch]:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        out = []
        for batch in wrap_loader(DataLoader(Pure(), batch_size=4, shuffle=True), mode="seeded"):
            torch.rand(draws)
            out.append(batch)
        return out

    assert_same(batches(1), batches(7))


class Stateful:
    """The protocol of resumable loaders: ``state_dict`` and ``load_state_dict``."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Batch]:
        while self.at < 10:
            self.at += 1
            yield torch.tensor([float(self.at)])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_order_that_depends_on_time_is_refused() -> None:
    with pytest.raises(Unsupported, match="in_order=True"):
        wrap_loader(DataLoader(Augmented(), num_workers=1, in_order=False))
