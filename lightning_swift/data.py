"""Where a run is in its data: loaders of training and validation, the iterator over them, what was fetched ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_unflatten

from lightning_swift import compat
from lightning_swift.compat import DataFetcher, IterFetcher, PrefetchFetcher, fetcher_of, loader_of
from lightning_swift.sharing import SharedLoader
from shared_core import Job
from shared_core.errors import Unsupported
from shared_core.loaders import Position, ResumableLoader, read_random, restarting, write_random


class Data:
    """Captures and restores the data position of one fit, of loaders that the strategy has wrapped."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        #: Lengths of an ordinary pass, while a pass is in progress whose rest was dealt out again; else None.
        self._ordinary: list[Any] | None = None
        #: Random generators and variables before the loaders of the fit loop and of its validation loop were last
        #: requested.
        self._requested: dict[str, Any] = {}
        self._job: Job | None = None

    def watch(self, job: Job) -> None:
        """Hooks of the script may change its variables, and depend on them."""
        self._job = job

    def before_request(self, name: str) -> None:
        """The user's hook for the loaders of ``name`` (``train`` or ``val``) is about to be called."""
        held = self._held() if self._reloads and self._trainer.current_epoch > 0 else {}
        self._requested[name] = {"random": read_random(), "variables": held}

    @property
    def _reloads(self) -> bool:
        return bool(getattr(self._trainer, "reload_dataloaders_every_n_epochs", 0))

    def _held(self) -> dict[str, Any]:
        return self._job.variables.capture(boundary=False) if self._job is not None else {}

    def _hold(self, held: dict[str, Any]) -> None:
        if self._job is not None and held:
            self._job.variables.put_back(held, boundary=False)

    def tell_fetch_ahead(self) -> None:
        """Lightning fetches a batch ahead only where it cannot know the length."""
        fetcher = fetcher_of(self._trainer.fit_loop)
        ahead = 1 if isinstance(fetcher, IterFetcher) or (fetcher is not None and fetcher.length is None) else 0
        for loader in _wrapped(loader_of(self._trainer.fit_loop)):
            loader.fetches_ahead(ahead)

    def loaders(self) -> dict[str, Any]:
        fit = self._trainer.fit_loop
        return {
            f"{name} data {number}": loader
            for name, loop in (("training", fit), ("validation", fit.epoch_loop.val_loop))
            for number, loader in enumerate(_wrapped(loader_of(loop)))
        }

    def lengths(self) -> list[Any]:
        """What depends on the number of batches of this rank in a pass over the data."""
        fit = self._trainer.fit_loop
        return [fit.max_batches, self._trainer.val_check_batch, compat.most_batches(fit.epoch_loop.val_loop)]

    def set_lengths(self, lengths: list[Any]) -> None:
        fit = self._trainer.fit_loop
        fit.max_batches, self._trainer.val_check_batch, most = lengths
        compat.set_most_batches(fit.epoch_loop.val_loop, most)

    def begin_pass(self) -> None:
        if self._ordinary is not None:
            lengths, self._ordinary = self._ordinary, None
            self.set_lengths(lengths)

    def _shorten(self) -> None:
        """Set the length of the pass in progress: batches used before the number of workers changed, and those left."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        combined, fetcher = loader_of(fit), fetcher_of(fit)
        left = [p.left for p in (_positions(combined) if combined is not None else ()) if p and p.left is not None]
        if not left or fetcher is None:
            return
        if isinstance(fetcher, IterFetcher):
            raise Unsupported(
                "training_step(dataloader_iter) fetches its batches itself, so the number of workers cannot change "
                "in the middle of a pass over the data; use training_step(batch, batch_idx)"
            )
        self._ordinary = self.lengths()
        shortest = combined is not None and compat.ends_with_shortest(combined)
        length = fetcher.fetched + (min(left) if shortest else max(left))
        fetcher.length = fit.max_batches = length
        fetcher.done = fetcher.fetched >= length
        # Where batches are counted over epochs, or by a number that the user gave, nothing depends on the length.
        if isinstance(trainer.val_check_interval, float) and trainer.check_val_every_n_epoch is not None:
            trainer.val_check_batch = max(1, int(length * trainer.val_check_interval))

    # -- capture ------------------------------------------------------------------------------------------------------

    def capture(self) -> Any:
        fit, val = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.val_loop
        reloads = self._reloads
        return {
            "train": _capture_combined(loader_of(fit), between=False),
            "val": _capture_combined(loader_of(val), between=True),
            "fetcher": None if (fetcher := fetcher_of(fit)) is None else _capture_fetcher(fetcher),
            # Only where loaders are requested again during a fit does a replacement need to do so too.
            "ordinary": self._ordinary,
            "requested": dict(self._requested) if reloads else {},
            "reloaded": compat.reload_epochs(self._trainer) if reloads else {},
        }

    # -- restore ------------------------------------------------------------------------------------------------------

    def restore(self, data: Mapping[str, Any], resized: bool = False, copied: bool = False) -> None:
        """Put back what :meth:`capture` took; ``copied`` from a peer, who reads another part of the data."""
        self._ordinary = None if resized else data["ordinary"]
        fit, val = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.val_loop
        if data["reloaded"]:
            self._request_again(data)
        combined, fetcher, validation = loader_of(fit), fetcher_of(fit), loader_of(val)
        if combined is not None and data["train"] is not None:
            with restarting(self._job):
                _restore_combined(combined, data["train"], copied)
            if fetcher is not None and data["fetcher"] is not None:
                length = fetcher.length
                _restore_fetcher(fetcher, combined, data["fetcher"])
                if resized:
                    fetcher.length = length
                    self._shorten()
        if validation is not None and data["val"] is not None:
            with restarting(self._job):
                _restore_combined(validation, data["val"], copied)

    def _request_again(self, data: Mapping[str, Any]) -> None:
        """``reload_dataloaders_every_n_epochs``: repeat the last calls of the user's hooks, in their epochs, with what
        the script held then.
        """
        trainer, now = self._trainer, self._held()
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
            requested = data["requested"][name]
            self._hold(requested["variables"])
            write_random(requested["random"])
            fetcher = fetcher_of(fit)
            compat.drop_loader(loop)
            if name == "val":
                trainer.validating = True
            loop.setup_data()
            if name == "val":
                trainer.training = True
            elif fetcher is not None and fetcher_of(fit) is not None:
                compat.keep_fetcher(fit, fetcher)
        progress.completed = completed
        strategy.quiet = False
        self._hold(now)
        self._requested = dict(data["requested"])


def unwrap(trainer: pl.Trainer) -> None:
    """After an entry: give the user's own loaders back to the combined loaders."""
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        combined = loader_of(loop)
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
    iterators = compat.iterators_of(combined)
    found: list[Position | None] = []
    for number, _ in enumerate(combined.flattened):
        iterator = iterators[number] if len(iterators) == len(combined.flattened) else None
        found.append(iterator if isinstance(iterator, Position) else None)
    return found


