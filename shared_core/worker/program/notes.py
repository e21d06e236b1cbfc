"""What is kept for replacements of this rank, beside what step boundaries publish: plain data, numbers, and how many
checkpoints the script has written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.recovery.start_point import WorkerStart
from shared_core.worker.state.local_state import BoundaryPosition, StateParts
from shared_core.worker.state.publications import RecordKey, SharedMemoryPublisher, Tally
from shared_core.worker.state.updates import Updates


class Notes:
    def __init__(self, publisher: SharedMemoryPublisher, position: BoundaryPosition, start: WorkerStart) -> None:
        self._publisher, self._position, self._start = publisher, position, start

    def keep(self, kind: str, name: str, value: Any) -> None:
        """Keep plain data under a kind and a name; see :meth:`kept`."""
        self._start.settle()
        self._publisher.records.add(RecordKey(self._position.entry, kind, name, self._position.boundaries), value)

    def kept(self, kind: str) -> dict[str, Any]:
        """What failed workers have kept under ``kind``, by name; the newest of each."""
        return self._start.remembered(kind)

    def tally(self, name: str) -> Tally:
        """A number that a replacement finds as the failed worker left it: it counts what must not be done twice."""
        return self._publisher.tally(name)


_Result = TypeVar("_Result")


class Saves:
    """A replacement has the newest state of the optimizers. Until it comes to the update that is in it already, as in
    the middle of gradient accumulation, it cannot write what the failed worker wrote there. It need not: others could
    make that update only after the failed worker had written its file.
    """

    def __init__(
        self, env: WorkerEnv, updates: Updates, notes: Notes, parts: StateParts, fall_back: Callable[[str], NoReturn]
    ) -> None:
        self._rank, self._name, self._fall_back = env.rank, f"saves.{env.restart}", fall_back
        self._updates, self._notes = updates, notes
        self._made = 0
        self._finished: Tally | None = None
        parts.register("swift.saves", lambda: self._made, self._restore)

    def _restore(self, made: int) -> None:
        self._made = made

    def save(self, write: Callable[[bool], _Result]) -> _Result:
        """Call ``write`` with whether the failed worker has written the optimizers' part, and this one cannot."""
        if self._finished is None:
            self._finished = self._notes.tally(self._name)
        ahead = self._updates.state_version > self._updates.version
        if ahead and self._made >= self._finished.value:
            self._fall_back(
                f"rank {self._rank}: the failed worker was writing a checkpoint between backward() and "
                "optimizer.step(), and the others have made that update since: write it after optimizer.step()"
            )
        result = write(ahead)
        self._made += 1
        self._finished.value = max(self._finished.value, self._made)
        return result
