"""A wrapper around any iterable loader that can say where it is and be put back there in another process."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from shared_core.errors import Unsupported
from shared_core.loaders.randomness import (
    DrawLog,
    OwnedState,
    RandomParts,
    RawRandom,
    changed,
    restore_raw,
    write_random,
)
from shared_core.loaders.reshard import MARK
from shared_core.loaders.seeded import Draws, Indices, engine_of

#: Samplers known to draw global randomness at most with their first index: nothing to watch later.
_KNOWN_SAMPLERS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

#: Passes whose order is kept: a publication may name the one before the last.
_ORDERS_KEPT = 3


@dataclass
class _Iteration:
    """What is needed to run one ``iter()`` of a loader again."""

    epoch: int = 0
    before: RandomParts = field(default_factory=dict)  # what iter() drew from, as it was
    owned: dict[str, Any] = field(default_factory=dict)  # of the loader before iter()
    owned_first: dict[str, Any] = field(default_factory=dict)  # and before the first fetch, where most samplers start
    loaded: Any = None  # state_dict given to the loader before iter()
    fetches: Draws = field(default_factory=dict)  # what fetches drew from
    draws: Draws = field(default_factory=dict)  # what a watched sampler drew from
    delivered: int = 0
    exhausted: bool = False
    order: str = ""  # name under which its indices were published
    first: int = 0  # number of its first batch, where the rest of a pass was dealt out again
    dealt: bool = False  # its indices are the published ones, not the sampler's
    length: int = 0  # of the pass, then

    def plain(self) -> dict[str, Any]:
        return dict(vars(self))


class Orders(Protocol):
    """Where the order of each pass over the data is published.

    Attributes:
        may_drop: samples may be left out when the number of workers changes.
        asked: the number may change while the job runs. Otherwise it may only between two starts, and orders are
            published where that changes nothing else.
    """

    may_drop: bool
    asked: bool

    def write(self, indices: list[Any]) -> str:
        """Publish the indices of a pass, batch by batch. Returns the name for :meth:`read`."""

    def read(self, name: str) -> list[Any]:
        """What was published under ``name``."""

    def drop(self, name: str) -> None:
        """It will not be asked for any more."""


class _Notary:
    """Publishes the order of each pass and notes its name."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.record: _Iteration | None = None
        self._names: deque[str] = deque()

    def __call__(self, indices: list[Any]) -> None:
        name = self.orders.write(indices)
        if self.record is not None:
            self.record.order = name
        self._names.append(name)
        while len(self._names) > _ORDERS_KEPT:
            self.orders.drop(self._names.popleft())


class Position(Iterator[Any]):
    """The iterator that a :class:`ResumableLoader` hands out. ``last_items`` holds re-read items after a restore."""

    def __init__(self, owner: ResumableLoader, record: _Iteration) -> None:
        self._owner = owner
        self._record = record
        self._inner: Iterator[Any] | None = None
        self._log = DrawLog()
        self._recent: deque[RawRandom] = deque(maxlen=max(owner._swift_ahead, 1))
        self.last_items: list[Any] = []

    @property
    def exhausted(self) -> bool:
        """Whether the end was reached."""
        return self._record.exhausted

    @property
    def left(self) -> int | None:
        """Items not yet fetched, where the rest of the pass was dealt out to another number of workers."""
        return self._record.length - self._record.delivered if self._record.dealt else None

    @property
    def delivered(self) -> int:
        """Items fetched so far."""
        return self._record.delivered

    def __next__(self) -> Any:
        owner, record = self._owner, self._record
        if self._inner is None:
            self._inner = owner._swift_start(record)
        # A map-style loader without workers needs only what its sampler started from; a stream of items also what each
        # item drew from, since a shuffle buffer carries it on. What a fetch consumes is known only after it.
        noted = owner._swift_in_process and (owner._swift_stream or record.delivered == 0)
        before = RawRandom() if noted or (owner._swift_in_process and owner._swift_ahead) else None
        if noted and record.delivered == 0:
            record.owned_first = owner._swift_owned.capture()
        try:
            item = owner._swift_fetch(self._inner)
        except StopIteration:
            record.exhausted = True
            raise
        if before is not None:
            if noted:
                self._log.note(record.delivered, before, RawRandom())
                record.fetches = self._log.notes
            self._recent.append(before)
        record.delivered += 1
        if owner._swift_keep:
            self.last_items = (self.last_items + [item])[-owner._swift_keep :]
        return item


