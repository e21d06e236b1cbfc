"""What to do about a failure: budget, crash loops, back-off. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

from shared_core import errors
from shared_core.protocol.generation import CauseKind
from shared_core.resources import advice_on

#: A rank that dies so often in a row, in the same way and without progress, ends the job.
LOOP_LIMIT = 3
#: Pause before the n-th start in a row of a rank that makes no progress, in seconds.
BACK_OFF_S = (0.0, 0.5, 1.0, 2.0)
#: Exceptions that a replacement would raise too: mistakes in the program or its options, not accidents.
MISTAKES = frozenset(
    kind.__name__ for kind in (errors.ConfigError, errors.MissingExtra, errors.Unsupported, errors.UnsupportedOptimizer)
)
#: The end of the reason of a job that such an exception has ended; it says all that there is to say.
AS_ANY = "; a replacement would fail the same way, so the job stops"
_FRAME = re.compile(r'^ *File "(?P<file>.*)", line (?P<line>\d+), in .*$', re.MULTILINE)
_OURS = ("/shared_core/", "/lightning_swift/", "/accelerate_swift/")
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3", *_OURS, "<frozen ", "<string>")


@dataclass(frozen=True)
class RaisedError:
    """A worker's uncaught exception, from its error file.

    Attributes:
        summary: ``Type: message``.
        place: ``file:line`` of the innermost frame of the user's own code, else of the innermost frame.
    """

    summary: str
    place: str

    @property
    def kind(self) -> str:
        return self.summary.partition(":")[0]

    @classmethod
    def from_error_file(cls, data: Any) -> RaisedError | None:
        """From the JSON that torchelastic's ``record`` writes; None if it has another form."""
        message = data.get("message") if isinstance(data, dict) else None
        if not isinstance(message, dict):
            return None
        more = message.get("extraInfo")
        trace = str(more.get("py_callstack", "")) if isinstance(more, dict) else ""
        return cls(str(message.get("message", "")), _place(trace))


def _place(trace: str) -> str:
    frames = [(match["file"], match["line"]) for match in _FRAME.finditer(trace)]
    own = [frame for frame in frames if not any(part in frame[0] for part in _LIBRARY)]
    chosen = (own or frames or [("?", "0")])[-1]
    return f"{chosen[0]}:{chosen[1]}"


@dataclass(frozen=True)
class Death:
    """One failed worker.

    Attributes:
        exit_code: as Python's ``waitstatus_to_exitcode``: negative for a signal.
        cause: readable, for instance ``killed by SIGKILL``.
        boundaries: step boundaries its rank had passed.
        error_file: where ``error`` was read from; empty if there was none.
        detected: when the agent noticed, in seconds since the epoch.
    """

    rank: int
    pid: int
    exit_code: int
    cause: str
    boundaries: int
    error: RaisedError | None
    error_file: str
    detected: float
    kind: CauseKind = CauseKind.DIED


@dataclass(frozen=True)
class Verdict:
    """What to do about a death.

    Attributes:
        delay_s: seconds to wait before the replacement is started.
        reason: why the job ends.
        first: the death to show to the user when it ends.
    """

    action: Literal["replace", "end"]
    delay_s: float = 0.0
    reason: str = ""
    first: Death | None = None


@dataclass
class FailureBook:
    """Counts failures and judges each. ``budget``: replacements left; ``loop_limit``: see :data:`LOOP_LIMIT`."""

    budget: int
    loop_limit: int = LOOP_LIMIT
    _streaks: dict[int, list[Death]] = field(default_factory=lambda: defaultdict(list))
    _history: list[Death] = field(default_factory=list)

    def judge(self, death: Death, *, charged: bool = True) -> Verdict:
        """Record a death and return what follows; ``replace`` takes one replacement from the budget if ``charged``: a
        restart of all answers several deaths, and counts once.
        """
        self._history.append(death)
        streak = self._streaks[death.rank]
        if streak and death.boundaries > streak[-1].boundaries:
            streak.clear()  # it made progress: not a loop
        streak.append(death)
        if death.error is not None and death.error.kind in MISTAKES:
            said = f"{' '.join(death.error.summary.split())} (at {death.error.place})"
            return Verdict("end", reason=f"rank {death.rank} raised {said}{AS_ANY}", first=death)
        if death.error is not None and death.error.kind == "CollectiveTimeout":
            reason = f"rank {death.rank} waited in vain, and so would a replacement: {death.error.summary}"
            return Verdict("end", reason=reason, first=death)
        if death.error is not None and death.error.kind == "OutOfResources":
            return Verdict("end", reason=f"rank {death.rank}: {death.error.summary}", first=death)
        twins = [other for other in streak[:-1] if _same_exception(other, death)]
        if twins:
            reason = f"rank {death.rank} raised the same exception at the same place twice"
            assert death.error is not None
            if found := advice_on(death.error.summary):
                reason += f" ({death.error.summary}): {found}"
            return Verdict("end", reason=reason, first=twins[0])
        if len(streak) >= self.loop_limit and all(_alike(other, death) for other in streak[-self.loop_limit :]):
            reason = f"rank {death.rank} died {self.loop_limit} times in a row without progress ({death.cause})"
            return Verdict("end", reason=reason, first=streak[-self.loop_limit])
        if charged and self.budget <= 0:
            first = self._history[0]
            return Verdict(
                "end", reason="no replacements are left (--max-restarts)", first=first if death.error is None else death
            )
        self.budget -= charged
        return Verdict("replace", delay_s=BACK_OFF_S[min(len(streak), len(BACK_OFF_S)) - 1])

    def take(self) -> bool:
        """Take a replacement for a restart of all; False if there is none left."""
        if self.budget <= 0:
            return False
        self.budget -= 1
        return True

    def count_once(self, failed: int) -> None:
        """These ranks were each judged; a restart of all answers them and counts once."""
        self.budget += failed - 1

    def forget_ranks(self) -> None:
        """The ranks are renumbered: no count of consecutive deaths carries over."""
        self._streaks.clear()


def _same_exception(one: Death, other: Death) -> bool:
    if one.error is None or other.error is None:
        return False
    return (one.error.summary, one.error.place) == (other.error.summary, other.error.place)


def _alike(one: Death, other: Death) -> bool:
    if one.error is not None and other.error is not None:
        return (one.error.kind, one.error.place) == (other.error.kind, other.error.place)
    return one.error is None and other.error is None and one.exit_code == other.exit_code
