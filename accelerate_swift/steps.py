"""Batches of prepared loaders by number, also in a replacement that begins in the middle of a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any


class Steps:
    """Counts the batches of each pass in progress, which is known by its place, the same in a replacement."""

    def __init__(self) -> None:
        self._now: dict[int, int] = {}
        #: Numbers in the failed worker's passes that this replacement has not reached yet.
        self._theirs: dict[int, int] = {}

    def over(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """``(index, batch)`` for each batch, with the index that ``enumerate(loader)`` gives without a failure."""
        place = next(number for number in count() if number not in self._now)
        index = self._now[place] = 0
        try:
            begun = False
            for batch in loader:  # the step boundary, where a replacement gets what is published, lies in here
                if not begun:
                    begun, index = True, self._theirs.pop(place, 0)
                    self._now[place] = index
                yield index, batch
                index = self._now[place] = index + 1
        finally:
            del self._now[place]

    def capture(self) -> dict[int, int]:
        return dict(self._now)

    def restore(self, numbers: Mapping[int, int]) -> None:
        self._theirs = dict(numbers)
