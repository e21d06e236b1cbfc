"""Operations that failed: because a rank failed, which is announced soon, or by the program's own mistake."""

from __future__ import annotations

import re

from shared_core.errors import CollectiveTimeout
from shared_core.system import threads
from shared_core.worker.comm.groups import Groups, GroupState
from shared_core.worker.comm.op import describe
from shared_core.worker.comm.state import SharedState

#: How long an operation may have failed before the failure that explains it is announced.
SUSPECT_S = 15.0


class Suspicion:
    """Waits for the failure of a worker that explains the error of an operation; reports the error if none comes."""

    def __init__(self, state: SharedState, groups: Groups) -> None:
        self._state, self._groups = state, groups

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
