"""Data whose randomness is a function of its place: skipping a batch then costs its indices, not its items."""

from __future__ import annotations

import copy
import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from shared_core.loaders.randomness import (
    DrawLog,
    OwnedState,
    RandomParts,
    RawRandom,
    restore_raw,
    seed_random,
    write_random,
)

_SAMPLER = -1
#: Number of a draw and the random parts it started from, for each draw that consumed global randomness.
Draws = dict[int, RandomParts]


def place_seed(*place: int) -> int:
    """A 64-bit seed from the numbers that name a place (seed, rank, epoch, batch, index in the batch)."""
    digest = hashlib.blake2b(struct.pack(f"<{len(place)}q", *place), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


class SeededBatch(list[int]):
    """Indices of one batch with the place it has in the run; travels to worker processes instead of a plain list."""

    place: tuple[int, ...] = ()


class SeededIndex:
    """One index (``batch_size=None``) with its place."""

    __slots__ = ("index", "place")

    def __init__(self, index: Any, place: tuple[int, ...]) -> None:
        self.index, self.place = index, place


class Indices:
    """Stands for a loader's batch sampler (or sampler): skips, seeds and watches its draws.

    Args:
        inner: the sampler that the user's loader has.
        batched: whether it yields the indices of a batch, or one index.
        known: whether it draws global randomness at most with its first index.
        place: seed, rank and epoch in seeded mode, read when an iteration starts; else None.
    """

    def __init__(self, inner: Any, batched: bool, known: bool, place: list[int] | None) -> None:
        self.inner = inner
        self._batched = batched
        self._known = known
        self._place = place
        #: Taken over by iterators made while they are set (a loader with workers makes two).
        self.skip = 0
        self.replay: Draws = {}
        #: What to draw instead of the sampler's indices, and the number of its first.
        self.listed: list[Any] | None = None
        self.first = 0
        #: Given the indices of an iteration before the first is drawn, where they must be known in advance.
        self.announce: Callable[[list[Any]], None] | None = None
        #: Draws of the current iteration that consumed global randomness (refetch mode).
        self.draws: Draws = {}

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while unpickling
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        log = DrawLog()
        self.draws = log.notes
        source = self._source(self.listed)
        if self._place is None:
            return self._watched(source, log, self.replay)
        return self._seeded(source, tuple(self._place), self.skip, self.first)

    def _source(self, listed: list[Any] | None) -> Iterator[Any]:
        """Indices of an iteration, drawn when the first is asked for."""
        if listed is None and self.announce is None:
            yield from self.inner
            return
        if listed is not None:
            yield from listed
            return
        random, owner = RawRandom(), OwnedState({"sampler": self.inner})
        owned = owner.capture()
        drawn = list(self.inner)
        if self.announce is not None:
            self.announce(drawn)
        if self._known:
            # Drawn again as they are asked for: a pass that the script leaves early has drawn less, and at the end a
            # RandomSampler draws once more.
            restore_raw(random)
            owner.restore(owned)
            yield from self.inner
        else:
            yield from drawn

    def _watched(self, iterator: Iterator[Any], log: DrawLog, replay: Draws) -> Iterator[Any]:
        number = 0
        while True:
            if number in replay:
                write_random(replay[number])
            before = RawRandom()
            try:
                drawn = next(iterator)
            except StopIteration:
                return
            log.note(number, before, RawRandom())
            yield drawn
            number += 1

    def _seeded(self, iterator: Iterator[Any], place: tuple[int, ...], skip: int, first: int) -> Iterator[Any]:
        seed, rank, epoch = place
        number = first
        skip += first
        # The sampler's draws are a stream of their own, swapped in where they can happen. It starts the same on every
        # rank, as after seed_everything: samplers that split one permutation rely on it.
        swapped, outside = True, RawRandom()
        seed_random(place_seed(seed, _SAMPLER, epoch))
        while True:
            try:
                while number < skip:
                    next(iterator)
                    number += 1
                drawn = next(iterator)
            except StopIteration:
                if swapped:
                    restore_raw(outside)
                return
            stream = RawRandom() if swapped else None
            if swapped:
                restore_raw(outside)
            where = (seed, rank, epoch, number)
            if self._batched:
                batch = SeededBatch(drawn)
                batch.place = where
                yield batch
            else:
                yield SeededIndex(drawn, where)
            number += 1
            swapped = not self._known
            if swapped and stream is not None:
                outside = RawRandom()
                restore_raw(stream)


class SeededDataset:
    """Stands for a map-style data set: seeds the generators before each item, then for the collate function."""

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_swift_dataset"] = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "_swift_dataset":  # while unpickling
            raise AttributeError(name)
        return getattr(self._swift_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._swift_dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __len__(self) -> int:
        return len(self._swift_dataset)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, SeededIndex):
            return self._swift_dataset[index]
        seed_random(place_seed(*index.place, 0))
        return self._swift_dataset[index.index]

    def __getitems__(self, batch: Any) -> Any:
        dataset = self._swift_dataset
        place = getattr(batch, "place", None)
        fetch_many = getattr(dataset, "__getitems__", None)
        if place is None:
            return fetch_many(batch) if fetch_many else [dataset[index] for index in batch]
        if fetch_many:
            seed_random(place_seed(*place, 0))
            items = fetch_many(list(batch))
        else:
            items = []
            for number, index in enumerate(batch):
                seed_random(place_seed(*place, number))
                items.append(dataset[index])
        seed_random(place_seed(*place, len(batch)))
        return items


def engine_of(loader: DataLoader[Any], known: bool, place: list[int] | None) -> tuple[DataLoader[Any], Indices]:
    """A shallow copy of ``loader`` whose sampler is watched (``place`` None) or whose items are seeded, and that
    sampler.

    The user's loader is left untouched; both share data set, sampler and generator.
    """
    engine = copy.copy(loader)
    # Written past __setattr__: DataLoader forbids changing these names once it is built.
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    indices = Indices(getattr(loader, name), name == "batch_sampler", known, place)
    vars(engine)[name] = indices
    if place is not None:
        vars(engine)["dataset"] = SeededDataset(loader.dataset)
    vars(engine)["_iterator"] = None
    return engine, indices
