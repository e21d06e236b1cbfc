"""The loaders of a training loop: which there are, and where a replacement puts each of them.

An object has no identity that another process knows. A loader that exists before the loop is known by the variable that
holds it; a pass that is in progress by its place: the n-th of its epoch, and inside another pass by the order in which
they were begun.
"""

from __future__ import annotations

import gc
import types
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol
from weakref import WeakValueDictionary

from torch.utils.data import DataLoader, Sampler

from shared_core.config import SwiftConfig
from shared_core.errors import Unsupported
from shared_core.loaders.engine import NeedsRestart, Orders, Script
from shared_core.loaders.place import from_origin, of_a_peer
from shared_core.loaders.position import Position
from shared_core.loaders.randomness import generator_state, read_random, write_random
from shared_core.loaders.resumable import wrap_loader

#: Modules whose frames and objects are not the script's.
_NOT_THE_SCRIPT = frozenset({"shared_core", "accelerate_swift", "lightning_swift", "accelerate", "runpy"})
#: Modules whose objects hold no loader of the script as an attribute.
_LIBRARIES = frozenset({"torch", "numpy", "builtins", "transformers", "datasets", "deepspeed", "tqdm", "logging"})
_MAX_FRAMES, _MAX_FOUND, _MAX_DEPTH, _MAX_CONTAINER = 8, 64, 3, 64
_PLAIN = (bool, int, float, str, bytes, type(None))
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def variables_of(frame: types.FrameType | None) -> dict[str, Any]:
    """Loaders, samplers, iterators and random generators in the variables of a script, by name.

    Looks at local and global variables of the running functions from ``frame`` outward, without those of this package,
    and at what they hold (a bounded number).
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for number, (name, variables) in enumerate(_scopes(frame)):
        for variable, value in list(variables.items()):
            _visit(f"{number} {name}.{variable}", value, 0, found, seen)
    return found


def held_by(iterable: Any, objects: Mapping[Any, Any]) -> list[str]:
    """Names of those objects that an iterable reads from, as far as that can be seen. It looks into ``islice``,
    ``zip``, ``map``, ``enumerate`` and generators.
    """
    names = {id(value): str(name) for name, value in objects.items()}
    found, seen, todo = [], {id(iterable)}, [(iterable, 0)]
    while todo:
        item, depth = todo.pop()
        for each in _read_from(item):
            if id(each) in seen:
                continue
            seen.add(id(each))
            if id(each) in names:
                found.append(names[id(each)])
            elif depth < _MAX_DEPTH and isinstance(each, (Iterator, tuple, list)):
                todo.append((each, depth + 1))
    return sorted(found)


def _scopes(frame: types.FrameType | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    modules: set[int] = set()
    count = 0
    while frame is not None and count < _MAX_FRAMES:
        scope = frame.f_globals
        if _root(scope.get("__name__")) not in _NOT_THE_SCRIPT:
            count += 1
            if frame.f_locals is not scope:
                yield frame.f_code.co_name, frame.f_locals
            if id(scope) not in modules:
                modules.add(id(scope))
                yield "globals", scope
            if frame.f_code.co_name == "<module>":
                return
        frame = frame.f_back


def _visit(name: str, item: Any, depth: int, found: dict[str, Any], seen: set[int]) -> None:
    if isinstance(item, _PLAIN) or isinstance(item, _CODE) or id(item) in seen or len(found) >= _MAX_FOUND:
        return
    seen.add(id(item))
    if isinstance(item, (DataLoader, Sampler, Iterator)) or generator_state(item) is not None:
        if _root(type(item).__module__) not in _NOT_THE_SCRIPT:
            found[name] = item
        return
    if depth < _MAX_DEPTH:
        for key, value in _children(item):
            _visit(f"{name}.{key}", value, depth + 1, found, seen)


def _children(item: Any) -> list[tuple[Any, Any]]:
    if isinstance(item, (list, tuple)):
        return list(enumerate(item)) if len(item) <= _MAX_CONTAINER else []
    if isinstance(item, dict):
        return [(key, value) for key, value in item.items() if isinstance(key, _PLAIN)][:_MAX_CONTAINER]
    if _root(type(item).__module__) in _LIBRARIES | _NOT_THE_SCRIPT:
        return []
    return list(getattr(item, "__dict__", {}).items())[:_MAX_CONTAINER]


def _read_from(item: Any) -> list[Any]:
    """What an iterator holds, and for a generator the global variables that its code names."""
    held = gc.get_referents(item)
    code = getattr(item, "gi_code", None)
    if code is not None and item.gi_frame is not None:
        held += [item.gi_frame.f_globals[name] for name in code.co_names if name in item.gi_frame.f_globals]
    return held


def _root(module: str | None) -> str:
    return (module or "").split(".")[0]


#: Of loaders that no variable holds, so many are remembered.
_REMEMBERED = 16


class LoaderOwner(Protocol):
    """What loaders need to know of the worker they belong to."""

    rank: int

    @property
    def added(self) -> bool:
        """Whether what is being restored is a copy of another rank's."""

    @property
    def origin(self) -> str:
        """Whose state is being restored: of the ``same`` run, of a ``checkpoint``, or of an ``other`` rank."""

    def fall_back(self, reason: str) -> NoReturn:
        """All workers start again; does not return."""

    @property
    def orders(self) -> Orders | None:
        """Where the order of each pass is published; None where it is never read."""

    @property
    def variables(self) -> Script:
        """Of the script."""

    @property
    def reroutes(self) -> bool:
        """Whether others compute this worker's share when it fails."""

    @property
    def joining(self) -> bool:
        """Whether it has not reached the failed worker's place yet."""