class ResumableLoader:
    """Wraps a loader (``DataLoader`` of any kind, or any iterable) and delegates everything to it.

    ``isinstance(wrapper, type(loader))`` holds, attributes are read and written through, ``len`` and workers behave
    as before.
    :meth:`state` is plain data; :meth:`restore` in another process, on a wrapper around the same loader built by the
    same code, makes the iteration in progress go on with the next item, bit for bit.

    Args:
        loader: the loader.
        mode: ``refetch``: items already delivered are read again and thrown away (exact; cost in proportion);
            ``seeded``: an item's randomness is a function of seed, rank, epoch, batch and index, so skipping costs
            only drawing indices. Only map-style ``DataLoader`` can be seeded, all else is read again.
        seed: seed of ``seeded``.
        rank: logical rank, enters the seed of items (not the sampler's).
        first_epoch: number of the first iteration, enters the seed.
        ahead: how many items the caller fetches before it uses them; that many can be had again after a restore
            (:attr:`Position.last_items`).
        lazy: build iterators (and worker processes) at the first fetch: a newcomer restores before that.
        orders: where the order of each pass is published, so that its rest can be dealt out to another number of
            workers; None where that will not be asked for.
        copied: workers may be given the state of a peer, which reads another part of the data; see :meth:`restore`
            and :func:`of_a_peer`.
        beside: objects, by name, whose generators and counters reading the loader may change, although the loader does
            not show that it holds them (a generator function that reads another loader).

    Raises:
        Unsupported: for ``in_order=False``, where the order of batches depends on time.
    """

    def __init__(
        self,
        loader: Any,
        *,
        mode: str = "refetch",
        seed: int = 0,
        rank: int = 0,
        first_epoch: int = 0,
        ahead: int = 1,
        lazy: bool = False,
        orders: Orders | None = None,
        copied: bool = False,
        beside: Mapping[str, object] | None = None,
    ) -> None:
        self._swift_loader = loader
        self._swift_roots = {"loader": loader, **(beside or {})}
        self._swift_ahead = ahead
        self._swift_keep = ahead if lazy else 0
        self._swift_lazy = lazy
        self._swift_place = [seed, rank, first_epoch]
        self._swift_count = first_epoch
        self._swift_loaded: Any = None
        self._swift_pool: list[_Iteration] = []
        self._swift_last_inner: Callable[[], Any] | None = None
        self._swift_positions: list[Callable[[], Position | None]] = []
        self._swift_in_process = True
        self._swift_stream = True
        self._swift_engine: Any = loader
        self._swift_indices: Indices | None = None
        self._swift_seeded = listed = False
        if isinstance(loader, DataLoader):
            if loader.num_workers > 0 and not loader.in_order:
                raise Unsupported(
                    "DataLoader(in_order=False) delivers batches in an order that depends on time, so a lost "
                    "worker's data cannot be read again; use in_order=True"
                )
            self._swift_in_process = loader.num_workers == 0
            iterable = isinstance(loader.dataset, IterableDataset)
            self._swift_stream = iterable
            listed = orders is not None and (orders.asked or _may_list(loader))
            known = _all_known(loader)
            if mode == "seeded" and not iterable:
                self._swift_seeded = True
                # Without a reference to the wrapper: a cycle would keep worker processes until the next collection.
                self._swift_engine, self._swift_indices = engine_of(loader, known, self._swift_place)
            elif not iterable and (not known or listed):
                self._swift_engine, self._swift_indices = engine_of(loader, known, None)
        # Holds no reference to the wrapper, see above.
        self._swift_notary = _Notary(orders) if orders is not None else None
        if self._swift_indices is not None and listed:
            self._swift_indices.announce = self._swift_notary
        self._swift_owned = OwnedState(self._swift_roots)
        self._swift_copied = copied
        self._swift_built = self._swift_owned.capture()["scalars"]

    # -- what the wrapper looks like ----------------------------------------------------------------------------------

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() sees the loader's class
        return type(self._swift_loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_swift_loader":  # while unpickling
            raise AttributeError(name)
        if name == "_iterator":  # persistent workers hang on the loader that is really iterated
            return getattr(self._swift_engine, name)
        return getattr(self._swift_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_swift_"):
            self.__dict__[name] = value
            return
        setattr(self._swift_loader, name, value)
        if self._swift_engine is not self._swift_loader:
            self._swift_engine.__dict__[name] = value

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
        record = _Iteration(epoch=self._swift_count)
        self._swift_count += 1
        record.loaded, self._swift_loaded = self._swift_loaded, None
        position = Position(self, record)
        self._swift_positions = [ref for ref in self._swift_positions if ref() is not None] + [weakref.ref(position)]
        if not self._swift_lazy:
            position._inner = self._swift_start(record)
        return position

    # -- position -----------------------------------------------------------------------------------------------------

    @property
    def wrapped(self) -> Any:
        """The user's loader."""
        return self._swift_loader

    def fetches_ahead(self, ahead: int) -> None:
        """Change how many items the caller fetches before it uses them (see the class)."""
        self._swift_ahead = ahead

    def state(self, position: Iterator[Any] | None = None, *, between: bool = False) -> dict[str, Any]:
        """Where the iteration ``position`` is (default: the oldest one alive), as plain data.

        Cost: a few microseconds in the common case; some kilobytes where generators were drawn from.

        Args:
            position: an iterator of this loader.
            between: no iteration is in progress; only what shapes the next one is of interest.
        """
        found = position if type(position) is Position else self._swift_position()
        if between or found is not None and found.exhausted and not self._swift_ahead and not self._swift_continues():
            found = None
        iterations: list[dict[str, Any]] = []
        recent: list[RandomParts] = []
        pool = self._swift_pool
        if found is not None:
            notary = self._swift_notary
            asked = notary is not None and notary.orders.asked and not notary.orders.may_drop
            if asked and self._swift_indices is None and not found.exhausted:
                raise Unsupported(
                    f"a {type(self._swift_loader).__name__} that gives a stream of items is iterated: what a lost "
                    "worker has left of it cannot be dealt out to others when the number of workers changes. Use a "
                    "map-style DataLoader, or resize.data='drop', or neither on_failure='shrink' nor replace_timeout_s"
                )
            started = found._inner is not None
            record = found._record
            if self._swift_indices is not None and started and pool and pool[-1] is record:
                record.draws = self._swift_indices.draws
            records = pool if any(r is record for r in pool) and self._swift_continues() else [record]
            iterations = [r.plain() for r in records]
            recent = [raw.pack() for raw in found._recent] if self._swift_ahead else []
        elif pool and self._swift_continues():
            iterations = [r.plain() for r in pool]
        owned = self._swift_owned.capture()
        return {
            "count": self._swift_count,
            MARK: True,
            "ahead": self._swift_ahead,
            # Workers with another part of the data have built their own samplers: what has changed since then follows.
            "moved": changes(self._swift_built, owned["scalars"]),
            "live": found is not None,
            "iterations": iterations,
            "recent": recent,
            "owned": owned,
            "built": self._swift_built if self._swift_copied else {},
        }

    def restore(self, state: Mapping[str, Any], position: Iterator[Any] | None = None, *, copied: bool = False) -> None:
        """Put the wrapper, and the iteration ``position`` of this process, where :meth:`state` was taken.

        Global generators are left in an undefined state: the caller restores its own afterwards.

        Args:
            state: of this rank's predecessor.
            position: an iterator of this loader.
            copied: it is another rank's: what its sampler was built with (the rank) does not follow, what has changed
                since does.
        """
        if copied:
            state = _as_copy(state)
        found = position if type(position) is Position else self._swift_position()
        own_iterator = isinstance(self._swift_loader, Iterator)
        # A loader that is its own iterator cannot be started again: what this process took while starting up counts.
        taken = sum(record.delivered for record in self._swift_pool) if own_iterator else 0
        items: deque[Any] = deque(found.last_items if own_iterator and found else (), maxlen=max(self._swift_ahead, 1))
        self._swift_stop(found)
        self._swift_lazy = False
        if state.get("fresh"):  # no worker had begun this pass: it is divided as the sampler does
            self._swift_count = state["count"]
            self._swift_keep = 0
            if found is not None:
                found._record.epoch = state["iterations"][-1]["epoch"]
            self._swift_owned.restore(state["owned"])
            return
        records = [_Iteration(**values) for values in state["iterations"]]
        if self._swift_seeded:
            records = records[-1:]
        self._swift_pool, self._swift_last_inner = [], None
        inner: Iterator[Any] | None = None
        for record in records:
            already = min(taken, record.delivered)
            taken -= already
            if record.dealt and self._swift_indices is not None and self._swift_notary is not None:
                orders = self._swift_notary.orders
                if "indices" in state:  # it is never dropped: worker processes that last may need it much later
                    record.order = orders.write(state["indices"])
                self._swift_indices.listed = orders.read(record.order)
                self._swift_indices.first = record.first
            inner = self._swift_replay(record, already, state["recent"] if record is records[-1] else [], items)
            if self._swift_indices is not None:
                self._swift_indices.listed, self._swift_indices.first = None, 0
        self._swift_count = state["count"]
        self._swift_keep = 0
        if found is not None and state["live"]:
            found._inner, found._record = inner, records[-1]
            found._log.notes = records[-1].fetches
            found.last_items = list(items)
        elif found is not None:
            found._inner, found._record = iter(()), _Iteration(exhausted=True)
        self._swift_owned.restore(state["owned"])

    def owned(self) -> dict[str, Any]:
        """What has changed of the loader's own generators and counters since it was wrapped, as plain data."""
        state = self._swift_owned.capture()
        return {**state, "scalars": changes(self._swift_built, state["scalars"])}

    def heed(self, state: Mapping[str, Any]) -> None:
        """Take over what passes have changed of the loader, but no place in any of them."""
        self._swift_count = state["count"]
        self.set_owned({"scalars": state["moved"], "generators": state["owned"].get("generators", {})})

    def set_owned(self, owned: Mapping[str, Any]) -> None:
        """Inverse of :meth:`owned`."""
        self._swift_owned.restore(owned)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _swift_position(self) -> Position | None:
        for ref in self._swift_positions:
            position = ref()
            if position is not None:
                return position
        return None

    def _swift_continues(self) -> bool:
        """Whether earlier iterations shape the next one: persistent workers, or a loader that is its own iterator."""
        last = self._swift_last_inner() if self._swift_last_inner is not None else None
        if last is None:
            return False
        return last is self._swift_loader or last is getattr(self._swift_engine, "_iterator", None)

    def _swift_start(self, record: _Iteration) -> Iterator[Any]:
        """``iter()`` of the loader, noting what it draws from."""
        continues = self._swift_continues()
        self._swift_owned = OwnedState(self._swift_roots)
        record.owned = self._swift_owned.capture()
        self._swift_place[2] = record.epoch
        before = RawRandom()
        if self._swift_notary is not None:
            self._swift_notary.record = record
        inner: Iterator[Any] = iter(self._swift_engine)
        if not self._swift_seeded:
            record.before = before.pack(changed(before, RawRandom()))
        if not continues or self._swift_last_inner is None or inner is not self._swift_last_inner():
            self._swift_pool = []
        self._swift_pool = self._swift_pool + [record]
        try:
            self._swift_last_inner = weakref.ref(inner)
        except TypeError:  # some built-in iterators have no weak references; only a loader that is its own matters
            self._swift_last_inner = partial(getattr, self, "_swift_loader") if inner is self._swift_loader else None
        return inner

    def _swift_fetch(self, inner: Iterator[Any]) -> Any:
        if not (self._swift_seeded and self._swift_in_process):
            return next(inner)
        outside = RawRandom()
        try:
            return next(inner)
        finally:
            restore_raw(outside)

    def _swift_replay(
        self, record: _Iteration, already: int, recent: list[RandomParts], items: deque[Any]
    ) -> Iterator[Any]:
        """Run one noted iteration again up to where it was; ``items`` receives the last ones delivered."""
        delivered = record.delivered
        if not already:
            self._swift_owned.restore(record.owned)
        if record.loaded is not None:
            self._swift_loader.load_state_dict(record.loaded)
        write_random(record.before)
        if self._swift_seeded and self._swift_indices is not None:
            already = delivered - min(delivered, self._swift_ahead)
            self._swift_indices.skip = already
        elif self._swift_indices is not None:
            self._swift_indices.replay = record.draws
        inner = self._swift_start(_Iteration(epoch=record.epoch))
        if self._swift_indices is not None:
            self._swift_indices.skip, self._swift_indices.replay = 0, {}
        for number in range(already, delivered):
            if number == 0 and record.owned_first:
                self._swift_owned.restore(record.owned_first)
            write_random(record.fetches.get(number, {}))
            if number >= delivered - len(recent):
                write_random(recent[number - delivered])
            items.append(self._swift_fetch(inner))
        if record.exhausted:
            next(inner, None)
        if self._swift_notary is not None and self._swift_notary.record is not None:
            record.order = self._swift_notary.record.order or record.order
            self._swift_notary.record = record
        self._swift_pool[-1] = record
        return inner

    def _swift_stop(self, position: Position | None) -> None:
        """End the iterator (and its workers) that this process has started."""
        attributes = getattr(self._swift_engine, "__dict__", {})
        for iterator in (position._inner if position is not None else None, attributes.get("_iterator")):
            shutdown = getattr(iterator, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()
        if attributes.get("_iterator") is not None:
            attributes["_iterator"] = None


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


def of_a_peer(state: Mapping[str, Any]) -> dict[str, Any]:
    """As :func:`_as_copy`, for a loader whose place in the data somebody else keeps."""
    owned = {**state["owned"], "scalars": state["moved"]}
    return {**state, "owned": owned, "iterations": [], "recent": [], "live": False}


def changes(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Attributes, by object, that are new or have another value."""
    return {
        path: changed
        for path, values in now.items()
        if (changed := {k: v for k, v in values.items() if k not in before.get(path, {}) or before[path][k] != v})
    }


def _as_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """A place in the data without what the sampler and the data set were built with."""

    def moved(owned: Mapping[str, Any]) -> dict[str, Any]:
        return {**owned, "scalars": changes(state["built"], owned["scalars"])} if owned else {}

    iterations = [
        {**each, "owned": moved(each["owned"]), "owned_first": moved(each["owned_first"])}
        for each in state["iterations"]
    ]
    return {**state, "owned": moved(state["owned"]), "iterations": iterations}


def _all_known(loader: DataLoader[Any]) -> bool:
    """Whether no sampler of the loader can draw global randomness after its first index."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return all(s is None or type(s) in _KNOWN_SAMPLERS or _is_distributed_wrapper(s) for s in samplers)


def _may_list(loader: DataLoader[Any]) -> bool:
    """Whether nobody can see when its indices are drawn, so that all may be drawn with the first."""
    inner = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)  # Accelerate's share of another's
    samplers = [inner, getattr(inner, "sampler", loader.sampler)]
    return all(
        s is None or type(s) in _KNOWN_SAMPLERS or _is_distributed_wrapper(s) or _is_seedable(s) for s in samplers
    )


def _is_seedable(sampler: Any) -> bool:
    # Accelerate's: it counts its passes when one ends, but is told the number before each.
    return isinstance(sampler, RandomSampler) and type(sampler).__module__.startswith("accelerate.")


def _is_distributed_wrapper(sampler: Any) -> bool:
    # A subclass that does not draw by itself: its indices come from a list made once an epoch.
    return isinstance(sampler, DistributedSampler) and type(sampler).__module__.startswith("lightning.")
