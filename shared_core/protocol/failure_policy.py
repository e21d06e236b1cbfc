"""What to do about a failure: budget, crash loops, back-off. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shared_core import errors
from shared_core.protocol.generation import CauseKind, Entry, EntryKind
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
_ALL_FAILED = "all workers failed"
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
    trace: str = field(default="", compare=False)

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
        return cls(str(message.get("message", "")), _place(trace), trace)


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
class ResponsePlan:
    """What failures that were noticed together lead to.

    Attributes:
        response: the job ends; all workers start again; the others continue with fewer workers; or failed workers are
            replaced, and the others wait for that (``replace``) or continue meanwhile (``reroute``).
        delays_s: seconds to wait before the replacement of each is started.
        stay: ranks that continue with fewer workers.
        reason: why the job ends, or all workers start again.
        planned: how many left as planned: they cost no replacement.
        first: the death to show to the user when the job ends.
    """

    response: Literal["end", "restart", "shrink", "replace", "reroute"]
    delays_s: tuple[float, ...] = ()
    stay: tuple[int, ...] = ()
    reason: str = ""
    first: Death | None = None
    planned: int = 0

    @property
    def waits_for_generation(self) -> bool:
        """Whether the others need a generation that answers the failures."""
        return self.response in ("shrink", "replace")

    def as_written(self, entry: Entry, rejoin_after_s: float) -> ResponsePlan:
        """The same as the ledger's entry has it: of other failures, and what the others use, only that knows."""
        if entry.kind is EntryKind.DRAIN and entry.stay:
            return replace(self, response="shrink")
        if entry.kind is EntryKind.DRAIN or len(entry.absent or ()) == len(entry.incarnations):
            # Nobody is left who could give its state, or admit a replacement.
            return replace(self, response="restart", reason=_ALL_FAILED)
        if entry.absent is None:
            return replace(self, response="replace")
        return replace(self, response="reroute", delays_s=tuple(max(each, rejoin_after_s) for each in self.delays_s))


@dataclass
class FailureBook:
    """Counts failures and says what follows. ``budget``: replacements left; ``loop_limit``: see :data:`LOOP_LIMIT`."""

    budget: int
    loop_limit: int = LOOP_LIMIT
    _streaks: dict[int, list[Death]] = field(default_factory=lambda: defaultdict(list))
    _history: list[Death] = field(default_factory=list)

    def as_before(self, death: Death) -> Death:
        """The same, or divergent as the worker before it, whose publications are still there: this one had not passed
        its step boundary.
        """
        before = self._streaks[death.rank][-1:]
        here = [one for one in before if one.kind is CauseKind.DIVERGENT and death.boundaries <= one.boundaries]
        return replace(death, kind=CauseKind.DIVERGENT) if here else death

    def respond(
        self, deaths: Sequence[Death], *, restarts: bool = False, everyone: bool = False, stay: Sequence[int] = ()
    ) -> ResponsePlan:
        """Record deaths, and decide what they lead to.

        Args:
            restarts: all workers start again after any failure.
            everyone: no other worker is left.
            stay: ranks that are to continue with fewer workers; empty where failed ones are replaced.
        """
        reason = "on_failure is restart" if restarts else _ALL_FAILED if everyone else ""
        ending: tuple[str, Death] | None = None
        delays, number = [], -1
        for death in deaths:
            if death.kind is CauseKind.PLANNED:
                delays.append(0.0)
                continue
            number += 1
            self._history.append(death)
            streak = self._streaks[death.rank]
            if streak and death.boundaries > streak[-1].boundaries:
                streak.clear()  # it made progress: not a loop
            streak.append(death)
            delays.append(BACK_OFF_S[min(len(streak), len(BACK_OFF_S)) - 1])
            ending = ending or self._ending(death, streak, self.budget if reason else self.budget - number)
        if ending is not None:
            return ResponsePlan("end", reason=ending[0], first=ending[1])
        return ResponsePlan(
            "restart" if reason else "shrink" if stay else "replace",
            tuple(delays),
            tuple(stay),
            reason,
            planned=len(deaths) - 1 - number,
        )

    def _ending(self, death: Death, streak: list[Death], left: int) -> tuple[str, Death] | None:
        """Why the job ends with this death, and the death to show; None if it does not."""
        error, who = death.error, f"rank {death.rank}"
        if error is not None and error.kind in MISTAKES:
            return f"{who} raised {' '.join(error.summary.split())} (at {error.place}){AS_ANY}", death
        if error is not None and error.kind == "CollectiveTimeout":
            return f"{who} waited in vain, and so would a replacement: {error.summary}", death
        if error is not None and error.kind == "OutOfResources":
            return f"{who}: {error.summary}", death
        twins = [other for other in streak[:-1] if _same_exception(other, death)]
        if error is not None and twins:
            found = advice_on(error.summary)
            more = f" ({error.summary}): {found}" if found else ""
            return f"{who} raised the same exception at the same place twice{more}", twins[0]
        if len(streak) >= self.loop_limit and all(_alike(other, death) for other in streak[-self.loop_limit :]):
            row = f"{self.loop_limit} times in a row without progress ({death.cause})"
            return f"{who} died {row}", streak[-self.loop_limit]
        if left <= 0:
            return "no replacements are left (--max-restarts)", self._history[0] if error is None else death
        return None

    def charge(self, plan: ResponsePlan) -> None:
        """Take the replacements of a plan that is carried out from the budget; a restart of all counts once."""
        self.budget -= {"end": 0, "restart": 1}.get(plan.response, len(plan.delays_s) - plan.planned)

    def take(self) -> bool:
        """Take a replacement for a restart of all; False if there is none left."""
        if self.budget <= 0:
            return False
        self.budget -= 1
        return True

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
