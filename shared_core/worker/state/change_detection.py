"""Sees what a script changes of parameters and optimizer state outside an optimizer's update.

A tensor counts the changes made to it, except those made through ``.data``. So values are looked at too: all of them
after the first updates, where scripts that do so begin, and later a small piece after each.
"""

from __future__ import annotations

import zlib
from itertools import chain, compress
from operator import attrgetter

import torch

from shared_core.encoding.raw_memory import memory_of
from shared_core.worker.state.checksums import checksum
from shared_core.worker.state.replicated import Replicated

#: So many times all values are looked at.
_WHOLE = 2
#: Elements of the piece that is looked at later.
_PIECE = 1024
_version = attrgetter("_version")


class ChangeWatch:
    """Whether parameters and optimizer state are as they were noted last."""

    def __init__(self, replicated: Replicated) -> None:
        self._replicated = replicated
        self._versions: list[int] | None = None
        self._sums: list[tuple[int, int, int]] = []
        self._noted = self._place = self._start = 0
        self._kinds: list[type] = []
        self._tensors: list[bool] = []

    def resume(self, updates: int) -> None:
        """The failed worker has watched so many updates: values that it has compared whole are not compared
        whole again.
        """
        self._noted = min(updates, _WHOLE)

    def note(self, *, values: bool = True) -> None:
        """What there is now was there at the start, or was made by an update. ``values`` False notes version
        counters only.
        """
        self._versions = self._count()
        if not values:
            return
        if self._noted < _WHOLE:
            self._sums = [(i, 0, checksum(p)) for i, p in enumerate(self._replicated.parameters)]
        else:
            self._sums = self._next_piece()
        self._noted += 1

    def note_part(self) -> None:
        """As :meth:`note`, in the middle of an update. Values are not looked at before it is complete."""
        self._versions, self._sums = self._count(), []

    def _next_piece(self) -> list[tuple[int, int, int]]:
        parameters = self._replicated.parameters
        if not parameters:
            return []
        self._start += _PIECE
        if self._start >= parameters[self._place].numel():
            self._place, self._start = (self._place + 1) % len(parameters), 0
        return [(self._place, self._start, self._piece(self._place, self._start))]

    def _piece(self, place: int, start: int) -> int:
        parameter = self._replicated.parameters[place]
        if not parameter.is_contiguous():
            return 0
        if not parameter.is_cpu:
            return checksum(parameter.detach().view(-1)[start : start + _PIECE])
        size = parameter.element_size()
        return zlib.crc32(memory_of(parameter)[start * size : min(start + _PIECE, parameter.numel()) * size])

    def _count(self) -> list[int]:
        states = chain.from_iterable(optimizer.state.values() for optimizer in self._replicated.optimizers)
        values = [*chain.from_iterable(state.values() for state in states)]
        kinds = [*map(type, values)]
        if kinds != self._kinds:
            self._kinds, self._tensors = kinds, [issubclass(kind, torch.Tensor) for kind in kinds]
        return [*map(_version, self._replicated.parameters), *map(_version, compress(values, self._tensors))]

    @property
    def counted(self) -> bool:
        """Whether a tensor has counted a change; also for other threads, while no update runs."""
        return self._versions is not None and self._versions != self._count()

    def changed(self, *, pieces: bool = True) -> str | None:
        """Name of a parameter that is not as it was noted, or "the state of an optimizer"; None if nothing is known to
        have changed. ``pieces``: look at a piece of the values, once no longer all of them are looked at.
        """
        if self._versions is None:
            return None
        replicated, counts = self._replicated, self._count()
        if counts != self._versions:
            pairs = zip(replicated.names, counts, self._versions, strict=False)
            return next((name for name, new, old in pairs if new != old), "the state of an optimizer")
        whole = self._noted <= _WHOLE
        for place, start, known in self._sums if whole or pieces else ():
            now = checksum(replicated.parameters[place]) if whole else self._piece(place, start)
            if now != known:
                return replicated.names[place]
        return None
