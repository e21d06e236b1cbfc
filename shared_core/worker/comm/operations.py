"""Collectives from issue to completion.

Gloo starts them in the caller's thread and completes them on its own threads; there is no executor between, so
operations overlap as they do without this product. Where gloo does not run an operation, a result is served.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shared_core.errors import CollectiveTimeout, PlaceMismatch, ReplayDivergence
from shared_core.faults import inject
from shared_core.system import threads
from shared_core.worker.comm import compat
from shared_core.worker.comm.groups import Groups, GroupState
from shared_core.worker.comm.op import Op, describe
from shared_core.worker.comm.other_threads import OtherThreads
from shared_core.worker.comm.places import mismatch
from shared_core.worker.comm.results import CollectiveResults
from shared_core.worker.comm.startup import StartUp
from shared_core.worker.comm.state import SharedState
from shared_core.worker.messages.group_log import Logged, same_call

#: How long an operation may have failed before the failure that explains it is announced.
SUSPECT_S = 15.0


class Operations:
    """Runs the collectives of all groups, or serves them. ``served`` counts those that were served from logs."""

    def __init__(self, state: SharedState, groups: Groups, results: CollectiveResults, others: OtherThreads) -> None:
        self._state, self._groups, self._results, self._others = state, groups, results, others
        self._startup = StartUp(state)
        self._scripted: deque[list[torch.Tensor]] = deque()
        self._answers: Callable[[GroupState, Op, Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None
        self._observer: Callable[[GroupState, Op, Sequence[torch.Tensor]], None] | None = None
        self.served = 0

    @contextmanager
    def scripted(self, results: Iterable[list[torch.Tensor]]) -> Iterator[None]:
        """Each operation in here gets the next of these results and no number: those of DDP's agreement."""
        self._scripted.extend(results)
        try:
            yield
        finally:
            self._scripted.clear()

    @contextmanager
    def answered(self, by: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Iterator[None]:
        """Operations in here get ``by(inputs)`` and no number: DDP learns a graph."""
        self.answer_all(lambda group, op, inputs: by(list(inputs)))
        try:
            yield
        finally:
            self._answers = None

    def answer_all(self, by: Callable[[GroupState, Op, Sequence[torch.Tensor]], Sequence[torch.Tensor]]) -> None:
        """From now on operations get ``by(group, op, inputs)`` and no number."""
        self._answers = by

    def observe(self, by: Callable[[GroupState, Op, Sequence[torch.Tensor]], None] | None) -> None:
        """Call ``by(group, op, inputs)`` before each operation is issued, until another is given, or None."""
        self._observer = by

    def submit(self, group: GroupState, op: Op, inputs: Sequence[torch.Tensor]) -> None:
        """Issue, serve or queue an operation. Returns at once, except while the program's thread calls an operation of
        all ranks and some are absent.

        Raises:
            ReplayDivergence: if a replacement's operation is not the one the failed worker ran.
            PlaceMismatch: if it is served with what others have called from another place of the program.
            Unsupported: in a replacement's start-up, if the result was too large to be recorded.
            SwiftError: what ended the job, if it has ended.
            RuntimeError: if gloo refuses the arguments.
        """
        state = self._state
        inject.point("collective.before", inputs, operation=op.signature[0])
        if self._scripted:
            op.serve(self._scripted.popleft())
            return
        if self._answers is not None:
            op.serve(self._answers(group, op, inputs))
            return
        if self._observer is not None:
            self._observer(group, op, inputs)
        if state.absent and group.size == state.world_size and threading.current_thread() is threading.main_thread():
            state.listener.await_absent()
        logged = None
        with state.lock:
            state.raise_if_ended()
            answer = self._startup.answer(group.name, op, inputs)
            if answer is None:
                logged = self._issue(group, op)
        if answer is not None:
            op.serve(answer)
        elif logged is not None:
            self.serve(group, op, logged)

    def _issue(self, group: GroupState, op: Op) -> Logged | None:
        """Number the operation, and start it if its group is connected. Returns what it is to be served with instead,
        or None. Callers hold the lock. If gloo refuses the arguments, the number is given back.
        """
        state = self._state
        if state.absent and group.size > 1:
            state.fatal_actions.cannot_complete(f"{describe(op.signature)} of group {group.name!r}")
        self._number(group, op)
        logged = group.replay.get(op.seq)
        if op.checksum and (logged is None or same_call(logged[0], op.signature)):
            self._check(group, op)
        if logged is not None:
            return logged
        if group.size > 1:
            self._others.called(lambda: f"{describe(op.signature)} of group {group.name!r}", op.future.done)
        group.pending[op.seq] = op
        state.note_waiting(+1)
        if group.inner is not None and (not state.broken or group.size == 1):
            try:
                self.start(group, op)
            except Exception:
                del group.pending[op.seq]
                group.next -= 1
                state.note_waiting(-1)
                raise
        return None

    def _number(self, group: GroupState, op: Op) -> None:
        """Callers hold the lock."""
        state = self._state
        op.seq, op.boundary, op.place = group.next, state.boundary, state.place.packed()
        group.next += 1
        if group.places is not None:
            group.places.called(op.seq, op.place)

    def start(self, group: GroupState, op: Op) -> None:
        """Run an operation on the group's connections. Callers hold the lock; what gloo raises is passed on."""
        with torch.no_grad():  # again on a thread that does not know the caller's mode
            op.inner_work = op.start(group.pg)
        op.attempt = attempt = op.attempt + 1
        op.begun = time.monotonic()
        group.inflight += 1
        future = _future(op.inner_work)
        if future is None:
            waiter = _Waiter(op.inner_work)
            args = (lambda: self._finished(group, op, attempt, waiter),)
            threads.start(waiter.run, args, name="swift-wait")
        else:
            future.add_done_callback(lambda done: self._finished(group, op, attempt, done))

    def _finished(self, group: GroupState, op: Op, attempt: int, future: Any) -> None:
        """On gloo's thread or a waiter's, once an attempt. Results are logged before the future is done."""
        state = self._state
        error: Exception | None = None
        try:
            future.value()
        except Exception as caught:  # noqa: BLE001 (gloo raises plain RuntimeError)
            error = caught
        with state.lock:
            if op.attempt != attempt:
                return  # given up: a later attempt counts
            group.inflight -= 1
            op.inner_work = None
            apart = self._apart(group, op)
            if error is None and apart is None:
                del group.pending[op.seq]
                entry = self._results.keep(group, op)
            state.changed.notify_all()
        if apart is not None:
            op.future.set_exception(state.end(apart))
            return
        if error is not None:
            self.suspect(error)
            return
        self._results.archive(group, op.seq, entry, op.results)
        if not op.lazy:
            op.put()
        if op.record is not None:
            op.record()  # before the caller can change the result
        with state.lock:
            state.note_waiting(-1)
        try:
            # before the caller can continue: "after the second collective of step 3" is then always in step 3
            inject.point("collective.after", op.results, operation=op.signature[0])
        except inject.FaultInjected as fault:
            op.future.set_exception(fault)
        else:
            op.future.set_result(op.value)

    def _apart(self, group: GroupState, op: Op) -> PlaceMismatch | None:
        """The error, if another member has called this operation from another place of the program."""
        if group.places is None:
            return None
        state = self._state
        other = group.places.elsewhere(op.seq, op.place, recovered=state.generation > 0)
        if other is None:
            return None
        call = f"{describe(op.signature)} (#{op.seq} of {self._groups.called(group)})"
        return mismatch(state.rank, call, op.place, other)

    def end_if_apart(self) -> None:
        """End the job if an operation under way can never end, because its members are at different places."""
        state = self._state
        with state.lock:
            pending = [(group, op) for group in self._groups.all() for op in group.pending.values()]
            found = next(((op, apart) for group, op in pending if (apart := self._apart(group, op))), None)
        if found is not None:
            op, apart = found
            op.attempt += 1
            op.future.set_exception(state.end(apart))

    def serve(self, group: GroupState, op: Op, logged: Logged) -> None:
        """Complete a numbered operation with the logged result, which is copied to the caller's tensors. Raises
        ReplayDivergence and PlaceMismatch if another was called there, or from another place.
        """
        state = self._state
        with state.lock:
            apart = self._apart(group, op)
        if apart is not None:
            raise state.end(apart)
        called, results = logged
        if not same_call(called, op.signature):
            raise state.end(
                ReplayDivergence(
                    f"at {state.place.now}, the replacement of rank {state.rank} called {describe(op.signature)}, and "
                    f"the failed worker {describe(called)}: the script takes another branch when it is run again. "
                    "Likely causes: an unseeded random number, a branch on the time or on files that the run itself "
                    f"writes. (Operation {op.seq} of group {group.name!r}.)"
                )
            )
        op.serve(results)
        with state.lock:
            self.served += 1
            entry = self._results.keep(group, op)
            group.replay.pop(op.seq, None)  # not earlier: after another failure, nobody else may have it
            state.changed.notify_all()
        self._results.archive(group, op.seq, entry, op.results)
        inject.point("collective.after", operation=op.signature[0])

    def _check(self, group: GroupState, op: Op) -> None:
        """Compare the input's checksum with the failed worker's, and publish it. Callers hold the lock. Raises
        ReplayDivergence if they differ although the replacement computes with the parameters the failed worker had.
        """
        state = self._state
        expected = state.expected.pop((group.id, op.seq), None)
        differs = expected is not None and expected != op.checksum and state.listener.exact()
        if differs and state.damaged:
            if op.again is None:  # buckets are reduced again
                state.fatal_actions.fall_back(
                    f"corruption: rank {state.rank} had given other ranks what it computed from damaged parameters, in "
                    f"{describe(op.signature)} of group {group.name!r}"
                )
        elif differs:
            raise state.end(
                ReplayDivergence(
                    f"at {state.place.now}, the replacement of rank {state.rank} computed another "
                    f"{'gradient' if compat.in_backward() else 'value'} than the failed worker: training is not "
                    "deterministic here. Likely causes: an unseeded or unregistered random number, or state that is "
                    f"not registered (job.register). (Input to operation {op.seq} of group {group.name!r}, "
                    f"{describe(op.signature)}: checksum {op.checksum:08x}, and {expected or 0:08x} before.)"
                )
            )
        state.publisher.input_checksums.add(group.id, op.seq, op.checksum)

    # -- what has failed: because a rank did, which is announced soon, or by the program's own mistake ---

    def suspect(self, error: Exception) -> None:
        """An operation failed. Returns at once; a thread waits ``SUSPECT_S`` for the explanation."""
        state = self._state
        with state.lock:
            if state.broken or state.ended is not None:
                return
            seen = state.latest
        threads.start(self._await_explanation, (error, seen), name="swift-suspect")

    def _await_explanation(self, error: Exception, seen: int) -> None:
        state = self._state

        def explained() -> bool:
            return state.broken or state.latest > seen or state.ended is not None

        with state.lock:
            if state.changed.wait_for(explained, timeout=SUSPECT_S):
                return
            stuck = []
            for group in self._groups.all():
                failed = [op for op in group.pending.values() if op.inner_work is None]
                for op in failed:
                    del group.pending[op.seq]
                    stuck.append((op, self.overdue(error, group, f"{describe(op.signature)} (#{op.seq}")))
                if isinstance(error, RuntimeError):
                    group.channels.fail(self.overdue(error, group, "a message ("))
            state.changed.notify_all()
        for op, why in stuck:
            op.future.set_exception(why)

    def overdue(self, error: Exception, group: GroupState, call: str) -> Exception:
        """The exception for an operation that failed although no worker did: ``error``, or a CollectiveTimeout if gloo
        timed out. ``call`` ends with an open bracket.
        """
        if not re.search("(?i)timed out", str(error)):
            return error
        limit_s, whereabouts = group.timeout.total_seconds(), self._state.listener.whereabouts()
        return CollectiveTimeout(
            f"rank {self._state.rank} waited {limit_s:g} s (time-out of the process group) in {call} of "
            f"{self._groups.called(group)}). {whereabouts}Another rank is too slow, hangs, or is in another operation: "
            f"raise timeout= of init_process_group or new_group if it is slow. ({error})"
        )

    # -- what is under way -------------------------------------------------------------------------

    def under_way(self) -> str:
        """An unfinished operation among several ranks, in words for an error; empty if there is none."""
        with self._state.lock:
            for group in self._groups.all():
                if group.size > 1 and group.pending:
                    return f"{describe(next(iter(group.pending.values())).signature)} of group {group.name!r}"
                if group.channels.awaited():
                    return f"a receive in group {group.name!r}"
        return ""

    def withdraw(self) -> tuple[GroupState, Op] | None:
        """Take back the only operation under way, as if it had not been called; see :meth:`call_again`. None if there
        is another one, or if it is not a collective of all ranks for which the program's thread waits. May wait 1 s
        for that.
        """
        state = self._state
        with state.lock:
            groups = self._groups.all()
            pending = [(group, op) for group in groups if group.size > 1 for op in group.pending.values()]
            if len(pending) != 1 or any(group.channels.awaited() for group in groups):
                return None
            [(group, op)] = pending
            # A moment passes from the call to the waiting.
            state.changed.wait_for(lambda: op.awaited, timeout=1.0)
            if group.size != state.world_size or not op.awaited or op.seq != group.next - 1:
                return None
            del group.pending[op.seq]
            group.next -= 1
            state.note_waiting(-1)
            return group, op

    def call_again(self, group: GroupState, op: Op) -> None:
        """Issue an operation that was withdrawn, under the group's next number."""
        state = self._state
        with state.lock:
            self._number(group, op)
            group.pending[op.seq] = op
            state.note_waiting(+1)
            if group.inner is not None and not state.broken:
                self.start(group, op)


def _future(inner_work: Any) -> Any:
    """What tells the end of an inner work; None where only its ``wait()`` does.

    Gloo completes the future of a work first and writes the work's end into the profiler's records afterwards. The
    program could end the profiler in between, and gloo would write to memory that is gone.
    """
    if compat.profiling():
        return None
    try:
        return inner_work.get_future()
    except RuntimeError:  # reduce-scatter has none
        return None


class _Waiter:
    """Stands in for the future of an inner work that has none: waits on a thread of its own."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._error: Exception | None = None

    def run(self, done: Callable[[], None]) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        done()

    def value(self) -> None:
        """Raises what the work raised."""
        if self._error is not None:
            raise self._error
