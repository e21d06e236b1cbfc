"""Loaders that Accelerate has prepared, with the step boundaries marked.

Accelerate draws one batch ahead: while the training code has batch k, the fetch of batch k + 2 is what comes first in
the next turn of the loop. That fetch is the step boundary of batch k + 1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.utils import broadcast, concatenate, find_batch_size, initialize_tensors, send_to_device
from accelerate.utils.dataclasses import TensorInformation

from accelerate_swift import compat
from accelerate_swift.watch import Watch
from shared_core.adapters import TrackedLoader
from shared_core.encoding import decode, encode
from shared_core.errors import Unsupported
from shared_core.loaders import Position

# -- dispatch_batches=True: rank 0 reads all data and broadcasts each batch, of which every rank takes its part -------
#
# The step boundary lies before the broadcast of a batch that has been read already. A replacement on rank 0 reads it
# again; on another rank it needs the shapes that were announced, which are published with the boundary.


def _stock(values: dict[str, Any]) -> DataLoaderDispatcher:
    made = DataLoaderDispatcher.__new__(DataLoaderDispatcher)
    made.__dict__.update(values)
    return made


class SwiftDispatcher(DataLoaderDispatcher):  # type: ignore[misc]  # Accelerate has no type annotations
    """A ``DataLoaderDispatcher`` that marks the step boundaries; made from a prepared one."""

    end_of_dataloader: bool
    _ahead: _Ahead

    @classmethod
    def adopt(cls, watch: Watch, prepared: DataLoaderDispatcher, key: str) -> SwiftDispatcher:
        """The same loader with step boundaries. Raises Unsupported where the number of workers may change."""
        assert watch.loop.job is not None
        if watch.loop.job.config.resizes:
            raise Unsupported(
                "with dispatch_batches=True rank 0 holds batches for all, which cannot be dealt out when the number of "
                "workers changes: set dispatch_batches=False, or leave out on_failure='shrink' and "
                "resize.replace_timeout_s"
            )
        watch.loop.job.checkpoints.keep_number("with dispatch_batches=True rank 0 held batches for all")
        made: SwiftDispatcher = cls.__new__(cls)
        made.__dict__.update(vars(prepared))
        made._watch = watch
        made._tracked = watch.progress.loaders.track(prepared.base_dataloader, key, ahead=made.state.num_processes)
        made.base_dataloader = made._tracked.loader
        made._ahead = _Ahead()
        watch.loop.job.register(f"accelerate.dispatch.{key}", made._capture, made._restore)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is Accelerate's own: batches of a copy are no step boundaries."""
        values = {name: value for name, value in vars(self).items() if name not in ("_watch", "_tracked", "_ahead")}
        return _stock, (values | {"base_dataloader": self._tracked.loader.wrapped},)

    def __iter__(self) -> Iterator[Any]:
        own: list[Callable[[], Any]] = []
        batches = self._batches(own)
        own.append(weakref.ref(batches))
        return batches

    def _batches(self, own: Sequence[Callable[[], Any]]) -> Iterator[Any]:
        watch, progress = self._watch, self._watch.progress
        if not watch.training or not torch.is_grad_enabled() or progress.nested:
            yield from super().__iter__()
            return
        marks_boundaries = watch.fetching is None
        if marks_boundaries:
            watch.begin_training()
            if not progress.begin_round():
                if progress.looks_at_items():
                    watch.refuse_look()
                return
        self.begin()
        self.set_epoch(self.iteration)
        position: Position = iter(self._tracked.loader)
        if marks_boundaries:
            progress.activate(position)
            progress.walk(own[0]())
            continues = progress.joining and progress.step_boundary()
        else:
            continues = self._tracked.continues
        if continues:
            ahead = self._ahead  # the failed worker's
            items = self._tracked.resume(position)
            if self.state.process_index == 0:
                ahead.batch = items[-1] if self.split_batches else concatenate(items[-ahead.items :], dim=0)
        else:
            self._ahead = _Ahead()
            compat.set_at_end(self, False)
            self._fetch(position)
            for _ in range(self.skip_batches):
                if not self.end_of_dataloader:
                    self._deliver(position)
            if marks_boundaries and not self.end_of_dataloader:
                progress.step_boundary()
        while not self.end_of_dataloader:
            batch = self._deliver(position)
            progress.gave(own[0]())
            yield batch
            if marks_boundaries and not self.end_of_dataloader:
                progress.step_boundary()
        self.iteration += 1
        self.end()

    def _fetch(self, position: Position) -> None:
        before = position.delivered
        self._ahead.batch, self._ahead.info = compat.fetch(self, position)
        self._ahead.items = position.delivered - before

    def _deliver(self, position: Position) -> Any:
        """This rank's part of the batch that was read ahead; the next one is read meanwhile. A collective."""
        ahead, ranks, rank = self._ahead, self.state.num_processes, self.state.process_index
        mine = ahead.batch if rank == 0 else initialize_tensors(ahead.info[0])
        batch = broadcast(
            send_to_device(mine, self.state.device, non_blocking=compat.sends_at_once(self)), from_process=0
        )
        if ahead.first is None and not compat.drops_last(self):
            ahead.first = self._part(batch, slice(0, ranks))
        size = find_batch_size(batch)
        share = size // ranks
        last = compat.is_at_end(self)
        if not last:
            self._fetch(position)
            last = compat.is_at_end(self) and ahead.info[0] is None
        if last and size % ranks and not compat.drops_last(self):
            batch, share = concatenate([batch, ahead.first], dim=0), share + 1
        if last:
            self.end_of_dataloader, self.remainder = True, size
        return self._part(batch, slice(rank * share, (rank + 1) * share))

    def _part(self, batch: Any, which: slice) -> Any:
        state = self.state
        return self.slice_fn(batch, which, process_index=state.process_index, num_processes=state.num_processes)

    def _capture(self) -> dict[str, Any]:
        ahead = self._ahead
        return {
            "info": [_plain(ahead.info[0]), ahead.info[1]],
            "first": encode(ahead.first),
            "items": ahead.items,
            "stop": compat.is_at_end(self),
        }

    def _restore(self, data: Mapping[str, Any]) -> None:
        self._ahead = _Ahead()
        self._ahead.info = [_unplain(data["info"][0]), data["info"][1]]
        self._ahead.first = decode(data["first"])
        self._ahead.items = data["items"]
        compat.set_at_end(self, data["stop"])


