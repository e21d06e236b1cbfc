"""One entry of the ledger: a generation of the job, or the end of an attempt. Agents write it, workers follow it.

Entry g is the key ``gen/{g}`` in the job's store, below the attempt's prefix. Generation 0 has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from shared_core.codec import Count, Record, damaged, decode, dumps
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
    who: Count


@dataclass(frozen=True, kw_only=True)
class Entry(Record):
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

    generation: Count = 0
    incarnations: tuple[Count, ...] = ()
    absent: frozenset[Count] | None = None
    kind: EntryKind = EntryKind.FORM
    causes: tuple[Cause, ...] = ()
    detected: float = 0.0
    machines: tuple[str | None, ...] = ()
    stay: tuple[Count, ...] = ()
    after: tuple[str, ...] = ()
    reason: str = ""
    rank: int = -1
    workers: Count = 0
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
        replaced = {rank: number for rank, number in enumerate(self.incarnations) if number}
        return dumps(_StoredEntry(VERSION, len(self.incarnations), replaced, replace(self, incarnations=())))

    @classmethod
    def from_json(cls, raw: bytes, generation: int, world_size: int) -> Entry:
        """Inverse of :meth:`to_json`. Raises DamagedRecord if it is damaged, or of another generation or job: to follow
        it could start workers in an endless loop.
        """
        key = generation_key(generation)
        stored: _StoredEntry = decode(raw, _StoredEntry, key)
        if wrong := _wrong_in(stored, generation, world_size):
            raise damaged(key, wrong)
        return replace(stored.entry, incarnations=tuple(stored.replaced.get(rank, 0) for rank in range(stored.size)))


@dataclass(frozen=True)
class _StoredEntry:
    """An entry with its incarnations apart, as most are 0: ``size`` of them, and those that are not, by rank."""

    version: Count
    size: Count
    replaced: dict[Count, Count]
    entry: Entry


def _wrong_in(stored: _StoredEntry, generation: int, world_size: int) -> str:
    """What is wrong in an entry of the right shape; empty if nothing is."""
    entry = stored.entry
    if stored.version != VERSION:
        return f"version is {stored.version}, not {VERSION}"
    if stored.size != world_size:
        return f"it is for {stored.size} workers, not {world_size}"
    if entry.generation != generation:
        return f"generation is {entry.generation}, not {generation}"
    ranked = {"replaced": stored.replaced, "absent": entry.absent or (), "causes": entry.failed, "stay": entry.stay}
    for name, ranks in ranked.items():
        if any(rank >= world_size for rank in ranks):
            return f"{name} names rank {max(ranks)}, and there are {world_size}"
    if not -1 <= entry.rank < world_size:
        return f"rank is {entry.rank}, and there are {world_size}"
    if entry.kind in (EntryKind.FORM, EntryKind.CARRY_ON) and (entry.kind is EntryKind.CARRY_ON) != bool(entry.absent):
        return f"kind is {entry.kind.value!r}, with {len(entry.absent or ())} absent ranks"
    return ""
