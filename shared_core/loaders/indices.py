"""Stands for a loader's sampler: watches what it draws, and draws without reading."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from shared_core.loaders.opaque import OpaqueWatch
from shared_core.loaders.owned import OwnedState
from shared_core.loaders.place import Draws, Way
from shared_core.loaders.randomness import DrawLog, RawRandom, restore_raw, seed_random, write_random
from shared_core.loaders.reader import Asked, ReaderStart
from shared_core.loaders.seeded import SeededBatch, SeededIndex, place_seed

_SAMPLER = -1
#: Indices drawn at once where none of them is read: too few for a run of the garbage collector.
_SKIPPED_AT_ONCE = 256
#: Samplers that draw global randomness at most with their first index: they need no watching later.
_KNOWN_SAMPLERS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


@dataclass(frozen=True)
class Follow:
    """What a replacement's sampler is to do, instead of drawing one index after the other.

    Attributes:
        way: which indices are given to be read.
        draws: what the sampler drew from.
        prepare: called with the number of each index before it is drawn, except for ``quiet`` ones.
        quiet: numbers of indices before which nothing is put back.
        states: of loader workers, by the number of the batch before which each is put back.
        ends: no index is given.
        starts: where loader workers begin each pass over a stream, from the one in which they are started.
    """

    way: Way = field(default_factory=lambda: Way((), 0))
    draws: Draws = field(default_factory=dict)
    prepare: Callable[[int], None] | None = None
    quiet: range = range(0)
    states: Mapping[int, Any] = field(default_factory=dict)
    ends: bool = False
    starts: Sequence[ReaderStart] = ()


class Drawing(Iterator[Any]):
    """One iterator over the indices of a pass; watches what is drawn.

    Args:
        known: it draws global randomness at most with its first index.
        workers: of the loader, if they can be told what to do; else 0.
        told: states that loader workers have not been given yet, by worker; shared by the passes of a loader.
        watch: gives what is told of each index before it is read in this process; called each time.
    """

    def __init__(
        self,
        source: Iterator[Any],
        known: bool,
        workers: int,
        follow: Follow,
        told: dict[int, Any],
        watch: Callable[[], OpaqueWatch | None],
    ) -> None:
        self._source, self._known, self._workers = source, known, workers
        self._follow, self._told, self._watch = follow, told, watch
        self._wanted = chain(follow.way.lead, count(follow.way.begin))
        self._log = DrawLog()
        self._number, self._drawn = 0, None
        self._sums: deque[tuple[int, int]] = deque([(0, 0)])

    @property
    def draws(self) -> Draws:
        """What its draws started from, where they consumed global randomness."""
        return self._log.notes

    def sum_at(self, number: int) -> int | None:
        """Checksum of the first ``number`` indices; later calls must not ask for smaller numbers."""
        while len(self._sums) > 1 and self._sums[0][0] < number:
            self._sums.popleft()
        at, found = self._sums[0]
        return found if at == number else None

    def arrive(self) -> None:
        """Draw all that a failed worker had read; from here on indices are drawn as in any pass."""
        if not self._follow.ends:
            with suppress(StopIteration):
                self._draw_up_to(self._follow.way.begin - 1)
        self._follow = replace(self._follow, prepare=None)

    def __next__(self) -> Any:
        if self._follow.ends:
            raise StopIteration
        wanted = next(self._wanted)
        if wanted is None:
            return Asked(passed_over=True)
        begin = self._follow.way.begin
        if wanted == begin:  # states of loader workers that are put back before batches that are wanted
            states = self._follow.states.items()
            self._told.update({number % self._workers: state for number, state in states if number >= begin})
        self._draw_up_to(wanted)
        if (watch := self._watch()) is not None:
            watch.look(self._drawn)
        state = self._told.pop(wanted % self._workers, None) if self._told else None
        if wanted < begin:
            state = self._follow.states.get(wanted) or state
        return Asked(self._drawn, state) if state else self._drawn

    def _draw_up_to(self, wanted: int) -> None:
        while self._number <= wanted:
            if self._known and self._number in self._follow.quiet and self._number < wanted:
                self._skip(min(wanted, self._follow.quiet.stop, self._number + _SKIPPED_AT_ONCE))
                continue
            number = self._number
            if self._follow.prepare is not None:
                self._follow.prepare(number)
            write_random(self._follow.draws.get(number, {}))
            if self._known and number:
                self._drawn = next(self._source)
            else:
                before = RawRandom()
                self._drawn = next(self._source)
                self._log.note(number, before, RawRandom())
            self._count([self._drawn])

    def _skip(self, wanted: int) -> None:
        drawn = list(islice(self._source, wanted - self._number))
        if not drawn:
            raise StopIteration
        self._drawn = drawn[-1]
        self._count(drawn)

    def _count(self, drawn: Sequence[Any]) -> None:
        self._number += len(drawn)
        self._sums.append((self._number, zlib.crc32("".join(map(repr, drawn)).encode(), self._sums[-1][1])))


#: What a script may change in a sampler; and what holds no sampler.
_HELD = (torch.Tensor, np.ndarray, list, tuple, dict, set, deque)
_NO_SAMPLERS = (*_HELD, Dataset)
#: Samplers that draw by nothing but numbers and generators.
_WITHOUT_VALUES = (BatchSampler, DistributedSampler, RandomSampler, SequentialSampler)


class Holds:
    """Tensors, arrays and containers that a sampler holds. A script that changes them during a pass, such as weights
    that follow the losses, would let a replacement draw otherwise what had been drawn before.

    Args:
        sampler: and those that it holds; data sets are passed over.
    """

    #: Elements that are looked at of a container; of an array so many times sixteen.
    _LOOKED_AT = 64

    def __init__(self, sampler: Any) -> None:
        self._holders: list[dict[str, Any]] = [{"sampler": sampler}] if isinstance(sampler, _HELD) else []
        self._seen: set[int] = set()
        self._visit(sampler)
        self._marks = self._look()

    def _visit(self, thing: Any) -> None:
        draws = isinstance(thing, Sampler) or (hasattr(type(thing), "__iter__") and not isinstance(thing, _NO_SAMPLERS))
        if not draws or id(thing) in self._seen or not hasattr(thing, "__dict__"):
            return
        self._seen.add(id(thing))
        if type(thing) not in _WITHOUT_VALUES:
            self._holders.append(vars(thing))
        for each in tuple(vars(thing).values()):
            self._visit(each)

    def note(self) -> None:
        """What is held now counts as not changed."""
        self._marks = self._look()

    def changed(self) -> bool:
        """Whether something has changed since the last note."""
        now = self._look()
        return len(now) != len(self._marks) or not all(map(_alike, now, self._marks))

    def _look(self) -> list[tuple[Any, ...]]:
        return [
            (name, *self._mark(value))
            for holder in self._holders
            for name, value in holder.items()
            if isinstance(value, _HELD)
        ]

    def _mark(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, torch.Tensor):
            return value, None if value.is_inference() else value._version
        if isinstance(value, np.ndarray):
            step = max(1, value.size // (16 * self._LOOKED_AT))
            return value, value.reshape(-1)[::step].tobytes() if value.dtype != object else None
        if isinstance(value, (list, tuple)):
            return value, len(value), *value[:: max(1, len(value) // self._LOOKED_AT)]
        return value, len(value), *islice(value.values() if isinstance(value, dict) else value, self._LOOKED_AT)


def _alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two marks, which keep what they refer to alive, are of the same objects or equal numbers."""
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) and type(a) in (int, float, str, bytes) and a == b)
        for a, b in zip(one, other, strict=True)
    )


