"""Data of a pipeline that any worker can read: then a job continues when both ends of a pipeline fail.

DeepSpeed's engine draws micro-batches from an iterator of the script, at the first and the last stage of each pipeline;
nobody else can draw them. Here each micro-batch is a function of seed, pipeline and number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from shared_core.loaders import Shards


class SharedData(Iterator[Any]):
    """Micro-batches of this worker's pipeline, epoch after epoch without an end: for ``train_batch``, ``eval_batch``.

    Give it to the engine at both ends of each pipeline. All workers count the same micro-batches, so nothing but the
    engine may take one from it.

    Args:
        loader: gives micro-batches of one pipeline: over a map-style data set, with
            ``DistributedSampler(data, num_replicas=pipelines, rank=...)``.
        engine: DeepSpeed's, or ours.
        seed: with pipeline, epoch and number, of all random numbers that are drawn while a micro-batch is read.

    Attributes:
        drawn: micro-batches that this worker has taken.

    Raises:
        Unsupported: for data that only the worker itself can read, and where pipelines have different numbers of
            batches.
    """

    def __init__(self, loader: DataLoader[Any], engine: Any, seed: int = 0) -> None:
        self._shards = Shards(loader, engine.grid.data_parallel_size, seed, "SharedData")
        self._pipeline = int(engine.grid.get_data_parallel_rank())
        self.drawn = 0

    def __next__(self) -> Any:
        batch = self.read(self._pipeline, self.drawn)
        self.drawn += 1
        return batch

    def read(self, pipeline: int, number: int) -> Any:
        """A pipeline's micro-batch of a number, counted from 0 over all epochs; does not change ``drawn``."""
        return self._shards.read(pipeline, *divmod(number, self._shards.per_epoch))
