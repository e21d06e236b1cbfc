"""What a loader worker does besides reading: it sends its state with each batch, and goes to one that it is given."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader, get_worker_info

from shared_core.loaders.contents import summed
from shared_core.loaders.opaque import OpaqueWatch
from shared_core.loaders.owned import OwnedState
from shared_core.loaders.randomness import RawRandom, changed, restore_raw, write_random

_PASSED_OVER = object()
_DREW = "a global random generator with the items of a stream"


class Asked:
    """An index, or those of a batch, for a loader worker. ``state`` (see :attr:`Note.state`) is put back first; with
    ``passed_over`` nothing is read.
    """

    def __init__(self, index: Any = None, state: dict[str, Any] | None = None, passed_over: bool = False) -> None:
        self.index, self.state, self.passed_over = index, state, passed_over


class Note:
    """What a loader worker sends with a batch; no container, so that pinning memory does not look into it.

    Attributes:
        state: its generators, those and counters of its data set, and ``state_dict`` of that, after the batch was
            read: as plain data, without what is unchanged since the worker started.
        changed: what reading the batch changed that cannot be put back; empty if nothing.
        times: batches so far whose reading did so.
        models: checksums of tensors of models that were called for the first time.
    """

    def __init__(self, state: dict[str, Any], changed: str, times: int, worker: int, models: Mapping[str, int]) -> None:
        self.state, self.changed, self.times, self.worker, self.models = state, changed, times, worker, models


class ToldReads(list[Any]):
    """A batch and its :class:`Note`: a list, so that the batch in it is pinned."""


@dataclass(frozen=True)
class ReaderStart:
    """Where loader workers begin a pass over a stream.

    Attributes:
        states: by worker, see :attr:`Note.state`; a worker without one begins as it is.
        turn: the worker whose turn it is: each one before it first gives a batch that is skipped.
        ends: nothing is read.
    """

    states: Mapping[int, Any] = field(default_factory=dict)
    turn: int = 0
    ends: bool = False


class Reader:
    """Stands for data set, ``collate_fn`` and ``worker_init_fn`` of a loader, in its worker processes.
    ``get_worker_info()`` shows the user's data set. ``tensors`` are names of those of the script's models, by identity.
    """

    def __init__(self, loader: DataLoader[Any], tensors: Mapping[int, str]) -> None:
        self._dataset: Any = loader.dataset
        self._collate_fn, self._init_fn = loader.collate_fn, loader.worker_init_fn
        self._tensors, self._called, self._sums = tensors, set[int](), dict[str, int]()
        self._has_state = has_state(self._dataset)
        self._times = 0

    def begin(self, worker: int) -> None:
        """The ``worker_init_fn``."""
        # Versions of torch forbid this in different ways; the user's code must see its own data set.
        object.__setattr__(get_worker_info(), "dataset", self._dataset)
        register_module_forward_pre_hook(self._call)
        if self._init_fn is not None:
            self._init_fn(worker)
        self._look_around()
        self._number, self._random, self._started = worker, RawRandom(), self._own_state()
        self._latest = self._random

    def collate(self, items: Any) -> ToldReads:
        """The batch, with a note of what reading it changed."""
        batch = self._collate_fn(items)
        what = self._watch.changed() if self._watch is not None else ""
        if what:
            self._times += 1
            self._look_around()
        models, self._sums = self._sums, {}
        return ToldReads([batch, Note(self._state(), what, self._times, self._number, models)])

    # -- inside -------------------------------------------------------------------------------------------------------

    def _call(self, module: nn.Module, _: Any) -> None:
        """A model is called, with tensors as they were when this process was started."""
        if id(module) not in self._called:
            self._called.add(id(module))
            tensors = {self._tensors.get(id(each)): each for each in (*module.parameters(), *module.buffers())}
            self._sums |= {name: summed(each, 0) for name, each in tensors.items() if name is not None}

    def _look_around(self) -> None:
        self._owned = OwnedState({"dataset": self._dataset, "collate_fn": self._collate_fn})
        self._watch: OpaqueWatch | None = None
        if self._times <= MANY:  # with more than that, all will be read again
            self._watch = watch_of(self._dataset, self._collate_fn, self._owned, alone=True)

    def _own_state(self) -> dict[str, Any]:
        owned = self._owned.capture()
        stream = pickle.dumps(self._dataset.state_dict()) if self._has_state else b""
        return {"scalars": owned["scalars"], "generators": owned["generators"], "stream": stream}

    def _state(self) -> dict[str, Any]:
        random, own = RawRandom(self._latest), self._own_state()
        self._latest = random
        state: dict[str, Any] = {name: each for name, each in own.items() if each != self._started[name]}
        if "stream" in state:
            state["stream"] = self._dataset.state_dict()
        if names := changed(self._random, random):
            state["random"] = random.pack(names)
        return state

    def _go_to(self, state: dict[str, Any]) -> None:
        restore_raw(self._random)
        write_random(state.get("random", {}))
        self._latest = RawRandom()  # what was seen before tells nothing of what has just been set
        self._owned.restore({name: state.get(name, self._started[name]) for name in ("scalars", "generators")})
        if "stream" in state:
            self._dataset.load_state_dict(copy.deepcopy(state["stream"]))
        elif self._has_state:
            self._dataset.load_state_dict(pickle.loads(self._started["stream"]))


class MapReader(Reader):
    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, asked: Any) -> Any:
        index = self._obey(asked)
        return index if index is _PASSED_OVER else self._dataset[index]

    def __getitems__(self, asked: Any) -> Any:
        indices = self._obey(asked)
        if indices is _PASSED_OVER:
            return indices
        fetch_many = getattr(self._dataset, "__getitems__", None)
        return fetch_many(indices) if fetch_many else [self._dataset[index] for index in indices]

    def collate(self, items: Any) -> ToldReads:
        return ToldReads([None, None]) if items is _PASSED_OVER else super().collate(items)

    def _obey(self, asked: Any) -> Any:
        index = asked
        if isinstance(asked, Asked):
            if asked.passed_over:
                return _PASSED_OVER
            index = asked.index
            if asked.state:
                self._go_to(asked.state)
        if self._watch is not None:
            self._watch.look(index)
        return index


class StreamReader(Reader):
    """Stands for an iterable data set that can tell its place. ``starts`` are those of the first passes; later ones
    begin where the one before has ended.
    """

    def __init__(self, loader: DataLoader[Any], tensors: Mapping[int, str], starts: Iterable[ReaderStart]) -> None:
        super().__init__(loader, tensors)
        self._size, self._starts = loader.batch_size or 1, deque(starts)
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        return self._items(self._starts.popleft() if self._starts else ReaderStart())

    def _items(self, start: ReaderStart) -> Iterator[Any]:
        if start.ends:
            return
        if self._number < start.turn:
            yield from [_PASSED_OVER] * self._size
        state = start.states.get(self._number)
        if state is not None:
            self._go_to(state)
        self._look()
        self._ended = state is not None and "ended" in state
        if not self._ended:
            yield from self._dataset
            self._ended = True

    def collate(self, items: Any) -> ToldReads:
        if items is _PASSED_OVER or type(items) is list and items[0] is _PASSED_OVER:
            return ToldReads([None, None])
        # It cannot be seen whether the data set draws once, when it is iterated, or with each item. What the collate_fn
        # draws belongs to its batch.
        drew = changed(self._latest, RawRandom(self._latest))
        told = super().collate(items)
        self._look()
        if drew:
            told[1].changed = _DREW
        if self._ended:
            told[1].state["ended"] = True
        return told

    def _look(self) -> None:
        if self._watch is not None:
            self._watch.look(None)


#: Up to so many batches whose reading changes what cannot be put back are read again; if there are more, all are.
MANY = 16


def watch_of(dataset: Any, collate_fn: Any, owned: OwnedState, alone: bool = False) -> OpaqueWatch:
    """Watches what reading changes. A data set that can tell its place has no other state."""
    roots = {"collate_fn": collate_fn} | ({} if has_state(dataset) else {"dataset": dataset})
    return OpaqueWatch(roots, owned, alone)


#: Packages whose data sets come back only near to their place: ``datasets`` fills its shuffle buffer again.
_APPROXIMATE = frozenset({"datasets"})


def has_state(item: Any) -> bool:
    """Whether an object can tell its place, and be put exactly there."""
    package = type(getattr(item, "dataset", item)).__module__.partition(".")[0]
    if package in _APPROXIMATE:
        return False
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
