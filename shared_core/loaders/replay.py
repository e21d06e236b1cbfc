"""A replacement reaches the failed worker's place in a pass."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shared_core.errors import Unsupported
from shared_core.loaders.contents import summed
from shared_core.loaders.engine import Engine, LoaderKind, NeedsRestart
from shared_core.loaders.indices import Drawing, Follow
from shared_core.loaders.place import ReadingRecord, draws_otherwise, needed, way_to
from shared_core.loaders.randomness import write_random
from shared_core.loaders.reader import Note, ReaderStart
from shared_core.waiting import Wait

#: A record, the loader's iterator at its place, what draws its indices, and the notes of loader workers that came with
#: the batches fetched ahead.
Reached = tuple[ReadingRecord, Iterator[Any], Drawing | None, list[Note]]


def replay(engine: Engine, state: Mapping[str, Any], taken: int, items: deque[Any]) -> Reached | None:
    """Put the loader where its newest pass was; None if there was no pass. Leaves global generators undefined.

    Args:
        taken: items that this process has taken of a loader that cannot be started again.
        items: receives the last ones delivered.

    Raises:
        Unsupported: if the items are not the same when they are read again.
    """
    records = [ReadingRecord(**values) for values in state["iterations"]]
    if engine.kind is LoaderKind.SEEDED:
        records = records[-1:]
    engine.forget_passes()
    reached = None
    passes = needed(records, workers=engine.workers)
    starts = [start_of(record, read) for record, read in passes]
    for record, read in passes:
        already = min(taken, record.delivered)
        taken -= already
        engine.deal_out(record, state)
        one = _Replay(engine, record, state, already, items, starts, newest=record is records[-1])
        reached = one.run() if read else one.begin_only()
        engine.replace(record)
    engine.deal_out(None, state)
    return reached


def start_of(record: ReadingRecord, read: bool) -> ReaderStart:
    """Where loader workers of a stream begin a pass; ``read``: it is to be read, not only begun."""
    if record.rereads is None:
        return ReaderStart(ends=not read)
    return ReaderStart(record.loader_workers, record.turn, ends=not read)


_OTHER_CONTENTS = (
    "rank {}: this pass reads a {} in the replacement, and a {} in the failed worker. The script makes it from what "
    "training changes, such as the parameters or a counter, and a replacement has these later. Make each pass a "
    "separate epoch, or make the data independent of what training changes (docs/loops.md)"
)


class _Replay:
    def __init__(
        self,
        engine: Engine,
        record: ReadingRecord,
        state: Mapping[str, Any],
        already: int,
        items: deque[Any],
        starts: Sequence[ReaderStart],
        newest: bool,
    ) -> None:
        self._engine, self._record, self._items, self._starts = engine, record, items, starts
        self._ahead, self._already = state["ahead"], already
        self._read = self._sum = 0
        self._recent = state["recent"] if newest else []
        workers = engine.workers if record.rereads is not None else 0
        seeded, told = engine.kind is LoaderKind.SEEDED, bool(workers) and engine.stream
        self._way = way_to(record, ahead=self._ahead, workers=workers, seeded=seeded, taken=already, told=told)

    def run(self) -> Reached:
        if why := draws_otherwise(self._record, self._engine.place[1]):
            raise NeedsRestart(why)
        reached = self._run()
        record, drawing = self._record, reached[2]
        known = drawing.sum_at(record.delivered) if drawing is not None and record.rereads is not None else None
        if known is not None and record.indices_sum not in (None, known):
            # The sampler draws otherwise without the items in between: it reads the data set, or shares a generator.
            self._engine.give_up(record, "what the sampler draws from")
            self._engine.stop(reached[1])
            self._way = way_to(record, ahead=self._ahead, workers=0)
            self._items.clear()
            reached = self._run()
            again = reached[2].sum_at(record.delivered) if reached[2] is not None else None
            if again not in (None, record.indices_sum):
                self._engine.refuse(
                    f"rank {self._engine.place[1]}: the sampler of this pass over a {_named(self._engine.loader)} "
                    "draws other indices in the replacement than in the failed worker: it depends on something that "
                    "training changes. Let it draw by a copy that is made between epochs (docs/loops.md)"
                )
        return reached

    def begin_only(self) -> Reached:
        """Make the iterator, for what that draws and starts."""
        return self._start(Follow(ends=True, starts=self._starts))

    def _run(self) -> Reached:
        engine, record, way = self._engine, self._record, self._way
        self._read, self._sum = self._already, 0
        if engine.indices is not None:
            reached = self._start(self._follow())
        else:
            reached = self._start(Follow(starts=self._starts))
        inner = reached[1]
        done = 0
        wait = Wait(
            f"rank {engine.place[1]}",
            lambda: f"its place in the data: {done} of {len(way.lead)} batches of the failed worker are read again",
            math.inf,
            ends="it takes as long as reading them did before",
        )
        for number in way.lead:
            wait.look()
            self._fetch(inner, number)
            done += 1
        for number in range(way.begin, record.delivered):
            item, told = self._fetch(inner, number)
            self._items.append(item)
            if told is not None:
                reached[3].append(told)
        if reached[2] is not None:
            reached[2].arrive()
        self._compare()
        engine.put_suspended(inner, record.suspended)
        if record.exhausted:
            next(inner, None)
        return reached

    def _compare(self) -> None:
        """Raises Unsupported if other items were read than the failed worker had read, where that is known."""
        record = self._record
        if record.items_sum in (None, self._sum) or self._already or self._read != record.delivered:
            return
        raise Unsupported(
            f"rank {self._engine.place[1]}: the {record.delivered} items that the failed worker had read of this "
            f"pass over a {_named(self._engine.loader)} are others when they are read again: what it reads depends on "
            "something that training changes, such as a replay buffer or the model. Draw in the training step what "
            "depends on it, or give what is iterated state_dict() and load_state_dict() (docs/loops.md)"
        )

    def _start(self, follow: Follow) -> Reached:
        engine, record = self._engine, self._record
        if not self._already:
            engine.owned.restore(record.owned)
        if record.loaded is not None:
            engine.loader.load_state_dict(record.loaded)
        engine.go_to(record.stream)
        write_random(record.before)
        if record.contents not in (None, here := engine.contents):
            raise Unsupported(_OTHER_CONTENTS.format(engine.place[1], here, record.contents))
        engine.take_numbers(record.numbers)
        inner = engine.start(ReadingRecord(epoch=record.epoch, held=record.held, models=record.models), follow)
        return record, inner, engine.drawing, []

    def _follow(self) -> Follow:
        record = self._record
        states: dict[int, Any] = {}
        if record.rereads is not None:
            workers, begin = self._engine.workers, self._way.begin
            states = dict(record.rereads) if workers else {}
            for worker, each in record.loader_workers.items():
                states[begin + (worker - begin) % workers] = each
        prepare = self._prepare if self._engine.in_process and self._engine.kind is not LoaderKind.SEEDED else None
        noisy = max([0, *record.draws, *record.fetches, *(record.rereads or {})])
        quiet = range(noisy + 1, record.delivered - len(self._recent))
        return Follow(self._way, record.draws, prepare, quiet, states)

    def _prepare(self, number: int) -> None:
        """Put this process where it was before a batch was drawn and read."""
        engine, record = self._engine, self._record
        if number >= record.delivered:
            return  # the failed worker had not come to this one
        if number == 0 and record.owned_first:
            engine.restore_owned(record.owned_first, record.stream)
        write_random(record.fetches.get(number, {}))
        mark = record.rereads.get(number) if record.rereads else None
        if number >= record.delivered - len(self._recent):
            mark = self._recent[number - record.delivered]
        if mark:
            engine.restore_owned(mark["owned"], mark["where"])
            if engine.kind is LoaderKind.RESTORE:
                engine.go_to(mark["where"])
            write_random(mark["random"])

    def _fetch(self, inner: Iterator[Any], number: int | None) -> tuple[Any, Note | None]:
        engine = self._engine
        if number is not None and engine.indices is None:
            self._prepare(number)
        try:
            item, told = engine.fetch(inner)
        except StopIteration:
            raise Unsupported(
                f"rank {engine.place[1]}: this pass over the data has {self._read} items in the replacement, and the "
                f"failed worker had read {self._record.delivered} of it. What is iterated must give a replacement the "
                "same items: give it state_dict() and load_state_dict(), or let it depend on nothing that training "
                "changes (docs/loops.md)"
            ) from None
        self._read += 1
        if self._record.items_sum is not None:
            self._sum = summed(item, self._sum)
        if told is not None:
            engine.count_changes(told, self._record)
        else:
            engine.changed()
        return item, told


def _named(loader: Any) -> str:
    return type(getattr(loader, "dataset", loader)).__name__
