"""Entry calls of the program (fit, validate, test, predict): numbered, and skipped by replacements where finished."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared_core.faults import inject
from shared_core.worker.comm import Runtime, groups_made, skip_groups
from shared_core.worker.comm.listener import RecordKey
from shared_core.worker.program.joining import Joining
from shared_core.worker.program.publishing import Publishing
from shared_core.worker.program.step_boundaries import StepBoundaries
from shared_core.worker.recovery.reporting import RecoveryReporter
from shared_core.worker.recovery.start import WorkerStart
from shared_core.worker.state.local_state import Parts, Position
from shared_core.worker.state.publications import SharedMemoryPublisher

#: Numbers in a part of the program that lies in an epoch.
_OF_AN_EPOCH = 3
#: What is published of the end of a call beside the registered parts: how many groups there are.
_GROUPS = "swift.groups"


def _is_earlier(key: RecordKey, phase: int, epoch: int) -> bool:
    """Whether this was kept in an epoch before that one."""
    return len(key.part) == _OF_AN_EPOCH and key.part[:2] < (phase, epoch)


@dataclass(frozen=True)
class EntryDecision:
    """What to do with an entry call (fit, validate, test, predict).

    Attributes:
        skip: the failed worker had finished it: return ``result`` at once.
        result: what it returned.
    """

    skip: bool
    result: Any = None


class Entries:
    """The entry calls of one worker's program.

    Args:
        start: knows which the failed worker had finished.
        publisher: takes their results.
        reporter: told to those that listen.
        publishing: publishes the ends of calls.
        joining: takes the failed worker's place.
    """

    def __init__(
        self,
        start: WorkerStart,
        position: Position,
        runtime: Runtime,
        publisher: SharedMemoryPublisher,
        parts: Parts,
        reporter: RecoveryReporter,
        boundaries: StepBoundaries,
        publishing: Publishing,
        joining: Joining,
    ) -> None:
        self._start, self._position, self._runtime, self._publisher = start, position, runtime, publisher
        self._parts, self._reporter, self._boundaries = parts, reporter, boundaries
        self._publishing, self._joining = publishing, joining
        self._groups = 0

    def begin(self) -> EntryDecision:
        """Call at the start of each entry call.

        Returns:
            Whether the failed worker had finished it, and its result. Then the registered parts are restored to what
            they were at its end, except those of what is attached, which may be from another call.
        """
        inject.point("entry")
        start_point = self._start.start_point
        start_point.prepare()
        self._position.entry += 1
        self._runtime.enter_call(self._position.entry)
        finished = start_point.finished(self._position.entry)
        if finished is None:
            return EntryDecision(False)
        result, parts = finished
        self._groups = parts.get(_GROUPS, 0)
        self._parts.restore(parts, attached=False)
        return EntryDecision(True, result)

    def skipped(self) -> None:
        """Call after a skipped entry call, when all that it makes has been made: a replacement joins here whose
        failed worker was between this call and the next.
        """
        skip_groups(self._groups)  # hooks of the call may have made some that are not made here
        self._joining.at("end")
        self._leave()

    def done(self, result: Any) -> None:
        """Call at the end of each entry call. What is registered must hold everything that the script finds after it,
        what is trained too: peers continue, and could not give it later.

        Args:
            result: plain data; what a replacement that finds the entry finished returns for it.
        """
        if self._joining.pending:
            return
        self._reporter.deliver()
        self._position.boundaries += 1
        parts = self._parts.capture() | {_GROUPS: groups_made()}
        self._publisher.publish_end(self._position.entry, result, parts)
        self._publishing.at_boundary("end")
        self._leave()

    def evaluation_boundary(self) -> bool:
        """As :meth:`Job.step_boundary`, at the start of a stand-alone evaluation."""
        return self._boundaries.evaluation()

    def between(self, phase: int = 0, epoch: int | None = None, pass_: int = 0) -> None:
        """What the script does from here to the next step boundary a replacement does again, whose place is further on.
        Results of collectives are kept for it.

        Args:
            phase: of the script, by loops over epochs; 0 where calls count: then only small results are kept.
            epoch: the one that this is in, if it is in one; what was kept in those before the last is let go of.
            pass_: how many passes of it there were. After one, all is let go of if no other follows.
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
        """Another pass of the same epoch, or phase, begins."""
        self._runtime.place.begin_pass()
        self._runtime.keep_held()

    def _leave(self) -> None:
        """What the script does between two entry calls is start-up, too, with operations that are counted apart."""
        self._runtime.enter_call(-2 - self._position.entry)
