"""Data whose randomness is a function of its place: skipping a batch then costs its indices, not its items."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from shared_core.loaders.randomness import seed_random


def place_seed(*place: int) -> int:
    """A 64-bit seed from the numbers that name a place (seed, rank, epoch, batch, index in the batch)."""
    digest = hashlib.blake2b(struct.pack(f"<{len(place)}q", *place), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


class SeededBatch(list[int]):
    """Indices of one batch with its place in the run; sent to worker processes instead of a plain list."""

    place: tuple[int, ...] = ()


class SeededIndex:
    """One index (``batch_size=None``) with its place."""

    __slots__ = ("index", "place")

    def __init__(self, index: Any, place: tuple[int, ...]) -> None:
        self.index, self.place = index, place


class SeededDataset:
    """Stands for a map-style data set: seeds the global generators before each item, then for the collate function."""

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
