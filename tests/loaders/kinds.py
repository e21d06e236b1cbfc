"""Loaders of many kinds, and a process that reads one, fails, and is replaced."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info

from shared_core.loaders import read_random, wrap_loader, write_random

Batch = torch.Tensor
SIZE, ROWS = 24, 2
#: Environment variable: file in which each item that is read is noted.
LOG = "TEST_READS"
#: Counted by a function without an object of its own.
collated = 0


def note(index: int) -> None:
    """An item is read."""
    if log := os.environ.get(LOG):
        with open(log, "a", encoding="ascii") as file:
            file.write(f"{index}\n")


def row(index: int, *more: float) -> Batch:
    """An item with noise of all three global generators."""
    note(index)
    noise = (float(torch.rand(())), random.random(), float(np.random.randn()))
    return torch.tensor([float(index), *noise, *more], dtype=torch.float64)


class Plain(Dataset[Batch]):
    """Items with noise; counts which are read."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Batch:
        self.count += 1
        return row(index, float(self.count))


class Lazy(Plain):
    """Makes its generator when it reads the first item."""

    generator: Any = None

    def __getitem__(self, index: int) -> Batch:
        if self.generator is None:
            self.generator = np.random.default_rng(int(torch.randint(1000, ())))
        return row(index, self.generator.random())


class Cache(Plain):
    """Keeps what it drew for an item."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Batch] = {}

    def __getitem__(self, index: int) -> Batch:
        index //= 2
        if index not in self.kept:
            self.kept[index] = row(index)
        return self.kept[index]


class Kept(Plain):
    """Keeps what any process would have read."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Batch] = {}

    def __getitem__(self, index: int) -> Batch:
        note(index)
        return self.kept.setdefault(index, torch.tensor([float(index), 0.0, 1.0, 2.0]))


class Slots(Cache):
    """The same in a long list, whose length does not change; read more than once in an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[Any] = [None] * 400

    def __getitem__(self, index: int) -> Batch:
        if self.slots[index] is None:
            self.slots[index] = row(index)
        return row(index) + self.slots[index]


class Averaged(Plain):
    """Adds what it has read before, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = np.zeros(1)

    def __getitem__(self, index: int) -> Batch:
        self.sum += index
        return row(index, float(self.sum[0]))


