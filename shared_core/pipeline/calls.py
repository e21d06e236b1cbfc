"""Calls of a pipeline engine by a script that knows nothing of recoveries.

A replacement runs the script from its start. The calls that the failed worker had finished return at once what they
returned then, and take from the data what they took. Random numbers that the script or its data draw between batches
are drawn again from the recorded states of the generators; small results of collectives are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shared_core.job import Job
from shared_core.loaders import write_random
from shared_core.loaders.randomness import DrawLog, RawRandom, changed

#: Name of the registered state that holds the number of calls.
STATE = "swift.pipeline"
_RESULTS, _DRAWS, _ENDS = "pipeline results", "pipeline draws", "pipeline ends"


class Calls:
    """The calls of one engine. ``count`` includes skipped ones; ``draws`` are items taken from the data."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.count = self.draws = 0
        self._log = DrawLog()
        self._end: RawRandom | None = None
        self._target: int | None = None
        self._recorded: dict[str, dict[str, Any]] = {}
        self._begins = False

    # -- in a replacement -----------------------------------------------------------------------------

    def finished(self) -> bool:
        """Whether the failed worker, or others without it, have finished the next call, which is then skipped."""
        if not self._job.joining:
            return self.behind
        if self._target is None:
            published = self._job.peek(STATE)
            self._target = published["calls"] if published else 0
            self._recorded = {kind: self._job.notes.kept(kind) for kind in (_RESULTS, _DRAWS, _ENDS)}
        return self.count < self._target

    def admit(self, count: int, draws: int) -> bool:
        """This replacement copies a replica that is ahead: whether others have finished the present call.

        ``count`` calls and ``draws`` items are those of this worker itself.
        """
        self._job.position.note_rejoined(False)
        self._target, self.count, self.draws = self.count, count, draws
        self._recorded = {kind: self._job.notes.kept(kind) for kind in (_RESULTS, _DRAWS, _ENDS)}
        self._begins = count < self._target
        return self._begins

    @property
    def behind(self) -> bool:
        return self._target is not None and self.count < self._target

    def comes_in(self) -> bool:
        """Whether this is the first call after those that others had finished; true once. Its boundary is passed."""
        if not self._begins or self.count != self._target:
            return False
        self._begins = False
        return True

    def skip(self, data: Iterator[Any], draws: int) -> Any:
        """Take ``draws`` items from ``data`` and return what the failed worker returned."""
        for _ in range(draws):
            write_random(self._recorded[_DRAWS].get(str(self.draws), {}))
            next(data)
            self.draws += 1
        write_random(self._recorded[_ENDS].get(str(self.count), {}))
        result = self._recorded[_RESULTS][str(self.count)]
        self.count += 1
        self._job.entries.between()
        return result

    def restore(self, count: int, draws: int) -> None:
        self.count, self.draws = count, draws

    # -- live --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a call's step boundary: keep the generators' states if the script has drawn since the last call."""
        if self._end is not None and self.count:
            drawn = changed(self._end, RawRandom())
            if drawn:
                self._job.notes.keep(_ENDS, str(self.count - 1), self._end.pack(drawn))
        self._end = None

    def draw(self, take: Callable[[], Any]) -> Any:
        """Take the next item with ``take``, and keep the generators' states that it starts from."""
        before = RawRandom()
        item = take()
        self._log.note(self.draws, before, RawRandom())
        for note in self._log.notes.values():
            self._job.notes.keep(_DRAWS, str(self.draws), note)
        self._log.notes.clear()
        self.draws += 1
        return item

    def done(self, result: Any) -> None:
        self._job.notes.keep(_RESULTS, str(self.count), result)
        self.count += 1
        self._end = RawRandom()
        self._job.entries.between()
