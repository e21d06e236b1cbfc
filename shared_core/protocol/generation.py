"""One entry of the ledger: a generation of the job, or the end of an attempt. Agents write it, workers follow it.

Entry g is the key ``gen/{g}`` in the job's store, below the attempt's prefix. Generation 0 has none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Literal, TypedDict

from shared_core.protocol.codec import Count, damaged, decode
from shared_core.protocol.worker_env import Resized

#: Version of the form in which an entry is stored.
VERSION = 2
#: Who appends an entry leaves this where workers may wait for something of the generation before.
GIVEN_UP = "given up"


def generation_key(generation: int) -> str:
    return f"gen/{generation}"


def plan_key(generation: int) -> str:
    """The plan of a generation, or :data:`GIVEN_UP`; the first writer wins."""
    return f"gen/{generation}/plan"


def go_key(generation: int) -> str:
    """Set when all replacements of a generation have come to where they join; or :data:`GIVEN_UP`."""
    return f"gen/{generation}/go"


def survivor_group_key(rank: int, incarnation: int) -> str:
    """Set by a worker that has begun to use survivor groups (``on_failure="reroute"``)."""
    return f"survivor_group/{rank}.{incarnation}"


def join_request_key(generation: int, rank: int) -> str:
    """Set by the replacement of an absent rank that asks to be admitted: the number of its entry call."""
    return f"gen/{generation}/join_request/{rank}"


def copy_key(generation: int, rank: int) -> str:
    """Set by the replacement of an absent rank that asks for its state while the others train."""
    return f"gen/{generation}/copy/{rank}"


def still_key(generation: int) -> str:
    """Set when the present workers wait until the absent ones are there."""
    return f"gen/{generation}/still"


class EntryKind(Enum):
    #: All ranks form the generation, the replacements of failed ones among them.
    FORM = "form"
    #: The others continue at once without the absent ranks, and admit their replacements later.
    CARRY_ON = "continue"
    #: The number of workers changes: those that stay write their state for the next attempt, and nothing is formed.
    DRAIN = "drain"
    #: The attempt is over: all workers said goodbye.
    RELEASE = "release"
    #: The attempt is over: all workers start again.
    RESTART = "restart"
    #: The attempt is over: another number of workers continues.
    RESIZE = "resize"
    #: The attempt is over: the job has failed.
    FAIL = "fail"

    @property
    def over(self) -> bool:
        """Whether nothing follows in this attempt."""
        return self in (EntryKind.RELEASE, EntryKind.RESTART, EntryKind.RESIZE, EntryKind.FAIL)


class CauseKind(Enum):
    #: Its process ended, or was killed because it made no progress.
    DIED = "died"
    #: It was killed because its state was damaged: the majority of its replicas have another one.
    DIVERGENT = "divergent"
    #: Its machine failed.
    MACHINE = "machine"
    #: It left as planned, at a step boundary.
    PLANNED = "planned"


@dataclass(frozen=True)
class Cause:
    """One failed worker: its rank (``who``) and why, for rules and as text."""

    kind: CauseKind
    text: str
    who: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What one entry says. An agent leaves the first three out: the ledger adds them.

    Attributes:
        incarnations: for each rank, how many workers held it before the present one.
        absent: ranks that failed and without which the others continue; None until all workers use survivor groups.
        causes: one for each worker that failed just now.
        detected: when that was noticed, in seconds since the epoch.
        machines: for each place, the machine that holds it, None while nobody does; empty for a job on one machine. An
            agent leaves it out where it does not change.
        stay: ranks that continue after a change of the number of workers.
        after: machines that continue after that.
        rank: whose error ends the job; -1 for none.
        line: what the next attempt continues from, if not from a checkpoint or the beginning.
    """

    generation: int = 0
    incarnations: tuple[int, ...] = ()
    absent: frozenset[int] | None = None
    kind: EntryKind = EntryKind.FORM
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
    def failed(self) -> tuple[int, ...]:
        """Ranks whose workers failed just now."""
        return tuple(cause.who for cause in self.causes)

    @property
    def planned(self) -> bool:
        """Whether all of them left as planned."""
        return bool(self.causes) and all(cause.kind is CauseKind.PLANNED for cause in self.causes)

    def divergent(self, rank: int) -> bool:
        """Whether the rank's worker was replaced because its state was damaged."""
        return any(cause.who == rank and cause.kind is CauseKind.DIVERGENT for cause in self.causes)

    def while_changing(self, stay: Sequence[int], change: Entry | None) -> Entry:
        """This entry as part of a change of the number of workers; unchanged if none begins or is under way. ``stay``
        begins a change; else the one under way (``change``, the newest entry) continues without failed ranks.
        """
        if not stay and change is None:
            return self
        staying = stay or (change.stay if change is not None else ())
        return replace(
            self,
            kind=EntryKind.DRAIN,
            stay=tuple(rank for rank in staying if rank not in self.failed),
            after=change.after if change is not None else (),
        )

    def event_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"machines": list(self.machines)} if self.machines else {}
        if self.absent is not None:
            fields["absent"] = sorted(self.absent)
        fields |= {
            "incarnations": list(self.incarnations),
            "failed": list(self.failed),
            **({"planned": True} if self.planned else {}),
            "cause": {str(cause.who): cause.text for cause in self.causes},
            "detected": self.detected,
        }
        if self.kind is EntryKind.DRAIN:
            fields["stay"] = list(self.stay)
        if self.after:
            fields["after"] = list(self.after)
        return fields | ({"reason": self.reason} if self.reason else {})

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "generation": self.generation,
                "kind": self.kind.value,
                "size": len(self.incarnations),
                "replaced": [each for each in enumerate(self.incarnations) if each[1]],
                "absent": None if self.absent is None else sorted(self.absent),
                "causes": [[cause.kind.value, cause.text, cause.who] for cause in self.causes],
                "detected": self.detected,
                "machines": self.machines,
                "stay": self.stay,
                "after": self.after,
                "reason": self.reason,
                "rank": self.rank,
                "workers": self.workers,
                "line": None if self.line is None else asdict(self.line),
            }
        )

    @classmethod
    def from_json(cls, raw: bytes, generation: int, world_size: int) -> Entry:
        """Inverse of :meth:`to_json`. Raises DamagedRecord if it is damaged, or of another generation or job: to follow
        it could start workers in an endless loop.
        """
        key = generation_key(generation)
        stored: _StoredGeneration = decode(raw, _StoredGeneration, key)
        size, replaced = stored["size"], stored["replaced"]
        if size != world_size:
            raise damaged(key, f"it is for {size} workers, not {world_size}")
        if any(rank >= size for rank, _ in replaced):
            raise damaged(key, f"replaced names rank {max(replaced)[0]}, and there are {size}")
        incarnations = [0] * size
        for rank, number in replaced:
            incarnations[rank] = number
        entry = Entry(
            generation=stored["generation"],
            incarnations=tuple(incarnations),
            absent=None if stored["absent"] is None else frozenset(stored["absent"]),
            kind=EntryKind(stored["kind"]),
            causes=tuple(Cause(CauseKind(kind), text, who) for kind, text, who in stored["causes"]),
            detected=stored["detected"],
            machines=stored["machines"],
            stay=stored["stay"],
            after=stored["after"],
            reason=stored["reason"],
            rank=stored["rank"],
            workers=stored["workers"],
            line=stored["line"],
        )
        if wrong := _wrong_in(entry, stored["version"], generation, world_size):
            raise damaged(key, wrong)
        return entry


