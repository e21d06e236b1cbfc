"""Loaders that Accelerate has prepared, with the step boundaries marked.

Accelerate draws one batch ahead: while the training code has batch k, the fetch of batch k + 2 is what comes first in
the next turn of the loop. That fetch is the step boundary of batch k + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

from accelerate_swift.dispatch import SwiftDispatcher
from accelerate_swift.watch import Watch
from shared_core.adapters import TrackedLoader
from shared_core.errors import Unsupported


def gate(watch: Watch, prepared: Any, key: str | None = None) -> Any:
    """Have a prepared loader mark the step boundaries, perhaps in place. ``key``: the same in a replacement."""
    if type(prepared) is DataLoaderDispatcher:
        return SwiftDispatcher.adopt(watch, prepared, key or watch.next_key())
    if issubclass(type(prepared), DataLoaderShard) and type(prepared.base_dataloader) is not BatchGate:
        # Skipped below, where a replacement's place is known.
        skip, prepared.skip_batches = prepared.skip_batches, 0
        prepared.base_dataloader = below = BatchGate(
            watch, prepared.base_dataloader, key or watch.next_key(), ahead=1, skip=skip
        )
        if prepared.rng_types is not None:
            prepared.rng_types = _Synchronized(prepared.rng_types, below)
    return prepared


def gate_any(watch: Watch, loader: Any, key: str) -> Any:
    """As :func:`gate`, for the loader of a Trainer, which may not have been prepared."""
    known = isinstance(loader, (DataLoaderDispatcher, DataLoaderShard))
    return gate(watch, loader, key) if known else _Bare(watch, loader, key, ahead=0, skip=0)


def unwrapped(prepared: Any) -> Any:
    """The ``DataLoader`` below what Accelerate has prepared. Raises Unsupported if rank 0 deals out the batches."""
    if isinstance(prepared, DataLoaderDispatcher):
        raise Unsupported("shared_steps() needs workers that read their own data: set dispatch_batches=False")
    loader = getattr(prepared, "base_dataloader", prepared)
    return loader._tracked.loader.wrapped if type(loader) is BatchGate else loader


class BatchGate:
    """Stands between a prepared loader and the ``DataLoader`` below it, and looks like the latter.

    ``ahead`` batches are fetched before they are used; nobody uses ``skip`` batches at the start of each pass.
    """

    def __init__(self, watch: Watch, loader: Any, key: str, ahead: int, skip: int) -> None:
        self._watch, self._skip = watch, skip
        self._tracked: TrackedLoader = watch.progress.loaders.track(loader, key, ahead=ahead)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._tracked.loader.wrapped)

    def __getattr__(self, name: str) -> Any:
        if name in ("_tracked", "_watch", "_skip"):  # while unpickling
            raise AttributeError(name)
        return getattr(self._tracked.loader, name)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """A copy is the loader below: batches of a copy are no step boundaries."""
        return _itself, (self._tracked.loader.wrapped,)

    def __len__(self) -> int:
        return len(self._tracked.loader)

    @property
    def continues(self) -> bool:
        """Whether the next pass is one that a failed worker has begun."""
        return self._tracked.continues

    def __iter__(self) -> Iterator[Any]:
        progress, watch = self._watch.progress, self._watch
        if not watch.training or not torch.is_grad_enabled():
            return islice(self._tracked.loader, self._skip, None) if self._skip else iter(self._tracked.loader)
        if progress.nested or watch.fetching is not None:
            return _Inner(watch, self._tracked, self._skip)
        watch.begin_training()
        if not progress.begin_round():
            return iter(())
        boundaries = _Boundaries(watch, _Inner(watch, self._tracked, self._skip))
        progress.activate(boundaries)
        progress.walk(boundaries)
        return boundaries


class _Bare(BatchGate):
    """A training loader that nobody has prepared: it is asked for its iterator before anything is fetched."""

    def __iter__(self) -> Iterator[Any]:
        return _Inner(self._watch, self._tracked, 0)


class _Synchronized(list[Any]):
    """The generators that Accelerate makes equal in all ranks; none in a pass that a failed worker has begun."""

    def __init__(self, rng_types: Iterable[Any], below: BatchGate) -> None:
        super().__init__(rng_types)
        self._below = below

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return list, (list(super().__iter__()),)

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self._below.continues else super().__iter__()


def _itself(loader: Any) -> Any:
    return loader


class _Inner(Iterator[Any]):
    """Iterates a loader, from a failed worker's place if it had begun this pass; no step boundaries."""

    def __init__(self, watch: Watch, tracked: TrackedLoader, skip: int) -> None:
        self._watch, self._tracked, self._skip = watch, tracked, skip
        self._position = iter(tracked.loader)

    @property
    def loader(self) -> Any:
        """What is iterated."""
        return self._tracked.loader

    @property
    def skip(self) -> int:
        """Items that are still left out."""
        return self._skip

    def __next__(self) -> Any:
        if self._tracked.continues:
            self._skip = 0
            ahead = self._tracked.resume(self._position)
            self._watch.progress.reread()
            return ahead[-1] if ahead else next(self._position)
        return self.next_here()

    def next_here(self) -> Any:
        """The next item, where no failed worker has begun this pass."""
        while self._skip:
            self._skip -= 1
            next(self._position)
        return next(self._position)


class _Boundaries(Iterator[Any]):
    """Iterates the loader of a training loop and marks the step boundaries."""

    def __init__(self, watch: Watch, inner: _Inner) -> None:
        self._progress, self._inner = watch.progress, inner
        self._begun = self._joined = self._expected = False

    def __next__(self) -> Any:
        ahead = not self._begun  # the script gets it when the next one is asked for
        item = self._next()
        if not ahead:
            self._progress.gave(self)
        return item

    def _next(self) -> Any:
        if not self._begun:
            self._begun = True
            if self._progress.joining:
                # The batch at hand is the one that the failed worker had at its boundary.
                with self._progress.variables_held():
                    self._joined = self._progress.step_boundary()
                    return next(self._inner)
        elif self._joined:
            self._joined = False
        else:
            with self._progress.variables_held():
                self._progress.step_boundary()
            if not self._expected:
                self._expected = True
                self._progress.expect(self._inner.loader, self._inner.skip)
        return self._inner.next_here()
