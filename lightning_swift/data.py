"""Where a run is in its data: loaders of training and validation, the combined iterator over them, and what was
fetched ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSize, _MinSize
from torch.utils._pytree import tree_unflatten

from lightning_swift.sharing import SharedLoader
from shared_core.errors import Unsupported
from shared_core.loaders import Position, ResumableLoader, read_random, write_random


class Data:
    """Captures and restores the data position of one fit.

    Loaders get their wrapper from the strategy (:meth:`wrapped`).
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        #: The lengths of an ordinary pass, while one of which the rest was dealt out anew is in progress.
        self._ordinary: list[Any] | None = None
        #: Random generators before the loaders of the fit loop and of its validation loop were last requested.
        self._requested: dict[str, Any] = {}

    def before_request(self, name: str) -> None:
        """The user's hook for the loaders of ``name`` (``train`` or ``val``) is about to be called."""
        self._requested[name] = read_random()

    def tell_fetch_ahead(self) -> None:
        """Lightning fetches a batch ahead only where it cannot know the length."""
        fetcher = self._trainer.fit_loop._data_fetcher
        ahead = (
            1
            if isinstance(fetcher, _DataLoaderIterDataFetcher) or (fetcher is not None and fetcher.length is None)
            else 0
        )
        for loader in _wrapped(self._trainer.fit_loop._combined_loader):
            loader.fetches_ahead(ahead)

    def lengths(self) -> list[Any]:
        """What depends on the number of batches of this rank in a pass over the data."""
        fit = self._trainer.fit_loop
        return [fit.max_batches, self._trainer.val_check_batch, list(fit.epoch_loop.val_loop._max_batches)]

    def set_lengths(self, lengths: list[Any]) -> None:
        """Inverse of :meth:`lengths`."""
        fit = self._trainer.fit_loop
        fit.max_batches, self._trainer.val_check_batch, fit.epoch_loop.val_loop._max_batches = lengths

    def begin_pass(self) -> None:
        """An ordinary pass begins."""
        if self._ordinary is not None:
            lengths, self._ordinary = self._ordinary, None
            self.set_lengths(lengths)

    def _shorten(self) -> None:
        """The pass in progress has as many batches as were used before the number of workers changed, and are left."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        combined, fetcher = fit._combined_loader, fit._data_fetcher
        left = [p.left for p in (_positions(combined) if combined is not None else ()) if p and p.left is not None]
        if not left or fetcher is None:
            return
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            raise Unsupported(
                "training_step(dataloader_iter) fetches its batches itself, so the number of workers cannot change "
                "in the middle of a pass over the data; use training_step(batch, batch_idx)"
            )
        self._ordinary = self.lengths()
        shortest = isinstance(combined._iterator, _MinSize) if combined is not None else False
        length = fetcher.fetched + (min(left) if shortest else max(left))
        fetcher.length = fit.max_batches = length
        fetcher.done = fetcher.fetched >= length
        # Where batches are counted over epochs, or by a number that the user gave, nothing depends on the length.
        if isinstance(trainer.val_check_interval, float) and trainer.check_val_every_n_epoch is not None:
            trainer.val_check_batch = max(1, int(length * trainer.val_check_interval))

    # -- capture ------------------------------------------------------------------------------------------------------

    def capture(self) -> Any:
        fit, val = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.val_loop
        reloads = bool(getattr(self._trainer, "reload_dataloaders_every_n_epochs", 0))
        return {
            "train": _capture_combined(fit._combined_loader, between=False),
            "val": _capture_combined(val._combined_loader, between=True),
            "fetcher": None if fit._data_fetcher is None else _capture_fetcher(fit._data_fetcher),
            # Only where loaders are requested again during a fit does a newcomer need to do so too.
            "ordinary": self._ordinary,
            "requested": dict(self._requested) if reloads else {},
            "reloaded": {"train": fit._last_train_dl_reload_epoch, "val": val._last_val_dl_reload_epoch}
            if reloads
            else {},
        }

    # -- restore ------------------------------------------------------------------------------------------------------

    def restore(self, data: Mapping[str, Any], resized: bool = False, copied: bool = False) -> None:
        """Put back what :meth:`capture` took.

        Args:
            data: from this rank's predecessor.
            resized: of another number of workers.
            copied: it is that of a peer, who reads another part of the data.
        """
        self._ordinary = None if resized else data["ordinary"]
        fit, val = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.val_loop
        if data["reloaded"]:
            self._request_again(data)
        if fit._combined_loader is not None and data["train"] is not None:
            _restore_combined(fit._combined_loader, data["train"], copied)
            if fit._data_fetcher is not None and data["fetcher"] is not None:
                length = fit._data_fetcher.length
                _restore_fetcher(fit._data_fetcher, fit._combined_loader, data["fetcher"])
                if resized:
                    fit._data_fetcher.length = length
                    self._shorten()
        if val._combined_loader is not None and data["val"] is not None:
            _restore_combined(val._combined_loader, data["val"], copied)

    def _request_again(self, data: Mapping[str, Any]) -> None:
        """``reload_dataloaders_every_n_epochs``: call the user's hooks as they were last called, in the epoch of
        that call.
        """
        trainer = self._trainer
        fit, val = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
        strategy: Any = trainer.strategy
        strategy.quiet = True  # the hooks' collectives have no counterpart now
        progress = fit.epoch_progress.current
        completed = progress.completed
        for name, loop in (("train", fit), ("val", val)):
            epoch = data["reloaded"][name]
            if epoch in (0, float("-inf")) or name not in data["requested"]:
                continue
            progress.completed = int(epoch)
            write_random(data["requested"][name])
            fetcher = fit._data_fetcher
            loop._combined_loader = None
            if name == "val":
                trainer.validating = True
            loop.setup_data()
            if name == "val":
                trainer.training = True
            elif fetcher is not None and fit._data_fetcher is not None:
                # The epoch loop above us in the stack goes on with the object it has.
                fetcher.__dict__.update(fit._data_fetcher.__dict__)
                fit._data_fetcher = fetcher
        progress.completed = completed
        strategy.quiet = False
        self._requested = dict(data["requested"])


def unwrap(trainer: pl.Trainer) -> None:
    """After an entry: give the user's own loaders back to the combined loaders."""
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        combined = loop._combined_loader
        if combined is not None:
            combined.flattened = [
                loader.wrapped if isinstance(loader, (ResumableLoader, SharedLoader)) else loader
                for loader in combined.flattened
            ]


