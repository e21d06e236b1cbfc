"""One pass over a loader: the iterator that the training code reads, and what it notes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shared_core.loaders.contents import MOST_WHOLE, published, summed
from shared_core.loaders.engine import Engine, LoaderKind
from shared_core.loaders.indices import Drawing
from shared_core.loaders.place import ReadingRecord
from shared_core.loaders.randomness import DrawLog, RawRandom
from shared_core.loaders.reader import MANY, Note

#: Before so many batches of a pass the state is kept in any case: most of what happens once happens then.
_MARKED = 4


@dataclass
class _Mark:
    random: RawRandom = field(default_factory=RawRandom)
    owned: dict[str, Any] = field(default_factory=dict)
    where: Any = None

    def pack(self) -> dict[str, Any]:
        return {"random": self.random.pack(), "owned": self.owned, "where": self.where}


class Position(Iterator[Any]):
    """The iterator that a ``ResumableLoader`` returns.

    Args:
        ahead: items that are fetched before their use.
        keep: how many items delivered last are kept.

    Attributes:
        last_items: after a restore, items that were fetched ahead of their use.
        inner: the iterator of the loader; None before it is made.
    """

    def __init__(self, engine: Engine, record: ReadingRecord, ahead: int, keep: int, lazy: bool) -> None:
        self._engine, self.record = engine, record
        self._keep, self._ahead = keep, ahead
        self.inner: Iterator[Any] | None = None
        self._log = DrawLog()
        self._latest: RawRandom | None = None
        self._drawing: Drawing | None = None
        self._recent: deque[_Mark] = deque(maxlen=max(ahead, 1))
        self._hand: deque[Any] = deque(maxlen=max(ahead, 1))
        self._told: deque[Note] = deque()  # what loader workers have told with the last batches
        self.last_items: list[Any] = []
        if not lazy:
            self._begin()

    @property
    def exhausted(self) -> bool:
        return self.record.exhausted

    @property
    def left(self) -> int | None:
        """Items not yet fetched, of the divided rest of a pass; None for a whole pass."""
        return self.record.length - self.record.delivered if self.record.dealt else None

    @property
    def delivered(self) -> int:
        """Items fetched so far."""
        return self.record.delivered

    def __next__(self) -> Any:
        engine, record = self._engine, self.record
        inner = self.inner if self.inner is not None else self._begin()
        self._look_at_sampler()
        mark = self._mark()
        if mark is not None and record.delivered == 0:
            record.owned_first = mark.owned
        try:
            item, told = engine.fetch(inner)
        except StopIteration:
            record.exhausted = True
            raise
        if mark is not None:
            self._note(mark)
        if what := engine.changed():
            self._note_change(what, mark.pack() if mark is not None else None)
        if told is not None:
            self._note_told(told)
        if record.delivered == 0 and record.rereads is None and engine.compared:
            record.items_sum = 0
        if record.items_sum is not None:
            record.items_sum = summed(item, record.items_sum)
        record.delivered += 1
        if self._ahead:
            self._hand.append(item)
        if self._drawing is not None:
            record.indices_sum = self._drawing.sum_at(record.delivered)
        if self._keep:
            self.last_items = (self.last_items + [item])[-self._keep :]
        return item

    def fetches_ahead(self, ahead: int) -> None:
        """Change how many items are fetched before their use."""
        self._ahead = ahead
        if self._recent.maxlen != max(ahead, 1):
            self._recent = deque(self._recent, maxlen=max(ahead, 1))
            self._hand = deque(self._hand, maxlen=max(ahead, 1))

    def plain_recent(self) -> list[dict[str, Any]]:
        """State of this process before each of the items that may not have been used, as plain data."""
        return [mark.pack() for mark in self._recent] if self._ahead else []

    def plain_hand(self) -> list[Any]:
        """Items that may not have been used, as :func:`published`. Reading them again may give others: training may
        change what they depend on, and reading what cannot be put back.
        """
        engine = self._engine
        if not self._ahead or engine.kind not in (LoaderKind.RESTORE, LoaderKind.SEEDED):
            return []  # others compare all that they read
        # What a loader worker reads later may be others, too, so those must be the same.
        most = -1.0 if not engine.in_process else MOST_WHOLE if self.record.rereads == {} else math.inf
        return [published(item, most) for item in self._hand]

    def up_to_date(self) -> ReadingRecord:
        """The record, with what is not noted at each fetch."""
        engine, record = self._engine, self.record
        self._look_at_sampler()
        if engine.kind is LoaderKind.STATE:
            # Before its first item it tells where the pass before it ended. And who draws from a global generator may
            # do so only once, at the start, which nobody can see.
            begun = record.delivered > self._ahead and not record.fetches
            record.stream = self._where() if begun else None
        record.suspended = engine.suspended(self.inner) if self.inner is not None and record.stream is None else []
        return record

    def _look_at_sampler(self) -> None:
        if self.record.delivered and not self.record.redrawn:
            self.record.redrawn = self._engine.sampler_changed()

    def correct_epoch(self, epoch: int) -> None:
        self.record.epoch = epoch

    def take_up(
        self,
        record: ReadingRecord,
        inner: Iterator[Any],
        drawing: Drawing | None,
        told: list[Note],
        items: list[Any],
    ) -> None:
        """Continue where the pass of a failed worker was, with the loader's iterator at that place. ``told`` came from
        loader workers with batches fetched ahead of their use; ``items`` were fetched last.
        """
        self._told, self._latest = deque(told), None  # what was seen before tells nothing of generators that were set
        self.inner, self.record, self._drawing, self.last_items, self._keep = inner, record, drawing, items, 0
        self._hand.extend(items if self._ahead else ())
        self._log.notes = record.fetches
        if drawing is not None:
            record.draws = drawing.draws

    def end(self) -> None:
        self.inner, self.record, self._drawing, self._keep = iter(()), ReadingRecord(exhausted=True), None, 0

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self) -> Iterator[Any]:
        self.inner = self._engine.start(self.record)
        self._drawing = self._engine.drawing
        if self._drawing is not None:
            self.record.draws = self._drawing.draws
        return self.inner

    def _mark(self) -> _Mark | None:
        """The state before a fetch, where it may be needed: what a fetch changes is known only after it."""
        engine = self._engine
        if not engine.in_process:
            return None
        if not (self._ahead or engine.stream or self.record.delivered < _MARKED):
            return None
        where = engine.where() if self._ahead or engine.kind is LoaderKind.RESTORE else None
        self._latest = RawRandom(self._latest)
        return _Mark(self._latest, engine.owned.capture(), where)

    def _note(self, mark: _Mark) -> None:
        engine, record = self._engine, self.record
        self._recent.append(mark)
        # A stream may keep what each of its items drew, such as a shuffle buffer; an unwatched sampler starts with
        # the first.
        if engine.stream or engine.indices is None and record.delivered == 0:
            self._latest = RawRandom(self._latest)
            self._log.note(record.delivered, mark.random, self._latest)
            record.fetches = self._log.notes

    def _note_told(self, told: Note) -> None:
        engine, record = self._engine, self.record
        if told.changed:
            before = [other.state for other in self._told if other.worker == told.worker]
            state = before[-1] if before else record.loader_workers.get(told.worker, {})
            self._note_change(told.changed, None if engine.stream else state)
        engine.count_changes(told, record)
        self._told.append(told)
        while len(self._told) > self._ahead:
            first = self._told.popleft()
            record.loader_workers[first.worker] = first.state
            record.turn = (first.worker + 1) % engine.workers

    def _note_change(self, what: str, before: dict[str, Any] | None) -> None:
        rereads = self.record.rereads
        if rereads is None:
            return
        if before is None or len(rereads) == MANY:
            self._engine.give_up(self.record, what)
        else:
            rereads[self.record.delivered] = before

    def _where(self) -> Any:
        first = self._recent[0].where if self._ahead and self._recent else None
        return first if first is not None else self._engine.where()
