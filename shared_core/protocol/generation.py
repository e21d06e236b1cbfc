"""One entry of the ledger: a generation of the job, or the end of an attempt. Agents write it, workers follow it.

Entry g is the key ``gen/{g}`` in the job's store, below the attempt's prefix. Generation 0 has none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from shared_core.errors import DamagedRecord
from shared_core.protocol.worker_env import Resized

#: Of the form in which an entry is stored.
VERSION = 1


def generation_key(generation: int) -> str:
    """Key of an entry."""
    return f"gen/{generation}"


def let_in_key(generation: int) -> str:
    """Whether the absent ranks of a generation were let in: ``yes`` or ``no``, whatever was said first."""
    return f"gen/{generation}/let_in"


def lane_key(rank: int, incarnation: int) -> str:
    """Set by a worker that has begun to use lanes (``on_failure="reroute"``)."""
    return f"lane/{rank}.{incarnation}"


class Kind(Enum):
    """What happens with an entry."""

    #: All ranks form the generation, the newcomers of lost ones among them.
    FORM = "form"
    #: The others go on at once without the absent ranks, and let their newcomers in later.
    GO_ON = "go on"
    #: The number of workers changes: those that stay hand their state on, and nothing is formed.
    HAND_ON = "hand on"
    #: The attempt is over: all workers said goodbye.
    RELEASE = "release"
    #: The attempt is over: all workers start again.
    RESTART = "restart"
    #: The attempt is over: another number of workers goes on.
    RESIZE = "resize"
    #: The attempt is over: the job has failed.
    FAIL = "fail"

    @property
    def over(self) -> bool:
        """Whether nothing follows in this attempt."""
        return self in (Kind.RELEASE, Kind.RESTART, Kind.RESIZE, Kind.FAIL)


class CauseKind(Enum):
    """Why a worker was lost."""

    #: Its process ended, or was killed because it did not go on.
    DIED = "died"
    #: It was killed because its state was damaged: replicas that are the majority have another.
    DIVERGENT = "divergent"
    #: Its machine was lost.
    MACHINE = "machine"


@dataclass(frozen=True)
class Cause:
    """One lost worker.

    Attributes:
        kind: why, for rules.
        text: why, for people.
        who: its rank.
    """

    kind: CauseKind
    text: str
    who: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What one entry says. An agent leaves the first three out: the ledger adds them.

    Attributes:
        generation: number of the entry.
        incarnations: for each rank, how many workers held it before the present one.
        absent: ranks that were lost and without which the others go on; None until all workers use lanes.
        kind: what happens.
        causes: one for each worker that was lost just now.
        detected: ``time.time()`` when that was noticed.
        machines: for each place, the machine that holds it, None while nobody does; empty for a job on one machine. An
            agent leaves it out where it does not change.
        stay: ranks that hand their state on.
        after: machines that go on after that.
        reason: for people.
        rank: whose error ends the job; -1 for none.
        workers: number of them that goes on.
        line: what the next attempt goes on from, if not from a checkpoint or the beginning.
    """

    generation: int = 0
    incarnations: tuple[int, ...] = ()
    absent: frozenset[int] | None = None
    kind: Kind = Kind.FORM
    causes: tuple[Cause, ...] = ()
    detected: float = 0.0
    machines: tuple[str | None, ...] = ()
    stay: tuple[int, ...] = ()
    after: tuple[str, ...] = ()
    reason: str = ""
    rank: int = -1
    workers: int = 0
    line: Resized | None = None

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks whose workers were lost just now."""
        return tuple(cause.who for cause in self.causes)

    def divergent(self, rank: int) -> bool:
        """Whether the rank's worker was replaced because its state was damaged."""
        return any(cause.who == rank and cause.kind is CauseKind.DIVERGENT for cause in self.causes)

    def while_changing(self, stay: Sequence[int], change: Entry | None) -> Entry:
        """This entry where the number of workers changes; a change that is under way goes on with those that are left.

        Args:
            stay: ranks that are to hand their state on, if a change begins.
            change: the newest entry, if one is under way.
        """
        if not stay and change is None:
            return self
        staying = stay or (change.stay if change is not None else ())
        return replace(
            self,
            kind=Kind.HAND_ON,
            stay=tuple(rank for rank in staying if rank not in self.lost),
            after=change.after if change is not None else (),
        )

    def event_fields(self) -> dict[str, Any]:
        """Of the ``generation`` event in the job's log."""
        fields: dict[str, Any] = {"machines": list(self.machines)} if self.machines else {}
        if self.absent is not None:
            fields["absent"] = sorted(self.absent)
        fields |= {
            "incarnations": list(self.incarnations),
            "lost": list(self.lost),
            "cause": {str(cause.who): cause.text for cause in self.causes},
            "detected": self.detected,
        }
        if self.kind is Kind.HAND_ON:
            fields["stay"] = list(self.stay)
        if self.after:
            fields["after"] = list(self.after)
        return fields | ({"reason": self.reason} if self.reason else {})

    def to_json(self) -> str:
        """Inverse of :meth:`from_json`."""
        return json.dumps(
            {
                "version": VERSION,
                "generation": self.generation,
                "kind": self.kind.value,
                "incarnations": self.incarnations,
                "absent": None if self.absent is None else sorted(self.absent),
                "causes": [[cause.kind.value, cause.text, cause.who] for cause in self.causes],
                "detected": self.detected,
                "machines": self.machines,
                "stay": self.stay,
                "after": self.after,
                "reason": self.reason,
                "rank": self.rank,
                "workers": self.workers,
                "line": None if self.line is None else self.line.to_json(),
            }
        )

    @classmethod
    def from_json(cls, raw: bytes, generation: int, world_size: int) -> Entry:
        """Inverse of :meth:`to_json`.

        Args:
            raw: what the store holds.
            generation: the entry's number.
            world_size: number of logical ranks.

        Raises:
            DamagedRecord: it is another's, or damaged. To follow it could start workers in an endless loop.
        """
        try:
            return _read(json.loads(raw), generation, world_size)
        except (RecursionError, json.JSONDecodeError) as error:
            wrong = f"it is no JSON ({error})"
        except ValueError as error:
            wrong = str(error)
        except (KeyError, TypeError):
            wrong = "its line is none"
        raise DamagedRecord(
            f"the entry {generation_key(generation)} in the job's store is damaged or was written by something else: "
            f"{wrong}; start the job again, and let nothing else reach its store"
        )