class Saying(Averaged):
    """The same, but it can say where it is."""

    def state_dict(self) -> dict[str, Any]:
        return {"sum": float(self.sum[0])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum = np.full(1, state["sum"])


class Shared(Plain):
    """Draws from the generator that its sampler draws from."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __getitem__(self, index: int) -> Batch:
        return row(index, float(torch.rand((), generator=self.generator)))


class Many(Plain):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        return [row(index, float(len(indices))) for index in indices]


class Prepared(Plain):
    """Looks at which worker it is in, as its ``worker_init_fn`` has told it."""

    offset = 0.0

    def __getitem__(self, index: int) -> Batch:
        info = get_worker_info()
        assert info is not None and info.dataset is self
        return row(index, self.offset, float(info.seed % 1000))


def prepare(worker: int) -> None:
    """A ``worker_init_fn``."""
    info = get_worker_info()
    assert info is not None and type(info.dataset) is Prepared
    info.dataset.offset = 100.0 * worker + float(np.random.rand())


class Reading(Sampler[int]):
    """Draws from a global generator as it goes, and looks at its data set."""

    def __init__(self, dataset: Plain) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield (int(torch.randint(SIZE, ())) + self.dataset.count) % SIZE


class Restless(Sampler[int]):
    """Draws from a global generator with each index."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        left = list(range(SIZE))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class Eager:
    """A batch sampler of tuples that draws when its iterator is made."""

    def __len__(self) -> int:
        return SIZE // ROWS

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        order = torch.randperm(SIZE).tolist()
        return iter([tuple(order[at : at + ROWS]) for at in range(0, SIZE, ROWS)])


class Collate:
    """Mixes each batch with the one before."""

    last: Any = None

    def __call__(self, items: list[Batch]) -> Batch:
        batch = torch.stack(items)
        mixed = batch if self.last is None else batch + torch.rand(()) * self.last
        self.last = batch
        return mixed


def counting() -> Callable[[list[Batch]], Batch]:
    """A ``collate_fn`` that counts in its closure."""
    count = 0

    def collate(items: list[Batch]) -> Batch:
        nonlocal count
        count += 1
        return torch.stack(items) + count

    return collate


def count_globally(items: list[Batch]) -> Batch:
    """A ``collate_fn`` that counts in a global variable."""
    global collated
    collated += 1
    return torch.stack(items) + collated


def shaken(items: list[Batch]) -> Batch:
    """A ``collate_fn`` with noise."""
    return torch.stack(items) + torch.rand(()) + random.random()


class Remembering(Plain):
    """Items from a function that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.load = lru_cache(row)

    def __getitem__(self, index: int) -> Batch:
        return self.load(index // 3)


class Counter(IterableDataset[Batch]):
    """A stream that can say where it is."""

    reads = 0

    def __init__(self, noisy: bool = False) -> None:
        self.noisy, self.at, self.start = noisy, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        first, self.start = self.start, 0
        for self.at in range(first, SIZE):
            Counter.reads += 1
            note(self.at)
            noise = float(torch.rand(())) if self.noisy else 0.0
            self.at += 1
            yield torch.tensor([float(self.at), noise])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.at = state["at"]


class Shuffled(IterableDataset[Batch]):
    """A stream with noise that cannot say where it is; each loader worker has a part of it."""

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(17)).tolist()
        for index in order[first::step]:
            yield row(index)


class Parts(IterableDataset[Batch]):
    """A stream that can say where it is and has a generator; loader workers have parts of different lengths."""

    def __init__(self) -> None:
        self.passes, self.at, self.start = 0, 0, 0
        self.noise = np.random.default_rng(19)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        begin, end = (0, SIZE) if info is None else ((0, 15), (15, SIZE))[info.id]
        first, self.start = self.start, 0
        for self.at in range(first + 1, end - begin + 1):
            note(begin + self.at - 1)
            yield torch.tensor([float(begin + self.at), float(self.passes), self.noise.random(), 0.0])
        self.passes += 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes, "noise": self.noise.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = self.at = state["at"]
        self.passes = state["passes"]
        self.noise.bit_generator.state = state["noise"]


class Stateful:
    """A loader that can say where it is."""

    reads = 0

    def __init__(self) -> None:
        self.at = 0
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[Batch]:
        while self.at < SIZE:
            self.at += 1
            Stateful.reads += 1
            note(self.at)
            yield torch.rand(2, generator=self.generator) + self.at
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(state["generator"])


def shared_generator() -> DataLoader[Batch]:
    """Sampler and data set draw by turns from one generator."""
    generator = torch.Generator().manual_seed(11)
    data = Shared(generator)
    sampler = RandomSampler(data, replacement=True, num_samples=200, generator=generator)
    return DataLoader(data, batch_size=20, sampler=sampler)


def loader(data: Dataset[Batch], **options: Any) -> DataLoader[Batch]:
    """A shuffled loader, in batches of two."""
    return DataLoader(data, **({"batch_size": ROWS, "shuffle": True} | options))


LASTING = {"num_workers": 2, "persistent_workers": True}
KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: loader(Plain()),
    "lazy": lambda: loader(Lazy()),
    "cache": lambda: loader(Cache()),
    "slots": lambda: loader(d := Slots(), shuffle=False, sampler=RandomSampler(d, replacement=True)),
    "averaged": lambda: loader(Averaged()),
    "saying": lambda: loader(Saying()),
    "many": lambda: loader(Many()),
    "remembering": lambda: loader(Remembering()),
    "shared_generator": shared_generator,
    "reading": lambda: DataLoader(d := Plain(), batch_size=ROWS, sampler=Reading(d)),
    "kept": lambda: loader(Kept()),
    "restless": lambda: DataLoader(Plain(), batch_size=ROWS, sampler=Restless()),
    "eager": lambda: DataLoader(Plain(), batch_sampler=Eager()),
    "mixing": lambda: loader(Plain(), collate_fn=Collate()),
    "shaken": lambda: loader(Plain(), collate_fn=shaken),
    "counting": lambda: loader(Plain(), collate_fn=counting()),
    "count_globally": lambda: loader(Plain(), collate_fn=count_globally),
    "counter": lambda: DataLoader(Counter(), batch_size=ROWS),
    "noisy_counter": lambda: DataLoader(Counter(noisy=True), batch_size=ROWS),
    "stateful": Stateful,
    "stream": lambda: DataLoader(Shuffled(), batch_size=ROWS),
    "parts": lambda: DataLoader(Parts(), batch_size=ROWS),
    "workers": lambda: loader(Plain(), num_workers=2),
    "workers_lazy": lambda: loader(Lazy(), num_workers=2),
    "workers_cache": lambda: loader(Cache(), num_workers=1),
    "workers_averaged": lambda: loader(Averaged(), num_workers=2),
    "workers_saying": lambda: loader(Saying(), num_workers=2),
    "workers_prepared": lambda: loader(Prepared(), num_workers=2, worker_init_fn=prepare),
    "workers_eager": lambda: DataLoader(Plain(), batch_sampler=Eager(), num_workers=3, prefetch_factor=1),
    "workers_unbatched": lambda: loader(Plain(), batch_size=None, num_workers=2),
    "workers_many": lambda: loader(Many(), num_workers=2, prefetch_factor=4),
    "workers_shaken": lambda: loader(Plain(), num_workers=2, collate_fn=shaken),
    "workers_stream": lambda: DataLoader(Shuffled(), batch_size=ROWS, num_workers=2),
    "workers_parts": lambda: DataLoader(Parts(), batch_size=ROWS, num_workers=2),
    "workers_parts_shaken": lambda: DataLoader(Parts(), batch_size=ROWS, num_workers=2, collate_fn=shaken),
    "workers_noisy_counter": lambda: DataLoader(Counter(noisy=True), batch_size=ROWS, num_workers=2),
    "workers_parts_single": lambda: DataLoader(Parts(), batch_size=None, num_workers=2),
    "lasting": lambda: loader(Plain(), **LASTING),
    "lasting_parts": lambda: DataLoader(Parts(), batch_size=ROWS, **LASTING),
    "lasting_parts_shaken": lambda: DataLoader(Parts(), batch_size=ROWS, collate_fn=shaken, drop_last=True, **LASTING),
    "lasting_lazy": lambda: loader(Lazy(), **LASTING),
    "lasting_cache": lambda: loader(Cache(), **LASTING),
    "lasting_prepared": lambda: loader(Prepared(), worker_init_fn=prepare, **LASTING),
}


class Life:
    """One worker that reads a loader, epoch by epoch, with ``ahead`` items fetched before their use.

    Args:
        name: of the kind of loader.
        ahead: 0 or 1.
        leave: batches after which each epoch is left; 0: none.
        wrapped: by the product; else read as it is.
        state: of the failed worker.
        draws: training steps draw random numbers.
    """

    def __init__(
        self, name: str, ahead: int, leave: int, wrapped: bool = True, state: bytes = b"", draws: bool = True
    ) -> None:
        torch.manual_seed(5), random.seed(6), np.random.seed(7)
        globals()["collated"] = 0
        self._ahead, self._leave, self._draws = ahead, leave, draws
        self.loader = KINDS[name]()
        if wrapped:
            self.loader = wrap_loader(self.loader, ahead=ahead, lazy=bool(state))
        self.epoch, self.number = 0, 0
        self._iterator = iter(self.loader)
        self._waiting: list[Batch] = []
        if state:
            found = pickle.loads(state)
            self.epoch, self.number = found["place"]
            self.loader.restore(found["loader"], self._iterator)
            if found["waiting"]:
                self._waiting = list(self._iterator.last_items)[-1:]  # type: ignore[attr-defined]
            write_random(found["random"])
        else:
            self._fetch()

    def _fetch(self) -> None:
        while len(self._waiting) < self._ahead:
            try:
                self._waiting.append(next(self._iterator))
            except StopIteration:
                return

    def next(self) -> Batch | None:
        """The next batch, as a training step uses it; None at the end of an epoch."""
        try:
            batch = self._waiting.pop() if self._ahead and self._waiting else next(self._iterator)
        except StopIteration:
            batch = None
        if batch is None or self._leave and self.number == self._leave:
            self._waiting.clear()
            self.epoch, self.number = self.epoch + 1, 0
            self._iterator = iter(self.loader)
            self._fetch()
            return None
        self._fetch()
        if self._draws:
            torch.rand(3), np.random.randn(1)
        self.number += 1
        return batch

    def state(self) -> bytes:
        """What is published at a step boundary."""
        place = (self.epoch, self.number)
        return pickle.dumps(
            {
                "loader": self.loader.state(self._iterator),
                "random": read_random(),
                "place": place,
                "waiting": len(self._waiting),
            }
        )