@contextmanager
def restarting(worker: LoaderOwner | None) -> Iterator[None]:
    """Inside, all workers start again where a replacement cannot come to its place. A start from a checkpoint ends with
    an error there, and so does a loader that belongs to no worker.
    """
    try:
        yield
    except NeedsRestart as why:
        if worker is not None and worker.origin == "same":
            worker.fall_back(str(why))
        raise


class TrackedLoader:
    """A loader whose place in the data is published at step boundaries.

    Args:
        loader: any iterable.
        ahead: items that are fetched before they are used.
        epoch: number of its first pass; with ``data="seeded"`` part of the seed.
        beside: other objects that reading it may change; see :class:`ResumableLoader`.
        late: see :class:`ResumableLoader`.

    Attributes:
        loader: iterate this instead.
    """

    def __init__(
        self,
        loader: Any,
        worker: LoaderOwner,
        config: SwiftConfig,
        ahead: int = 0,
        epoch: int = 0,
        beside: Mapping[str, Any] | None = None,
        late: bool = False,
    ) -> None:
        self.loader = wrap_loader(
            loader,
            mode=config.data,
            seed=config.seed,
            rank=worker.rank,
            first_epoch=epoch,
            ahead=ahead,
            lazy=worker.joining,
            orders=worker.orders,
            copied=worker.reroutes,
            beside=beside,
            script=worker.variables,
            late=late,
        )
        self._pending: Mapping[str, Any] | None = None
        self._worker = worker

    def capture(self) -> Mapping[str, Any]:
        """Where it is, or where it will continue when it is next asked for an item, as plain data."""
        return self.loader.state() if self._pending is None else self._pending

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go there: at once, or, where an iteration was in progress, when it is asked for its first item."""
        if self._worker.reroutes and self._worker.added:
            state = of_a_peer(state)
        if state["live"]:
            self._pending = state
        else:  # nobody had begun to read it: what the script gave it in both processes stays
            with restarting(self._worker):
                self.loader.restore({**state, "owned": {**state["owned"], "scalars": state["moved"]}})

    @property
    def continues(self) -> bool:
        """Whether the next iteration is the one that a failed worker was in."""
        return self._pending is not None

    def resume(self, position: Iterator[Any]) -> list[Any]:
        """Put ``position`` where the failed worker's iteration was, if one was in progress. Returns the items that the
        failed worker had fetched ahead of their use.
        """
        if self._pending is None:
            return []
        state, self._pending = self._pending, None
        self.go_to(state, position)
        return position.last_items if isinstance(position, Position) else []

    def go_to(self, state: Mapping[str, Any], position: Iterator[Any]) -> None:
        """Put ``position`` where an iteration of the failed worker's was; the global generators stay as they are. Does
        not return where its indices cannot be drawn again: all workers start again.
        """
        random = read_random()  # of the step boundary; reading items again draws from the generators
        with restarting(self._worker):
            self.loader.restore(from_origin(state, self._worker.origin), position)
        write_random(random)


class _Once:
    """What a progress bar is given to read. What begins again at the end is none: its passes cannot be told apart."""

    def __init__(self, position: Iterator[Any]) -> None:
        self._left = [position]

    def __iter__(self) -> Iterator[Any]:
        if not self._left:
            raise Unsupported(
                "what job.steps() was given reads its loader again at the end: call job.steps() with the loader "
                "itself, once in each epoch (docs/loops.md)"
            )
        return self._left.pop()


class Pass:
    """One pass of a script over what it iterates.

    Args:
        tracked: the loader that is read: ``given`` itself, or the one inside a progress bar.

    Attributes:
        index: of the next item, as ``enumerate`` counts.
    """

    def __init__(self, given: Any, tracked: TrackedLoader, key: Hashable) -> None:
        self.tracked, self.key, self.index = tracked, key, 0
        self.position = iter(tracked.loader)
        self._given, self._bar = given, given is not tracked.loader.wrapped
        self._stream: Iterator[Any] | None = None

    def capture(self) -> dict[str, Any]:
        return {"key": self.key, "index": self.index, "state": self.tracked.loader.state(self.position)}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Continue where a pass of the failed worker's was."""
        self.index = place["index"]
        if place["state"]["live"]:
            self.tracked.go_to(place["state"], self.position)
        if self._bar and hasattr(self._given, "n"):
            self._given.n = self._given.initial = self.index

    def next(self) -> Any:
        """The next item; raises StopIteration at the end."""
        if self._stream is None:
            self._stream = self.position
            if self._bar:
                self._given.iterable = _Once(self.position)
                self._stream = iter(self._given)
        return next(self._stream)

    def close(self) -> None:
        if self._bar:
            self._given.iterable = self.tracked.loader.wrapped


