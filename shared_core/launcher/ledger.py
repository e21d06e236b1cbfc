"""The one order of what happens in an attempt: an append-only list of entries in the store, shared by all agents.

Entry g is the key ``gen/{g}``. It is written with ``compare_set`` against nothing, so that of two agents that append
at the same moment one comes first and the other second, knowing the first. An entry with ``over`` is the last one.
Workers follow the same keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

from shared_core.protocol.codec import Count, damaged, decode, word

#: What ends an attempt: all workers said goodbye, all start again, another number goes on, the job failed.
RELEASE, RESTART, RESIZE, FAIL = "release", "restart", "resize", "fail"
#: What is said of newcomers that ask to be let in.
LET_IN = ("yes", "no")


class _Numbered(TypedDict):
    generation: Count
    incarnations: list[Count]


class _Entry(_Numbered, total=False):
    """Shape of an entry."""

    lost: list[Count]
    absent: list[Count]
    stay: list[Count]
    cause: dict[str, str]
    detected: float
    machines: list[str | None]
    after: list[str]
    reason: str
    over: Literal["release", "restart", "resize", "fail"]
    rank: Count
    message: str
    workers: Count
    line: str


def lane_key(rank: int, incarnation: int) -> str:
    """Set by a worker that has begun to use lanes (``on_failure="reroute"``)."""
    return f"lane/{rank}.{incarnation}"


def let_in_key(generation: int) -> str:
    """Whether the absent ranks of a generation were let in: ``yes`` or ``no``, whatever was said first."""
    return f"gen/{generation}/let_in"


def read_entry(raw: bytes, key: str, generation: int, world_size: int) -> dict[str, Any]:
    """An entry as :meth:`Ledger.append` has written it.

    Args:
        raw: what the store holds.
        key: its key, for the message.
        generation: the entry's number.
        world_size: number of logical ranks.

    Raises:
        DamagedRecord: it is another's, or damaged. To follow it could start workers in an endless loop.
    """
    entry: dict[str, Any] = decode(raw, _Entry, key)
    if wrong := _wrong_in(entry, generation, world_size):
        raise damaged(key, wrong)
    return entry


def _wrong_in(entry: dict[str, Any], generation: int, world_size: int) -> str:
    """What is wrong in an entry of the right shape; empty if nothing is."""
    if entry["generation"] != generation:
        return f"generation is {entry['generation']}, not {generation}"
    if len(entry["incarnations"]) != world_size:
        return f"it has {len(entry['incarnations'])} incarnations, not {world_size}"
    for name in ("lost", "absent", "stay"):
        if any(rank >= world_size for rank in entry.get(name, ())):
            return f"{name} is {entry[name]!r:.80}, not ranks below {world_size}"
    needed = ("stay",) if "after" in entry else _ENDS.get(entry.get("over", ""), ())
    return next((f"it is without {name!r}" for name in needed if name not in entry), "")


#: What the last entry of an attempt has to say.
_ENDS = {RESTART: ("reason",), RESIZE: ("workers", "line"), FAIL: ("message",)}


class Ledger:
    """One reader's and writer's view.

    Attributes:
        generation: number of the newest generation.
        incarnations: for each rank, how many workers held it before the present one.
        machines: for each place, the machine that holds it; None while nobody does. Empty for a job on one machine.
        over: the last entry once the attempt is over.
        gone: machines that have lost their place; each has another name if it comes back.
        detected: when the loss was noticed that the newest generation answers; 0 before there is one.
        change: ``stay`` and ``after`` of the newest generation, while the number of workers changes.
        absent: ranks that were lost and without which the others went on, as of the newest generation; None where every
            loss is answered by forming a generation with its newcomer.

    Args:
        store: a client of the store; any object with ``check``, ``get`` and ``compare_set``.
        prefix: key prefix of the attempt.
        world_size: number of logical ranks.
        machines: who holds which place in generation 0.
    """

    def __init__(self, store: Any, prefix: str, world_size: int, machines: Sequence[str | None] = ()) -> None:
        self._store, self._prefix = store, prefix
        self.generation = 0
        self.incarnations = [0] * world_size
        self.machines = list(machines)
        self.over: dict[str, Any] | None = None
        self.gone: set[str] = set()
        self.detected = 0.0
        self.change: dict[str, Any] = {}
        self.absent: frozenset[int] | None = None
        self._news: list[dict[str, Any]] = []

    def follow(self) -> list[dict[str, Any]]:
        """Entries of others since the last call, in order.

        Raises:
            DamagedRecord: an entry is none.
        """
        while self.over is None and self._store.check([self._next]):
            self._take(self._store.get(self._next), ours=False)
        news, self._news = self._news, []
        return news

    def append(self, make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Append what ``make`` returns, and return it with what the ledger added.

        Args:
            make: called with this view up to date, again after each entry that came before ours; returns ``lost``
                (ranks), ``machines`` (the whole map, if it changes), ``over`` and anything else, or None to give up.

        Returns:
            The entry; None if the attempt is over or ``make`` gave up.
        """
        while self.over is None:
            entry = make()
            if entry is None:
                return None
            incarnations, lost = list(self.incarnations), entry.get("lost", ())
            for rank in lost:
                incarnations[rank] += 1
            entry = {"generation": self.generation + 1, "incarnations": incarnations} | entry
            if not entry.get("over") and (absent := self._absent_after(lost)) is not None:
                entry = {"absent": sorted(absent)} | entry
            if self.machines or "machines" in entry:
                entry = {"machines": list(self.machines)} | entry
            written = json.dumps(entry)
            stored = bytes(self._store.compare_set(self._next, "", written))
            ours = stored == written.encode()
            self._take(stored, ours=ours)
            if ours:
                return entry
        return None

    def present(self) -> list[int]:
        """Ranks that are not absent now."""
        away: frozenset[int] = frozenset()
        if self.absent:
            key = self._prefix + let_in_key(self.generation)
            let_in = self._store.check([key]) and word(self._store.get(key), LET_IN, key) == "yes"
            away = frozenset() if let_in else self.absent
        return [rank for rank in range(len(self.incarnations)) if rank not in away]

    def _absent_after(self, lost: Sequence[int]) -> frozenset[int] | None:
        """``absent`` of the generation that follows these losses.

        Once every worker uses lanes, the others go on without a lost rank. Newcomers that are being let in are in, or
        they are not: this settles it.
        """
        if self.absent is None:
            keys = [self._prefix + lane_key(rank, n) for rank, n in enumerate(self.incarnations)]
            return frozenset(lost) if self._store.check(keys) else None
        if not self.absent:
            return frozenset(lost)
        key = self._prefix + let_in_key(self.generation)
        settled = word(self._store.compare_set(key, "", "no"), LET_IN, key)
        return frozenset(lost) | (frozenset() if settled == "yes" else self.absent)

    @property
    def _next(self) -> str:
        return f"{self._prefix}gen/{self.generation + 1}"

    def _take(self, raw: bytes, *, ours: bool) -> None:
        entry = read_entry(raw, self._next, self.generation + 1, len(self.incarnations))
        before, self.machines = self.machines, entry.get("machines", self.machines)
        self.gone |= {name for name in before if name is not None and name not in self.machines}
        if entry.get("over"):
            self.over = entry
        else:
            self.absent = frozenset(entry["absent"]) if "absent" in entry else None
            self.change = {name: entry[name] for name in ("stay", "after") if name in entry}
            self.generation, self.incarnations = entry["generation"], entry["incarnations"]
            self.detected = float(entry.get("detected", 0.0))
        if not ours:
            self._news.append(entry)
