"""Loaders that Accelerate has prepared, with the batch tops marked.

Accelerate draws one batch ahead: while the training code has batch k, the fetch of batch k + 2 is what comes first in
the next turn of the loop. That fetch is the top of batch k + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

from accelerate_swift.dispatch import SwiftDispatcher
from accelerate_swift.watch import Watch
from shared_core import TrackedLoader
from shared_core.errors import Unsupported


def gate(watch: Watch, prepared: Any) -> Any:
    """Have a prepared loader mark the batch tops; returns what the script is to iterate."""
    if type(prepared) is DataLoaderDispatcher:
        return SwiftDispatcher.adopt(watch, prepared, watch.next_key())
    if issubclass(type(prepared), DataLoaderShard) and type(prepared.base_dataloader) is not Gate:
        prepared.base_dataloader = below = Gate(watch, prepared.base_dataloader)
        if prepared.rng_types is not None:
            prepared.rng_types = _Synchronized(prepared.rng_types, below)
    return prepared


def unwrapped(prepared: Any) -> Any:
    """The ``DataLoader`` below what Accelerate has prepared.

    Raises:
        Unsupported: if batches are dealt out by rank 0.
    """
    if isinstance(prepared, DataLoaderDispatcher):
        raise Unsupported("shared_steps() needs workers that read their own data: set dispatch_batches=False")
    loader = getattr(prepared, "base_dataloader", prepared)
    return loader._tracked.loader.wrapped if type(loader) is Gate else loader


class Gate:
    """Stands between a prepared loader and the ``DataLoader`` below it, and looks like the latter."""

    def __init__(self, watch: Watch, loader: Any) -> None:
        self._watch = watch
        self._tracked: TrackedLoader = watch.loop.track(loader, watch.next_key(), ahead=1)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._tracked.loader.wrapped)

    def __getattr__(self, name: str) -> Any:
        if name in ("_tracked", "_watch"):  # while unpickling
            raise AttributeError(name)
        return getattr(self._tracked.loader, name)

    def __len__(self) -> int:
        return len(self._tracked.loader)

    @property
    def goes_on(self) -> bool:
        """Whether the next pass is one that a predecessor has begun."""
        return self._tracked.goes_on

    def __iter__(self) -> Iterator[Any]:
        loop, watch = self._watch.loop, self._watch
        if not watch.training or not torch.is_grad_enabled():
            return iter(self._tracked.loader)
        if loop.nested or not watch.marks_tops:
            return _Inner(self._tracked)
        watch.begin_training()
        if not loop.begin_round():
            return iter(())
        tops = _Tops(watch, self._tracked)
        loop.activate(tops)
        return tops


class _Synchronized(list[Any]):
    """The generators that Accelerate makes equal in all ranks when a pass begins.

    There are none where a predecessor has begun the pass: the others did so in an earlier batch.
    """

    def __init__(self, rng_types: Iterable[Any], below: Gate) -> None:
        super().__init__(rng_types)
        self._below = below

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self._below.goes_on else super().__iter__()


class _Inner(Iterator[Any]):
    """Iterates a loader inside the loop over another; no batch tops."""

    def __init__(self, tracked: TrackedLoader) -> None:
        self._tracked = tracked
        self._position = iter(tracked.loader)

    def __next__(self) -> Any:
        ahead = self._tracked.resume(self._position)
        return ahead[-1] if ahead else next(self._position)


class _Tops(Iterator[Any]):
    """Iterates the loader of a training loop and marks the batch tops."""

    def __init__(self, watch: Watch, tracked: TrackedLoader) -> None:
        self._loop = watch.loop
        self._tracked = tracked
        self._position = iter(tracked.loader)
        self._begun = False
        self._joined = False

    def __next__(self) -> Any:
        if not self._begun:
            self._begun = True
            if self._loop.joining:
                # The batch at hand is the one that the predecessor had at its top.
                self._joined = self._loop.batch_top()
                ahead = self._tracked.resume(self._position)
                if ahead:
                    return ahead[-1]
            return next(self._position)
        if self._joined:
            self._joined = False
        else:
            self._loop.batch_top()
        return next(self._position)