class Loaders:
    """All loaders of one training loop."""

    def __init__(self, worker: LoaderOwner, config: SwiftConfig) -> None:
        self._worker, self._config = worker, config
        self._published: WeakValueDictionary[Hashable, TrackedLoader] = WeakValueDictionary()
        self._attached: dict[Hashable, TrackedLoader] = {}
        self._found: dict[Hashable, TrackedLoader] = {}  # by variable
        self._streams: dict[Hashable, Iterator[Any]] = {}  # iterators that were made before the loop, by variable
        self._beside: dict[str, Any] = {}
        self._recent: OrderedDict[int, TrackedLoader] = OrderedDict()
        self._passes: list[Pass] = []
        self._unclaimed: dict[Hashable, Mapping[str, Any]] = {}
        self._places: deque[Mapping[str, Any]] = deque()

    # -- which there are ----------------------------------------------------------------------------------------------

    def track(self, loader: Any, key: Hashable, ahead: int = 0) -> TrackedLoader:
        """A tracked loader around ``loader``; it is published for as long as the caller keeps it.

        Args:
            key: plain data that identifies the loader; equal in a worker and its replacement.
            ahead: items that are fetched before they are used.
        """
        return self._publish(key, TrackedLoader(loader, self._worker, self._config, ahead))

    def forget(self, key: Hashable) -> None:
        """Free a key for another loader."""
        self._published.pop(key, None)
        self._unclaimed.pop(key, None)

    def attach(self, loader: Any) -> None:
        """The script has named this loader."""
        key = f"attached {len(self._attached)}"
        self._attached[key] = self.track(loader, key)

    def look_around(self, frame: types.FrameType | None, phase: int) -> None:
        """Find what the script's variables hold now, at the loop of ``frame``; ``phase`` is its number."""
        known = {id(tracked.loader.wrapped): tracked for tracked in self._found.values()}
        attached = {id(tracked.loader.wrapped) for tracked in self._attached.values()}
        self._found, self._streams, self._beside = {}, {}, {}
        for name, value in variables_of(frame).items():
            key = f"{phase} {name}"
            if isinstance(value, Iterator):
                self._streams[key] = value
            else:
                self._beside[name] = value
            if id(value) in attached or (isinstance(value, Iterator) and id(value) not in known):
                continue
            try:
                tracked = known.get(id(value)) or TrackedLoader(value, self._worker, self._config)
            except Unsupported:
                continue  # told when the script iterates it
            self._found[key] = self._publish(key, tracked)

    def begin(self, given: Any, epoch: int) -> Pass:
        """The script begins a pass. Raises Unsupported if ``given`` reads from an iterator of other passes, too."""
        loader = given
        if not isinstance(given, (DataLoader, Iterator)) and "iterable" in getattr(given, "__dict__", {}):
            loader = given.iterable
        for key, tracked in (*self._attached.items(), *self._found.items()):
            if tracked.loader.wrapped is loader:
                return Pass(given, tracked, key)
        for key, stream in self._streams.items():
            if stream is loader:
                self._found[key] = self._publish(key, self._new(loader, epoch))
                return Pass(given, self._found[key], key)
        if isinstance(loader, Iterator):  # it ends with this pass
            return Pass(given, self._new(loader, epoch), None)
        found = self._recent.get(id(loader)) or self._new(loader, epoch)
        self._recent[id(loader)] = found
        self._recent.move_to_end(id(loader))
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        return Pass(given, found, None)

    def _new(self, loader: Any, epoch: int) -> TrackedLoader:
        if isinstance(loader, DataLoader):
            return TrackedLoader(loader, self._worker, self._config, epoch=epoch, late=True)
        if shared := held_by(loader, self._streams):
            variable = shared[0].split(".", 1)[-1]
            raise Unsupported(
                f"rank {self._worker.rank}: this {type(loader).__name__} reads from {variable!r}, an iterator that was "
                "made before the loop and is used by several passes. A replacement cannot find its place in "
                "it: pass the iterator itself to steps() and leave the pass with break, or make it inside the epoch"
            )
        return TrackedLoader(loader, self._worker, self._config, epoch=epoch, beside=self._beside, late=True)

    def _publish(self, key: Hashable, tracked: TrackedLoader) -> TrackedLoader:
        self._published[key] = tracked
        if key in self._unclaimed:
            random = read_random()  # of the script, which may have continued since the step boundary
            tracked.restore(self._unclaimed.pop(key))
            write_random(random)
        return tracked

    # -- passes -------------------------------------------------------------------------------------------------------

    def enter(self, begun: Pass) -> None:
        """A pass is in progress from here on; a replacement's continues where the failed worker's was."""
        self._passes.append(begun)
        place = next((each for each in self._places if each["key"] == begun.key), None)
        if place is not None:
            self._places.remove(place)
            begun.go_to(place)

    def leave(self, ended: Pass) -> None:
        """A pass has ended, or the script has left it."""
        ended.close()
        if ended in self._passes:
            self._passes.remove(ended)
        if not self._passes:
            self._places.clear()  # those inside it to which the script did not come back

    # -- state --------------------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Where all loaders and passes are, as plain data."""
        busy = {id(each.tracked) for each in self._passes}
        idle = {key: each.capture() for key, each in self._published.items() if id(each) not in busy}
        return {
            "idle": self._unclaimed | idle,
            "passes": [*(each.capture() for each in self._passes), *self._places],
        }

    def restore(self, states: Mapping[str, Any]) -> None:
        """Put loaders where those of the failed worker were; passes follow when they are begun."""
        self._unclaimed = {}
        self._places = deque(states["passes"])
        for place in self._places:  # if the script does not come back to a pass, that has still changed its loader
            if (tracked := self._published.get(place["key"])) is not None:
                tracked.loader.heed(place["state"])
        for key, state in states["idle"].items():
            if (tracked := self._published.get(key)) is not None:
                tracked.restore(state)
            else:
                self._unclaimed[key] = state

    def owned(self) -> dict[Hashable, Any]:
        """Generators and counters that variables of the script hold, as plain data."""
        named = (self._attached | self._found).items()
        return {key: each.loader.owned() for key, each in named if not isinstance(each.loader.wrapped, Iterator)}

    def set_owned(self, owned: Mapping[Hashable, Any]) -> None:
        """Inverse of :meth:`owned`."""
        named = self._attached | self._found
        for key, state in owned.items():
            if key in named:
                named[key].loader.set_owned(state)