def _capture_combined(combined: CombinedLoader | None, between: bool) -> Any:
    if combined is None:
        return None
    index, consumed = compat.place_of(combined)
    return {
        "loaders": [
            loader.state(position, between=between) if isinstance(loader, ResumableLoader) else None
            for loader, position in zip(combined.flattened, _positions(combined), strict=True)
        ],
        "index": index,
        "consumed": consumed,
    }


def _restore_combined(combined: CombinedLoader, data: Mapping[str, Any], copied: bool) -> None:
    for loader, position, state in zip(combined.flattened, _positions(combined), data["loaders"], strict=True):
        if isinstance(loader, ResumableLoader) and state is not None:
            loader.restore(state, position, copied=copied)
    compat.set_place(combined, data["index"], data["consumed"])


def _capture_fetcher(fetcher: DataFetcher) -> Any:
    return {
        "fetched": fetcher.fetched,
        "done": fetcher.done,
        "length": fetcher.length,
        "waiting": len(fetcher.batches) if isinstance(fetcher, PrefetchFetcher) else 0,
        "last": compat.fetched_last(fetcher) if isinstance(fetcher, IterFetcher) else None,
    }


def _restore_fetcher(fetcher: DataFetcher, combined: CombinedLoader, data: Mapping[str, Any]) -> None:
    fetcher.fetched, fetcher.done, fetcher.length = data["fetched"], data["done"], data["length"]
    if isinstance(fetcher, PrefetchFetcher):
        fetcher.batches = [_last_batch(combined)] if data["waiting"] else []
    elif isinstance(fetcher, IterFetcher):
        compat.set_fetched_last(fetcher, data["last"], _last_batch(combined)[0] if data["fetched"] else None)


def _last_batch(combined: CombinedLoader) -> tuple[Any, int, int]:
    """The batch that the combined iterator gave last, from the items its loaders read again."""
    items: list[Any] = []
    for position in _positions(combined):
        ended = position is not None and position.exhausted and compat.ends_with_longest(combined)
        items.append(None if position is None or ended or not position.last_items else position.last_items[-1])
    index, _ = compat.place_of(combined)
    return tree_unflatten(items, compat.structure_of(combined)), 0 if index is None else index - 1, 0