def _read(values: Any, generation: int, world_size: int) -> Entry:
    """Raises ValueError with what is wrong; KeyError or TypeError for a wrong line."""
    if not isinstance(values, dict):
        raise ValueError(f"it holds {values!r:.80}")
    if values.get("version") != VERSION:
        raise ValueError(f"its version is {values.get('version')!r:.80}, not {VERSION}")

    def is_rank(value: Any) -> bool:
        return _is_count(value) and value < world_size

    if not _is_count(values.get("generation")) or values["generation"] != generation:
        raise ValueError(f"its generation is {values.get('generation')!r:.80}, not {generation}")
    incarnations = _all(values, "incarnations", _is_count, f"{world_size} counts")
    if len(incarnations) != world_size:
        raise ValueError(f"its incarnations are {list(incarnations)!r:.80}, not {world_size} counts")
    ranks = f"a list of ranks below {world_size}"
    absent = None if values.get("absent") is None else frozenset(_all(values, "absent", is_rank, ranks))
    causes = _all(values, "causes", lambda each: _is_cause(each, is_rank), f"a list of losses of {ranks}")
    line = values.get("line")
    entry = Entry(
        generation=generation,
        incarnations=incarnations,
        absent=absent,
        kind=Kind(values.get("kind")),
        causes=tuple(Cause(CauseKind(kind), text, who) for kind, text, who in causes),
        detected=float(_one(values, "detected", _is_time, "a time")),
        machines=_all(values, "machines", _is_place, "a list of machines"),
        stay=_all(values, "stay", is_rank, ranks),
        after=_all(values, "after", _is_text, "a list of machines"),
        reason=_one(values, "reason", _is_text, "text"),
        rank=_one(values, "rank", lambda each: each == -1 or is_rank(each), f"a rank below {world_size}"),
        workers=_one(values, "workers", _is_count, "a count"),
        line=None if line is None else Resized.from_json(line),
    )
    if not entry.kind.over and entry.kind is not Kind.HAND_ON:
        kind = Kind.GO_ON if entry.absent else Kind.FORM
        if entry.kind is not kind:
            raise ValueError(f"its kind is {entry.kind.value!r}, with {len(entry.absent or ())} absent ranks")
    return entry


def _one(values: dict[str, Any], name: str, good: Callable[[Any], bool], what: str) -> Any:
    value = values.get(name)
    if not good(value):
        raise ValueError(f"{name} is {value!r:.80}, not {what}")
    return value


def _all(values: dict[str, Any], name: str, good: Callable[[Any], bool], what: str) -> tuple[Any, ...]:
    value = values.get(name)
    if not isinstance(value, list) or not all(map(good, value)):
        raise ValueError(f"{name} is {value!r:.80}, not {what}")
    return tuple(value)


def _is_cause(value: Any, is_rank: Callable[[Any], bool]) -> bool:
    kinds = {kind.value for kind in CauseKind}
    return (
        isinstance(value, list)
        and len(value) == 3
        and value[0] in kinds
        and isinstance(value[1], str)
        and is_rank(value[2])
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_place(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