class _Ahead:
    """The batch read ahead: itself (on rank 0), what was announced of it, how many items it was made of."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.info: list[Any] = [None, False]
        self.items = 0
        self.first: Any = None


def _plain(structure: Any) -> Any:
    """Nested shapes and dtypes as plain data."""
    if isinstance(structure, TensorInformation):
        return ("tensor", tuple(structure.shape), str(structure.dtype).removeprefix("torch."))
    if isinstance(structure, Mapping):
        return ("dict", [(key, _plain(value)) for key, value in structure.items()])
    if isinstance(structure, (list, tuple)):
        return (type(structure).__name__, [_plain(value) for value in structure])
    return ("value", encode(structure))


def _unplain(data: Any) -> Any:
    kind, content, *rest = data
    if kind == "tensor":
        return TensorInformation(shape=torch.Size(content), dtype=getattr(torch, rest[0]))
    if kind == "dict":
        return {key: _unplain(value) for key, value in content}
    if kind == "value":
        return decode(content)
    values = [_unplain(value) for value in content]
    return values if kind == "list" else tuple(values)


# -- each worker reads its own data -----------------------------------------------------------------------------------


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
            return self._unmarked()
        if progress.nested or watch.fetching is not None:
            return _Inner(watch, self._tracked, self._skip)
        watch.begin_training()
        if not progress.begin_round():
            return self._unmarked() if progress.looks_at_items() else iter(())
        boundaries = _Boundaries(watch, _Inner(watch, self._tracked, self._skip))
        progress.activate(boundaries)
        progress.walk(boundaries)
        return boundaries

    def _unmarked(self) -> Iterator[Any]:
        return islice(self._tracked.loader, self._skip, None) if self._skip else iter(self._tracked.loader)


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
        self.loader, self.skip, self._watch, self._tracked = tracked.loader, skip, watch, tracked
        self._position = iter(tracked.loader)

    def __next__(self) -> Any:
        if self._tracked.continues:
            self.skip = 0
            ahead = self._tracked.resume(self._position)
            self._watch.progress.reread()
            return ahead[-1] if ahead else next(self._position)
        return self.next_here()

    def next_here(self) -> Any:
        """The next item, where no failed worker has begun this pass."""
        while self.skip:
            self.skip -= 1
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
