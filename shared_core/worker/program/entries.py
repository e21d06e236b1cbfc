"""Entry calls of the program (fit, validate, test, predict): numbered, and skipped by replacements where finished; and
what is kept for replacements beside step boundaries: plain data, numbers, and how many checkpoints the script has
written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from shared_core.faults import inject
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.comm import Runtime, groups_made, skip_groups
from shared_core.worker.program.boundaries import Joining, Publishing
from shared_core.worker.recovery.reporting import RecoveryReporter
from shared_core.worker.recovery.start_point import WorkerStart
from shared_core.worker.state.local_state import BoundaryPosition, StateParts
from shared_core.worker.state.publications import RecordKey, SharedMemoryPublisher, Tally
from shared_core.worker.state.updates import Updates

#: Numbers in a part of the program that lies in an epoch.
_OF_AN_EPOCH = 3
#: What is published of the end of a call beside the registered parts: how many groups there are.
_GROUPS = "swift.groups"


def _is_earlier(key: RecordKey, phase: int, epoch: int) -> bool:
    return len(key.part) == _OF_AN_EPOCH and key.part[:2] < (phase, epoch)


@dataclass(frozen=True)
class EntryDecision:
    """What to do with an entry call (fit, validate, test, predict); ``skip``: return ``result`` at once."""

    skip: bool
    result: Any = None


class Entries:
    def __init__(
        self,
        start: WorkerStart,
        position: BoundaryPosition,
        runtime: Runtime,
        publisher: SharedMemoryPublisher,
        parts: StateParts,
        reporter: RecoveryReporter,
        publishing: Publishing,
        joining: Joining,
        fall_back: Callable[[str], NoReturn],
    ) -> None:
        self._start, self._position, self._runtime, self._publisher = start, position, runtime, publisher
        self._parts, self._reporter, self._publishing, self._joining = parts, reporter, publishing, joining
        self._fall_back = fall_back
        self._groups = 0

    def begin(self) -> EntryDecision:
        """Call at the start of each entry call. If the failed worker had finished it, returns its result to skip
        it with.

        Then the registered parts are restored to what they were at its end, except those of what is attached, which may
        be from another call.
        """
        inject.point("entry")
        self._start.prepare()
        self._position.entry += 1
        self._runtime.enter_call(self._position.entry)
        try:
            finished = self._start.finished(self._position.entry)
        except FileNotFoundError:
            self._fall_back(
                f"rank {self._runtime.rank}: a call before the one in which the worker failed had ended with an "
                "exception, so that what it left behind was not kept: let fit() end by itself (trainer.should_stop)"
            )
        if finished is None:
            return EntryDecision(False)
        result, parts = finished
        self._groups = parts.get(_GROUPS, 0)
        self._parts.restore(parts, attached=False)
        return EntryDecision(True, result)

    def skipped(self) -> None:
        """Call after a skipped entry call.

        A replacement joins here if its failed worker was between two entry calls.
        """
        skip_groups(self._groups)  # hooks of the call may have made some that are not made here
        self._joining.at("end")
        self._leave()

    def done(self, result: Any) -> None:
        """Call at the end of each entry call; ``result`` is plain data, which a replacement returns for it.

        The registered parts, the trained modules too, must hold everything that the script reads after it: peers
        continue, and could not give it later.
        """
        if self._joining.pending:
            return
        self._reporter.deliver()
        self._position.boundaries += 1
        parts = self._parts.capture() | {_GROUPS: groups_made()}
        self._publisher.publish_end(self._position.entry, result, parts)
        self._publishing.at_boundary("end")
        self._leave()

    def between(self, phase: int = 0, epoch: int | None = None, pass_: int = 0) -> None:
        """What the script does from here to the next step boundary, a replacement does again if its place is further
        on. Results of collectives are kept for it.

        Args:
            phase: counts the loops over epochs; 0 between entry calls, where only small results are kept.
            epoch: the one that this is in, if any; records of those before the last are dropped.
            pass_: how many passes of it have ended. After one, its results are dropped unless another follows.
        """
        if pass_:
            self._runtime.place.end_pass()
        else:
            self._runtime.place.begin(phase, epoch)
        part = (phase,) if epoch is None else (phase, epoch, pass_)
        self._runtime.start_up_again(part if phase else (), hold=pass_ > 0)
        if epoch is not None and not self._joining.pending:
            self._publisher.records.forget(lambda key: _is_earlier(key, phase, epoch - 1))

    def continues(self) -> None:
        self._runtime.place.begin_pass()
        self._runtime.keep_held()

    def _leave(self) -> None:
        """The script between two entry calls counts as start-up: it has a negative call number of its own."""
        self._runtime.enter_call(-2 - self._position.entry)


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
