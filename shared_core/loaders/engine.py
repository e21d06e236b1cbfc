"""How a loader is iterated: itself, or a copy whose sampler and loader workers can be put anywhere."""

from __future__ import annotations

import copy
import enum
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from shared_core.errors import Unsupported
from shared_core.events import console_once
from shared_core.loaders.contents import contents_of, summed
from shared_core.loaders.indices import Drawing, Follow, Holds, Indices, all_known, may_list
from shared_core.loaders.opaque import OpaqueWatch
from shared_core.loaders.owned import OwnedState
from shared_core.loaders.place import ReadingRecord
from shared_core.loaders.randomness import RawRandom, changed, restore_raw
from shared_core.loaders.reader import MANY, MapReader, Note, Reader, StreamReader, ToldReads, has_state, watch_of
from shared_core.loaders.seeded import SeededDataset

#: The orders of so many passes are kept: a publication may name the one before the last.
_ORDERS_KEPT = 3


class Orders(Protocol):
    """Where the order of each pass over the data is published.

    Attributes:
        may_drop: samples may be left out when the number of workers changes.
        asked: the number may change while the job runs. Otherwise it may only between two starts, and orders are
            published only where that changes nothing else.
    """

    may_drop: bool
    asked: bool

    def write(self, indices: list[Any]) -> str:
        """Publish the indices of a pass, batch by batch. Returns the name for :meth:`read`."""

    def read(self, name: str) -> list[Any]:
        """What was published under ``name``."""

    def drop(self, name: str) -> None:
        """It will not be read any more."""


class Script(Protocol):
    """The script's variables, as far as its loaders concern them."""

    def reading(self) -> AbstractContextManager[None]:
        """Entered whenever a loader is asked for something."""

    def reads(self, source: Any) -> None:
        """This loader, or iterator, is put in its place by others than those who put variables back."""

    def capture_now(self) -> dict[str, Any]:
        """What they hold, for :meth:`as_then`."""

    def as_then(self, captured: dict[str, Any]) -> AbstractContextManager[None]:
        """Inside they are as they were then."""

    def plain_in(self, frame: types.FrameType) -> dict[str, Any]:
        """Variables of a function that hold numbers, text or None."""

    def put_in(self, frame: types.FrameType, values: Mapping[str, Any]) -> None:
        """Inverse of :meth:`plain_in`."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Those of its models, by names that are the same in a replacement."""


class NeedsRestart(Unsupported):
    """A replacement cannot come to this place, and a start from scratch can."""


class _Notary:
    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.record: ReadingRecord | None = None
        self._names: deque[str] = deque()

    def __call__(self, indices: list[Any]) -> None:
        name = self.orders.write(indices)
        if self.record is not None:
            self.record.order = name
        self._names.append(name)
        while len(self._names) > _ORDERS_KEPT:
            self.orders.drop(self._names.popleft())


class LoaderKind(enum.Enum):
    """What a replacement does about the items that the failed worker had been given."""

    REREAD = "they are read again"
    RESTORE = "what reading them changed is put back"
    STATE = "the loader, or its data set, is told where it was"
    SEEDED = "nothing: what an item draws is a function of its place"


def kind_of(loader: Any, mode: str) -> LoaderKind:
    """Which kind a loader (any iterable) is, given the option ``data``."""
    stock = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    maps = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if maps and mode == "seeded":
        return LoaderKind.SEEDED
    if mode == "refetch":
        return LoaderKind.REREAD
    if stock and (maps or loader.num_workers and _says_where_in_workers(loader.dataset)):
        return LoaderKind.RESTORE
    if not getattr(loader, "num_workers", 0):  # the random numbers of loader workers are in no state_dict
        return LoaderKind.STATE if has_state(loader) or stock and has_state(loader.dataset) else LoaderKind.REREAD
    return LoaderKind.REREAD


def _says_where_in_workers(stream: Any) -> bool:
    """Whether each loader worker's copy of a stream can tell its place; torch itself changes pipes in the workers."""
    return has_state(stream) and not isinstance(stream, IterDataPipe)