def _wrapped(combined: CombinedLoader | None) -> list[ResumableLoader]:
    return (
        [loader for loader in combined.flattened if isinstance(loader, ResumableLoader)] if combined is not None else []
    )


def _positions(combined: CombinedLoader) -> list[Position | None]:
    """The iterator that the combined one holds for each loader, where there is one and it is ours."""
    iterators = combined._iterator.iterators if combined._iterator is not None else []
    found: list[Position | None] = []
    for number, _ in enumerate(combined.flattened):
        iterator = iterators[number] if len(iterators) == len(combined.flattened) else None
        found.append(iterator if isinstance(iterator, Position) else None)
    return found


def _capture_combined(combined: CombinedLoader | None, between: bool) -> Any:
    if combined is None:
        return None
    iterator = combined._iterator
    return {
        "loaders": [
            loader.state(position, between=between) if isinstance(loader, ResumableLoader) else None
            for loader, position in zip(combined.flattened, _positions(combined), strict=True)
        ],
        "index": None if iterator is None else iterator._idx,
        "consumed": list(getattr(iterator, "_consumed", ())),
    }


def _restore_combined(combined: CombinedLoader, data: Mapping[str, Any], copied: bool) -> None:
    for loader, position, state in zip(combined.flattened, _positions(combined), data["loaders"], strict=True):
        if isinstance(loader, ResumableLoader) and state is not None:
            loader.restore(state, position, copied=copied)
    iterator = combined._iterator
    if iterator is not None and data["index"] is not None:
        iterator._idx = data["index"]
        if hasattr(iterator, "_consumed"):
            iterator._consumed = list(data["consumed"])


def _capture_fetcher(fetcher: _DataFetcher) -> Any:
    return {
        "fetched": fetcher.fetched,
        "done": fetcher.done,
        "length": fetcher.length,
        "waiting": len(fetcher.batches) if isinstance(fetcher, _PrefetchDataFetcher) else 0,
        "last": (fetcher._batch_idx, fetcher._dataloader_idx)
        if isinstance(fetcher, _DataLoaderIterDataFetcher)
        else None,
    }


def _restore_fetcher(fetcher: _DataFetcher, combined: CombinedLoader, data: Mapping[str, Any]) -> None:
    fetcher.fetched, fetcher.done, fetcher.length = data["fetched"], data["done"], data["length"]
    if isinstance(fetcher, _PrefetchDataFetcher):
        fetcher.batches = [_last_batch(combined)] if data["waiting"] else []
    elif isinstance(fetcher, _DataLoaderIterDataFetcher):
        fetcher._batch_idx, fetcher._dataloader_idx = data["last"]
        fetcher._batch = _last_batch(combined)[0] if data["fetched"] else None


def _last_batch(combined: CombinedLoader) -> tuple[Any, int, int]:
    """The batch that the combined iterator gave last, from the items its loaders read again."""
    items: list[Any] = []
    for position in _positions(combined):
        ended = position is not None and position.exhausted and isinstance(combined._iterator, _MaxSize)
        items.append(None if position is None or ended or not position.last_items else position.last_items[-1])
    index = combined._iterator._idx - 1 if combined._iterator is not None else 0
    return tree_unflatten(items, combined._spec), index, 0
