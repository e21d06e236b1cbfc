"""Batches of any rank, by the number of their step: for workers that compute the share of a failed one.

A batch is a function of seed, rank, epoch and its number in the epoch. A replacement has nothing to restore, and any
worker can read any rank's data.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shared_core.errors import Unsupported
from shared_core.loaders.randomness import RawRandom, restore_raw, seed_random
from shared_core.loaders.seeded import SeededBatch, SeededDataset, place_seed

_SAMPLER = -1
_LEAVES = (DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")


class Shards:
    """The batches of all ranks.

    Args:
        loader: reads the data of one rank: over a map-style data set, with a ``DistributedSampler`` or
            Accelerate's ``BatchSamplerShard``.
        seed: with rank, epoch and number of the batch, seeds all random numbers that are drawn while it is read.
        what: the caller's name in error messages.

    Attributes:
        per_epoch: batches of each rank in an epoch.

    Raises:
        Unsupported: for data that only the rank itself can read.
    """

    def __init__(self, loader: DataLoader[Any], world: int, seed: int, what: str = "shared_steps()") -> None:
        self._loader, self._world, self._seed = loader, world, seed
        _check(loader, world, what)
        self._listed: dict[int, tuple[int, list[Any]]] = {}
        self._readers: dict[int, tuple[tuple[int, int], Iterator[Any]]] = {}
        counts = {len(self._indices(rank, 0)) for rank in range(world)}
        self._listed.clear()
        if len(counts) != 1 or counts == {0}:
            raise Unsupported(
                f"{what} needs the same number of batches on every rank, at least one, got {sorted(counts)}: use "
                "drop_last=True (with Accelerate: even_batches=True)"
            )
        (self.per_epoch,) = counts

    def read(self, rank: int, epoch: int, number: int) -> Any:
        """Batch ``number`` of a rank in an epoch. Read in order, batches are read ahead as the loader's options say.
        Leaves the global random generators as they were.
        """
        before = RawRandom()
        place, reader = self._readers.get(rank, ((-1, -1), iter(())))
        if place != (epoch, number):
            reader = self._reader(rank, epoch, number)
        batch = next(reader)
        self._readers[rank] = (epoch, number + 1), reader
        restore_raw(before)
        return batch

    def keep(self, ranks: frozenset[int]) -> None:
        """Stop reading ahead for all but these ranks."""
        for rank in self._readers.keys() - ranks:
            del self._readers[rank]

    def _reader(self, rank: int, epoch: int, first: int) -> Iterator[Any]:
        batches = []
        for number, indices in enumerate(self._indices(rank, epoch)[first:], first):
            batch = SeededBatch(indices)
            batch.place = (self._seed, rank, epoch, number)
            batches.append(batch)
        options = {name: getattr(self._loader, name) for name in _OPTIONS}
        if self._loader.num_workers:
            options["prefetch_factor"] = self._loader.prefetch_factor
        generator = torch.Generator().manual_seed(place_seed(self._seed, rank, epoch, first))
        dataset: Any = SeededDataset(self._loader.dataset)
        return iter(DataLoader(dataset, batch_sampler=batches, generator=generator, **options))

    def _indices(self, rank: int, epoch: int) -> list[Any]:
        if self._listed.get(rank, (-1,))[0] != epoch:
            before = RawRandom()
            seed_random(place_seed(self._seed, _SAMPLER, epoch))
            self._listed[rank] = epoch, [list(batch) for batch in self._placed(self._loader.batch_sampler, rank, epoch)]
            restore_raw(before)
        return self._listed[rank][1]

    def _placed(self, sampler: Any, rank: int, epoch: int) -> Any:
        placed = copy.copy(sampler)
        for name in ("sampler", "batch_sampler"):
            if getattr(placed, name, None) is not None:
                setattr(placed, name, self._placed(getattr(placed, name), rank, epoch))
        if isinstance(getattr(placed, "generator", None), torch.Generator):
            placed.generator = torch.Generator().manual_seed(place_seed(self._seed, _SAMPLER, epoch))
        if isinstance(placed, DistributedSampler):
            placed.rank = rank
        if hasattr(placed, "process_index"):
            placed.process_index = rank
        if hasattr(placed, "set_epoch"):
            placed.set_epoch(epoch)
        return placed


def _check(loader: Any, world: int, what: str) -> None:
    """Raises Unsupported for data that other workers cannot read."""
    refusal = f"{what} needs data that any worker can read for any other"
    if not isinstance(loader, DataLoader):
        raise Unsupported(f"{refusal}: give it a torch.utils.data.DataLoader, not a {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise Unsupported(f"{refusal}: use a map-style data set and batches, no IterableDataset and no batch_size=None")
    shares = 1
    sampler: Any = loader.batch_sampler
    while not isinstance(sampler, _LEAVES):
        if hasattr(sampler, "process_index"):  # Accelerate's BatchSamplerShard
            shares, sampler = shares * sampler.num_processes, sampler.batch_sampler
        elif type(sampler) is BatchSampler:
            sampler = sampler.sampler
        else:
            raise Unsupported(
                f"{refusal}, and the order of a {type(sampler).__name__} is known to nobody else: use one of "
                f"{', '.join(each.__name__ for each in _LEAVES)}"
            )
    if isinstance(sampler, DistributedSampler):
        shares *= sampler.num_replicas
    if shares != world:
        raise Unsupported(
            f"the loader divides the data among {shares} ranks, and there are {world}: give it a DistributedSampler"
        )