class Indices:
    """Stands for a loader's batch sampler (or sampler): skips, seeds and watches its draws.

    Args:
        batched: whether it yields the indices of a batch, or one index.
        known: whether it draws global randomness at most with its first index.
        workers: of the loader, if they can be told what to do; else 0.
        place: seed, rank and epoch in seeded mode, read when an iteration starts; else None.
    """

    def __init__(self, inner: Any, batched: bool, known: bool, workers: int, place: list[int] | None) -> None:
        self.inner = inner
        self._batched, self._known, self._workers, self._place = batched, known, workers, place
        #: Used by iterators made while it is set (a loader with workers makes two).
        self.follow = Follow()
        #: Drawn in place of the sampler's indices, and the number of its first.
        self.listed: list[Any] | None = None
        self.first = 0
        #: Called with the indices of an iteration before the first is drawn, where they must be known in advance.
        self.announce: Callable[[list[Any]], None] | None = None
        #: Told of each index before it is read in this process.
        self.watch: OpaqueWatch | None = None
        #: The iterator made last; None in seeded mode.
        self.newest: Drawing | None = None
        self._told: dict[int, Any] = {}  # states that loader workers have not been given yet

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while unpickling
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def begin(self, follow: Follow, lasting: bool) -> None:
        """A pass begins; ``lasting``: with the loader workers of the pass before."""
        self.follow = follow
        if not lasting:
            self._told.clear()

    def __iter__(self) -> Iterator[Any]:
        source = self._source(self.listed)
        if self._place is not None:
            return self._seeded(source, (self._place[0], self._place[1], self._place[2]), self.follow, self.first)
        if self.listed is None and self.announce is None:
            source = iter(self.inner)  # a sampler may draw in here, which is before the loader draws
        self.newest = Drawing(source, self._known, self._workers, self.follow, self._told, lambda: self.watch)
        return self.newest

    def _source(self, listed: list[Any] | None) -> Iterator[Any]:
        """Indices of an iteration; all are drawn when the first is asked for, where they must be announced."""
        if listed is not None or self.announce is None:
            yield from self.inner if listed is None else listed
            return
        random, owner = RawRandom(), OwnedState({"sampler": self.inner})
        owned = owner.capture()
        drawn = list(self.inner)
        self.announce(drawn)
        if self._known:
            # Drawn again as they are asked for: a pass that the script leaves early has drawn less, and at the end a
            # RandomSampler draws once more.
            restore_raw(random)
            owner.restore(owned)
            yield from self.inner
        else:
            yield from drawn

    def _seeded(
        self, iterator: Iterator[Any], place: tuple[int, int, int], follow: Follow, first: int
    ) -> Iterator[Any]:
        seed, rank, epoch = place
        number = first
        skip = follow.way.begin + first
        # The sampler's draws are a stream of their own, swapped in where they can happen. It starts the same on every
        # rank, as after seed_everything: samplers that split one permutation rely on it.
        swapped, outside = True, RawRandom()
        seed_random(place_seed(seed, _SAMPLER, epoch))
        while True:
            try:
                while number < skip:
                    next(iterator)
                    number += 1
                drawn = next(iterator)
            except StopIteration:
                if swapped:
                    restore_raw(outside)
                return
            stream = RawRandom() if swapped else None
            if swapped:
                restore_raw(outside)
            where = (seed, rank, epoch, number)
            if self._batched:
                batch = SeededBatch(drawn)
                batch.place = where
                yield batch
            else:
                yield SeededIndex(drawn, where)
            number += 1
            swapped = not self._known
            if swapped and stream is not None:
                outside = RawRandom()
                restore_raw(stream)


def all_known(loader: DataLoader[Any]) -> bool:
    """Whether no sampler of the loader can draw global randomness after its first index."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return all(s is None or type(s) in _KNOWN_SAMPLERS or _is_distributed_wrapper(s) for s in samplers)


def may_list(loader: DataLoader[Any]) -> bool:
    """Whether it makes no difference when its indices are drawn, so that all may be drawn with the first."""
    inner = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)  # Accelerate's BatchSamplerShard
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