class _StoredGeneration(TypedDict):
    version: Count
    generation: Count
    kind: Literal["form", "continue", "drain", "release", "restart", "resize", "fail"]
    size: Count
    replaced: list[tuple[Count, Count]]
    absent: list[Count] | None
    causes: list[tuple[Literal["died", "divergent", "machine", "planned"], str, Count]]
    detected: float
    machines: tuple[str | None, ...]
    stay: tuple[Count, ...]
    after: tuple[str, ...]
    reason: str
    rank: int
    workers: Count
    line: Resized | None


def _wrong_in(entry: Entry, version: int, generation: int, world_size: int) -> str:
    """What is wrong in an entry of the right shape; empty if nothing is."""
    if version != VERSION:
        return f"version is {version}, not {VERSION}"
    if entry.generation != generation:
        return f"generation is {entry.generation}, not {generation}"
    for name, ranks in (("absent", entry.absent or ()), ("causes", entry.failed), ("stay", entry.stay)):
        if any(rank >= world_size for rank in ranks):
            return f"{name} names rank {max(ranks)}, and there are {world_size}"
    if not -1 <= entry.rank < world_size:
        return f"rank is {entry.rank}, and there are {world_size}"
    if entry.kind in (EntryKind.FORM, EntryKind.CARRY_ON) and (entry.kind is EntryKind.CARRY_ON) != bool(entry.absent):
        return f"kind is {entry.kind.value!r}, with {len(entry.absent or ())} absent ranks"
    return ""
