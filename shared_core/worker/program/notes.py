"""Plain data and numbers that are kept for replacements of this rank, beside what step boundaries publish."""

from __future__ import annotations

from typing import Any

from shared_core.worker.comm.listener import RecordKey
from shared_core.worker.recovery.start import WorkerStart
from shared_core.worker.state.local_state import BoundaryPosition
from shared_core.worker.state.publications import SharedMemoryPublisher, Tally


class Notes:
    def __init__(self, publisher: SharedMemoryPublisher, position: BoundaryPosition, start: WorkerStart) -> None:
        self._publisher, self._position, self._start = publisher, position, start

    def keep(self, kind: str, name: str, value: Any) -> None:
        """Keep plain data under a kind and a name; see :meth:`kept`."""
        self._start.start_point.settle()
        self._publisher.records.add(RecordKey(self._position.entry, kind, name, self._position.boundaries), value)

    def kept(self, kind: str) -> dict[str, Any]:
        """What failed workers have kept under ``kind``, by name; the newest of each."""
        return self._start.start_point.remembered(kind)

    def tally(self, name: str) -> Tally:
        """A number that a replacement finds as the failed worker left it: it counts what must not be done twice."""
        return self._publisher.tally(name)