def _frames(inner: Iterator[Any]) -> Iterator[types.FrameType]:
    item = getattr(getattr(inner, "_dataset_fetcher", None), "dataset_iter", inner)
    while isinstance(item, types.GeneratorType) and item.gi_frame is not None:
        yield item.gi_frame
        item = item.gi_yieldfrom


class Engine:
    """Iterates a loader and notes what is needed to do so again.

    Args:
        mode: the option ``data``.
        place: seed, rank and number of the pass; the last is set when a pass begins.
        orders: where the order of each pass is published; None where it is never read.
        beside: objects, by name, that reading the loader may change although it does not show that it holds them.
        script: whose loader it is; None where nobody asks what reading changes.
        late: the loader was made after training had begun.

    Attributes:
        iterated: the object whose iterator is taken.
        indices: stands for the loader's sampler; None where the loader keeps its own.
        in_process: items are read in this process.
        stream: items cannot be read in another order, or left out.
        workers: loader workers that can be told what to do.
        compared: items that are read again are compared with what they were.
        says_where: the loader or its data set, if it can tell its place; None if neither can.
        pool: the passes that shape the next one, and the newest.

    Raises:
        Unsupported: for ``in_order=False``, where the order of batches depends on time.
    """

    def __init__(
        self,
        loader: Any,
        mode: str,
        place: list[int],
        orders: Orders | None,
        beside: Mapping[str, object],
        script: Script | None = None,
        late: bool = False,
    ) -> None:
        self.loader, self.place, self._script, self._late = loader, place, script, late
        self.kind = kind_of(loader, mode)
        self.iterated: Any = loader
        self.indices: Indices | None = None
        self.notary = _Notary(orders) if orders is not None else None
        self.in_process, self.stream, self.workers = True, True, 0
        self.says_where: Any = None
        if self.kind in (LoaderKind.STATE, LoaderKind.RESTORE):
            each = (loader, getattr(loader, "dataset", None))
            self.says_where = next((one for one in each if has_state(one)), None)
        self.pool: list[ReadingRecord] = []
        self.times = [0]  # by loader worker, batches whose reading changed what cannot be put back
        self._roots = {"loader": loader, **beside}
        self._last: Callable[[], Any] = lambda: None
        if isinstance(loader, DataLoader):
            if loader.num_workers > 0 and not loader.in_order:
                raise Unsupported(
                    "DataLoader(in_order=False) delivers batches in an order that depends on time, so a failed "
                    "worker's data cannot be read again; use in_order=True"
                )
            self.in_process = loader.num_workers == 0
            self.stream = isinstance(loader.dataset, IterableDataset)
            listed = orders is not None and (orders.asked or may_list(loader))
            known = all_known(loader)
            if not self.stream and (self.kind is not LoaderKind.REREAD or not known or listed):
                self._copy(known, listed)
            elif self.stream and self.kind is LoaderKind.RESTORE:
                self.iterated, self.workers = copy.copy(loader), loader.num_workers
                vars(self.iterated)["_iterator"] = None
                self.times = [0] * self.workers
        self.owned = OwnedState(self._roots)
        listed = isinstance(loader, (list, tuple, range))  # continuing in it reads nothing
        self.cheap = mode == "refetch" or listed
        self.compared = not listed and self.kind is not LoaderKind.SEEDED
        self._watch: OpaqueWatch | None = None
        self._said = False
        self._holds: Holds | None = None
        self._refused = ""
        self._models = dict[str, int]()  # of the newest record with which loader workers were started

    def _copy(self, known: bool, listed: bool) -> None:
        """Iterate a shallow copy. The user's loader stays as it is; both share data set, sampler and generator."""
        loader = self.loader
        if self.kind is LoaderKind.STATE and getattr(loader, "_iterator", None) is not None:
            raise Unsupported(
                f"a {type(loader).__name__} over a map-style data set was asked for its state before its first pass, "
                "as Accelerate does with use_stateful_dataloader=True, and cannot be read again in a replacement: "
                "leave that out, a replacement continues the pass without it"
            )
        self.iterated = copy.copy(loader)
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        self.workers = loader.num_workers if self.kind is LoaderKind.RESTORE else 0
        place = self.place if self.kind is LoaderKind.SEEDED else None
        self.indices = Indices(getattr(loader, name), name == "batch_sampler", known, self.workers, place)
        if listed:
            self.indices.announce = self.notary  # without a reference to this: a cycle would keep worker processes
        # Written past __setattr__: DataLoader forbids changing these names once it is built.
        own: dict[str, Any] = {name: self.indices, "_iterator": None}
        if self.kind is LoaderKind.SEEDED:
            own["dataset"] = SeededDataset(loader.dataset)
        vars(self.iterated).update(own)
        self.times = [0] * max(1, self.workers)

    # -- iterating ----------------------------------------------------------------------------------------------------

    def take_numbers(self, numbers: Sequence[Any] | None) -> None:
        """The pass goes through the failed worker's ``range``: a replacement may make another one, as where the script
        continues from a file that it has written itself. None as the end: that of the loader.
        """
        if numbers is not None and isinstance(self.loader, range):
            start, stop, step = numbers
            self.iterated = range(start, self.loader.stop if stop is None else stop, step)

    def start(self, record: ReadingRecord, follow: Follow | None = None) -> Iterator[Any]:
        """``iter()`` of the loader; notes in ``record`` what it draws from. ``follow``: what the sampler is to do."""
        continues = self.continues()
        self.look_around()
        record.owned = self.owned.capture()
        record.contents = self.contents
        if isinstance(self.iterated, range):
            record.numbers = [self.iterated.start, self.iterated.stop, self.iterated.step]
        if self.kind is LoaderKind.RESTORE:
            record.rereads = {}
        self.place[2] = record.epoch
        before = RawRandom()
        if self.notary is not None:
            self.notary.record = record
        if self.indices is not None:
            self.indices.watch = self._watch
            self.indices.begin(follow or Follow(), lasting=continues)
            self._holds = Holds(self.indices.inner)
        with self._reading(), self._forking(record, continues):
            self._compare_models(record.models)
            if self.workers:
                reader = self._reader(follow or Follow())
                vars(self.iterated).update(dataset=reader, collate_fn=reader.collate, worker_init_fn=reader.begin)
            inner: Iterator[Any] = iter(self.iterated)
        if self._script is not None and isinstance(self.loader, DataLoader):
            self._script.reads(self.loader)
        if self.kind is not LoaderKind.SEEDED:
            record.before = before.pack(changed(before, RawRandom()))
        self._enter(record, inner, continues)
        return inner

    def _reading(self) -> AbstractContextManager[None]:
        return self._script.reading() if self._script is not None else nullcontext()

    def _forking(self, record: ReadingRecord, continues: bool) -> AbstractContextManager[None]:
        """Loader workers keep what the script held when they were started; those of a replacement start later."""
        if self.in_process or continues or self._script is None:
            return nullcontext()
        called, self._models = self._models, record.models
        if record.held:
            return self._script.as_then(record.held)
        record.held = self._script.capture_now()
        record.models |= self._sums(called)
        return nullcontext()

    def _sums(self, names: Container[str]) -> dict[str, int]:
        tensors = self._script.tensors() if self._script is not None and names else {}
        return {name: summed(each, 0) for name, each in tensors.items() if name in names}

    def _compare_models(self, models: Mapping[str, int]) -> None:
        if (here := self._sums(models)) != models:
            name = next(name for name in models if here.get(name) != models[name])
            raise NeedsRestart(
                f"rank {self.place[1]}: loader workers call a model ({name}), with the values that it had when they "
                "were started, which a replacement cannot have any more. Call it in the training step, or read with "
                "num_workers=0 (docs/loops.md)"
            )

    def _reader(self, follow: Follow) -> Reader:
        tensors = self._script.tensors() if self._script is not None else {}
        names = {id(each): name for name, each in reversed(list(tensors.items()))}
        return StreamReader(self.loader, names, follow.starts) if self.stream else MapReader(self.loader, names)

    def _enter(self, record: ReadingRecord, inner: Iterator[Any], continues: bool) -> None:
        if continues and inner is self._last():
            self.pool = [*self.pool, record]
        else:  # earlier passes only matter for what they changed in the data set
            self.pool = [*(each for each in self.pool if self.in_process and each.rereads), record]
            self.times = [0] * len(self.times)
        try:
            self._last = weakref.ref(inner)
        except TypeError:  # some built-in iterators take no weak references; only one that is its own iterator matters
            own = self.loader if inner is self.loader else None
            self._last = lambda: own

    @property
    def contents(self) -> str:
        """See :func:`contents_of`."""
        return contents_of(self.loader, values=self._late)

    @property
    def drawing(self) -> Drawing | None:
        """What draws the indices of the pass that was started last."""
        return self.indices.newest if self.indices is not None else None

    def continues(self) -> bool:
        """Whether earlier passes shape the next one: persistent workers, or a loader that is its own iterator."""
        last = self._last()
        return last is not None and (last is self.loader or last is getattr(self.iterated, "_iterator", None))

    def fetch(self, inner: Iterator[Any]) -> tuple[Any, Note | None]:
        """The next item, and a loader worker's note with it.

        Raises:
            StopIteration: at the end.
            Unsupported: as :meth:`refuse` was told.
        """
        if self._refused:
            raise Unsupported(self._refused)
        try:
            with self._reading():
                return self._fetch(inner)
        finally:
            if self._holds is not None:
                self._holds.note()  # by drawing a sampler may change what it holds

    def refuse(self, why: str) -> None:
        """Fetch nothing any more. Whoever looks at the data set and the sampler can still say what has changed."""
        self._refused = why

    def sampler_changed(self) -> bool:
        """Whether the script has changed what the sampler holds since the last fetch of this pass."""
        return self._holds is not None and self._holds.changed()

    def _fetch(self, inner: Iterator[Any]) -> tuple[Any, Note | None]:
        if self.kind is LoaderKind.SEEDED and self.in_process:
            outside = RawRandom()
            try:
                return next(inner), None
            finally:
                restore_raw(outside)
        item = next(inner)
        if type(item) is ToldReads:
            return item[0], item[1]
        return item, None

    def changed(self) -> str:
        """Name of what reading the last batch changed in this process that cannot be put back; empty if nothing."""
        name = self._watch.changed() if self._watch is not None else ""
        if name:
            self.look_around()
            if self.indices is not None:
                self.indices.watch = self._watch
        return name

    def look_around(self) -> None:
        """Look again for generators and counters: the objects may be others now."""
        self.owned = OwnedState(self._roots)
        self._watch = None
        if self.kind is LoaderKind.RESTORE and self.in_process:
            self._watch = watch_of(self.loader.dataset, self.loader.collate_fn, self.owned)

    def count_changes(self, told: Note, record: ReadingRecord) -> None:
        """A loader worker has told how many batches have changed what cannot be put back, and which models it calls."""
        self._models.update(told.models)
        if told.times > self.times[told.worker] + bool(told.changed) and len(self.pool) > 1:
            before = self.pool[-2]  # among the batches that were on their way when it was left
            if self.stream:
                before.rereads = None
            elif before.rereads is not None:
                before.rereads[before.delivered] = {}
        self.times[told.worker] = told.times
        if told.times > MANY and record.rereads is not None:
            self.give_up(record, "its data set")

    def where(self) -> Any:
        """A copy of the state of the loader or its data set that tells its place; None if neither can."""
        return copy.deepcopy(self.says_where.state_dict()) if self.says_where is not None and self.in_process else None

    def suspended(self, inner: Iterator[Any]) -> list[dict[str, Any]]:
        """Plain variables of the generators that a stream is read from in this process. They are not a function of the
        items: when these are read again, the model, or what a generator has given by reference, is further on.
        """
        if self._script is None or not (self.stream and self.in_process):
            return []
        return [self._script.plain_in(frame) for frame in _frames(inner)]

    def put_suspended(self, inner: Iterator[Any], values: Sequence[Mapping[str, Any]]) -> None:
        """Inverse of :meth:`suspended`, once the same items are read again."""
        if self._script is not None:
            for frame, own in zip(_frames(inner), values, strict=False):
                self._script.put_in(frame, own)

    def go_to(self, where: Any) -> None:
        """Inverse of :meth:`where`."""
        if where is not None:
            self.says_where.load_state_dict(copy.deepcopy(where))

    def restore_owned(self, owned: Mapping[str, Any], where: Any = None) -> None:
        """Put back generators and counters, except of what gets its place by :meth:`go_to`."""
        leave = None if where is None else "loader" if self.says_where is self.loader else "loader.dataset"
        self.owned.restore(owned, leave)

    def finish(self, state: Mapping[str, Any]) -> None:
        """The place of a failed worker is reached: take over all that it had changed."""
        last = state["iterations"][-1] if state["iterations"] else {}
        where = state.get("where")
        self.restore_owned(state["owned"], where if where is not None else last.get("stream"))
        self.go_to(where)

    def forget_passes(self) -> None:
        """What this process has begun does not count."""
        self.pool, self._last = [], lambda: None

    def replace(self, record: ReadingRecord) -> None:
        """What is known of the newest pass comes from a failed worker."""
        if self.notary is not None and self.notary.record is not None:
            record.order = self.notary.record.order or record.order
            self.notary.record = record
        self.pool[-1] = record

    def deal_out(self, record: ReadingRecord | None, state: Mapping[str, Any]) -> None:
        """Iterate this rank's share of a divided pass; None for the sampler's indices."""
        if self.indices is None:
            return
        self.indices.listed, self.indices.first = None, 0
        if record is not None and record.dealt and self.notary is not None:
            orders = self.notary.orders
            if "indices" in state:  # never dropped: persistent worker processes may need it much later
                record.order = orders.write(state["indices"])
            self.indices.listed, self.indices.first = orders.read(record.order), record.first

    def follow_attribute(self, name: str, value: Any) -> None:
        replaced = self.workers and name in ("collate_fn", "worker_init_fn")
        if self.iterated is not self.loader and not replaced:
            vars(self.iterated)[name] = value

    def give_up(self, record: ReadingRecord, what: str) -> None:
        """All batches of this pass are to be read again: reading them changes too much that cannot be put back."""
        record.rereads = None
        self._watch = None
        if self.indices is not None:
            self.indices.watch = None
        self.say_in_proportion(f"reading batches changes {what}, which cannot be put back")

    def tell_cost(self, record: ReadingRecord) -> None:
        """Tell the user, once, if a failure takes time in proportion to the place in the pass."""
        again = record.delivered and record.rereads is None and record.stream is None
        if again and self.kind in (LoaderKind.REREAD, LoaderKind.STATE) and not self.cheap:
            self.say_in_proportion("it is a stream that cannot be told where it was")

    def say_in_proportion(self, why: str) -> None:
        if not self._said:
            self._said = True
            kind = type(self.loader).__name__
            console_once(
                f"data-{kind}",
                f"if a worker fails, its replacement reads again all that was read of this pass over a {kind}, which "
                f"takes longer the later that is: {why} (docs/loops.md)",
            )

    def stop(self, inner: Iterator[Any] | None) -> None:
        """End an iterator, and the workers that this process has started."""
        attributes = getattr(self.iterated, "__dict__", {})
        for iterator in (inner, attributes.get("_iterator")):
            shutdown = getattr(iterator, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()
        if attributes.get("_iterator") is not None:
            attributes["_iterator"] = None
