"""A wrapper around any iterable loader that can tell its place and be put back there in another process."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shared_core.errors import Unsupported
from shared_core.loaders.contents import as_published
from shared_core.loaders.engine import Engine, LoaderKind, Orders, Script
from shared_core.loaders.owned import changes
from shared_core.loaders.place import ReadingRecord, as_copy
from shared_core.loaders.position import Position
from shared_core.loaders.replay import replay
from shared_core.loaders.reshard import MARK


class ResumableLoader:
    """Wraps a loader (``DataLoader`` of any kind, or any iterable) and delegates everything to it.

    ``isinstance(wrapper, type(loader))`` holds, attributes are read and written through, ``len`` and workers behave
    as before.
    :meth:`state` is plain data; :meth:`restore` in another process, on a wrapper around the same loader built by the
    same code, makes the iteration in progress continue with the next item, bit for bit.

    Args:
        mode: ``restore``: what reading items changed is put back, and only items whose reading changed what cannot be
            put back are read again, as are those of streams that cannot say where they are; ``refetch``: all items
            already delivered are read again; ``seeded``: an item's randomness is a function of seed, rank, epoch, batch
            and index, where the loader is a map-style ``DataLoader``.
        seed: seed of ``seeded``.
        rank: logical rank, enters the seed of items (not the sampler's).
        first_epoch: number of the first iteration, enters the seed.
        ahead: how many items the caller fetches before it uses them; that many can be had again after a restore
            (:attr:`Position.last_items`).
        lazy: build iterators (and worker processes) at the first fetch: a replacement restores before that.
        orders: where the order of each pass is published, so that its rest can be dealt out to another number of
            workers; None where that will not be asked for.
        copied: workers may be given the state of a peer, which reads another part of the data; see :meth:`restore`
            and :func:`of_a_peer`.
        beside: objects, by name, whose generators and counters reading the loader may change, although the loader does
            not show that it holds them (a generator function that reads another loader).
        script: see :class:`.Engine`.
        late: it was made after training had begun.

    Raises:
        Unsupported: for ``in_order=False``, where the order of batches depends on time.
    """

    def __init__(
        self,
        loader: Any,
        *,
        mode: str = "restore",
        seed: int = 0,
        rank: int = 0,
        first_epoch: int = 0,
        ahead: int = 1,
        lazy: bool = False,
        orders: Orders | None = None,
        copied: bool = False,
        beside: Mapping[str, object] | None = None,
        script: Script | None = None,
        late: bool = False,
    ) -> None:
        self._swift_loader = loader
        self._swift_ahead = ahead
        self._swift_keep = ahead if lazy else 0
        self._swift_lazy = lazy
        self._swift_count = first_epoch
        self._swift_loaded: Any = None
        self._swift_positions: list[Callable[[], Position | None]] = []
        self._swift_engine = Engine(loader, mode, [seed, rank, first_epoch], orders, beside or {}, script, late)
        self._swift_copied = copied
        self._swift_built = self._swift_engine.owned.capture()["scalars"]

    # -- what the wrapper looks like ----------------------------------------------------------------------------------

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() sees the loader's class
        """The loader's class, for ``isinstance``."""
        return type(self._swift_loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_swift_"):  # while unpickling
            raise AttributeError(name)
        if name == "_iterator":  # persistent workers hang on the loader that is really iterated
            return getattr(self._swift_engine.iterated, name)
        return getattr(self._swift_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_swift_"):
            self.__dict__[name] = value
            return
        setattr(self._swift_loader, name, value)
        self._swift_engine.follow_attribute(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._swift_loader, name)

    def __len__(self) -> int:
        return len(self._swift_loader)

    def __bool__(self) -> bool:
        return bool(self._swift_loader)

    def __repr__(self) -> str:
        return f"ResumableLoader({self._swift_loader!r})"

    def __copy__(self) -> Any:
        return copy.copy(self._swift_loader)

    def __iter__(self) -> Iterator[Any]:
        record = ReadingRecord(epoch=self._swift_count)
        self._swift_count += 1
        record.loaded, self._swift_loaded = self._swift_loaded, None
        position = Position(self._swift_engine, record, self._swift_ahead, self._swift_keep, self._swift_lazy)
        self._swift_positions = [ref for ref in self._swift_positions if ref() is not None] + [weakref.ref(position)]
        return position

    # -- position -----------------------------------------------------------------------------------------------------

    @property
    def wrapped(self) -> Any:
        """The user's loader."""
        return self._swift_loader

    def fetches_ahead(self, ahead: int) -> None:
        """Change how many items the caller fetches before it uses them (see the class)."""
        self._swift_ahead = ahead
        for ref in self._swift_positions:
            if (position := ref()) is not None:
                position.fetches_ahead(ahead)

    def state(self, position: Iterator[Any] | None = None, *, between: bool = False) -> dict[str, Any]:
        """Where the iteration ``position`` is (default: the oldest one alive), as plain data.

        Costs a few microseconds in the common case; some kilobytes where generators were drawn from. ``between``: no
        iteration is in progress; take only what shapes the next one.

        Raises:
            Unsupported: if the rest of the iteration may have to be divided among others and cannot be.
        """
        engine = self._swift_engine
        found = position if type(position) is Position else self._swift_position()
        continues = engine.continues()
        if between or found is not None and found.exhausted and not self._swift_ahead and not continues:
            found = None
        if found is None:
            records = [each for each in engine.pool if continues or engine.in_process and each.rereads]
        else:
            self._swift_refuse(found)
            record = found.up_to_date()
            engine.tell_cost(record)
            records = engine.pool if any(each is record for each in engine.pool) else [record]
        owned = engine.owned.capture()
        return {
            "count": self._swift_count,
            MARK: True,
            "ahead": self._swift_ahead,
            # Workers with another part of the data have built their own samplers: they get what has changed since then.
            "moved": changes(self._swift_built, owned["scalars"]),
            "live": found is not None,
            "iterations": [each.plain() for each in records],
            "recent": found.plain_recent() if found is not None else [],
            "hand": found.plain_hand() if found is not None else [],
            "owned": owned,
            "where": engine.where() if engine.kind is LoaderKind.RESTORE else None,
            "built": self._swift_built if self._swift_copied else {},
        }

    def restore(self, state: Mapping[str, Any], position: Iterator[Any] | None = None, *, copied: bool = False) -> None:
        """Put the wrapper, and the iteration ``position`` of this process, where :meth:`state` was taken.

        Leaves the global generators in an undefined state: the caller restores its own afterwards.

        Args:
            state: of this rank's failed worker.
            copied: it is another rank's: what its sampler was built with (the rank) is not taken over, what has changed
                since is.

        Raises:
            Unsupported: if the items are not the same when they are read again.
        """
        if copied:
            state = as_copy(state)
        engine = self._swift_engine
        found = position if type(position) is Position else self._swift_position()
        # A loader that is its own iterator cannot be started again: what this process took while starting up counts.
        own_iterator = isinstance(self._swift_loader, Iterator)
        taken = sum(record.delivered for record in engine.pool) if own_iterator else 0
        items: deque[Any] = deque(found.last_items if own_iterator and found else (), maxlen=max(self._swift_ahead, 1))
        engine.stop(found.inner if found is not None else None)
        self._swift_lazy = False
        self._swift_keep = 0
        self._swift_count = state["count"]
        if state.get("fresh"):  # no worker had begun this pass: the sampler divides it
            if found is not None:
                found.correct_epoch(state["iterations"][-1]["epoch"])
            engine.restore_owned(state["owned"])
            return
        reached = replay(engine, state, taken, items)
        if found is not None and reached is not None and state["live"]:
            found.take_up(*reached, as_published(state.get("hand", ()), items, engine.place[1]))
        elif found is not None:
            found.end()
        engine.finish(state)

    def owned(self) -> dict[str, Any]:
        """What has changed of the loader's own generators and counters since it was wrapped, as plain data."""
        state = self._swift_engine.owned.capture()
        return {**state, "scalars": changes(self._swift_built, state["scalars"])}

    def heed(self, state: Mapping[str, Any]) -> None:
        """Take over what passes have changed of the loader, but no place in any of them."""
        self._swift_count = state["count"]
        self.set_owned({"scalars": state["moved"], "generators": state["owned"].get("generators", {})})

    def set_owned(self, owned: Mapping[str, Any]) -> None:
        """Inverse of :meth:`owned`."""
        self._swift_engine.restore_owned(owned)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _swift_position(self) -> Position | None:
        return next((position for ref in self._swift_positions if (position := ref()) is not None), None)

    def _swift_refuse(self, found: Position) -> None:
        """Raises Unsupported if the rest of the pass may have to be divided among others and cannot be."""
        notary = self._swift_engine.notary
        asked = notary is not None and notary.orders.asked and not notary.orders.may_drop
        if asked and self._swift_engine.indices is None and not found.exhausted:
            raise Unsupported(
                f"a {type(self._swift_loader).__name__} gives a stream of items, and the rest of a failed worker's "
                "stream cannot be dealt out to the others: use a map-style DataLoader or resize.data='drop', or leave "
                "on_failure='shrink' and resize.replace_timeout_s out"
            )


class _StatefulResumableLoader(ResumableLoader):
    """For loaders with ``state_dict``: frameworks look for the two methods on the class."""

    def state_dict(self) -> Any:
        return self._swift_loader.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._swift_loaded = copy.deepcopy(state_dict)
        self._swift_loader.load_state_dict(state_dict)


def wrap_loader(loader: Any, **options: Any) -> ResumableLoader:
    """A :class:`ResumableLoader` around ``loader`` (the same object if it is one already); options as there."""
    if type(loader) in (ResumableLoader, _StatefulResumableLoader):
        wrapper: ResumableLoader = loader
        return wrapper
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (_StatefulResumableLoader if stateful else ResumableLoader)(loader, **options)
