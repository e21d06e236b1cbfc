"""Replacements are admitted while others continue without them: some in one round, more in the next, within one
generation.

A round is known by how many ranks are absent before it, so its number falls from round to round. Of each round one word
counts, whatever was said first: who is in. An agent that has seen another failure says "nobody", and no round follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from shared_core.protocol.codec import Count, damaged, decode

#: No replacement is in, and none will be in this generation.
NOBODY = "[]"


def admit_key(generation: int, absent: int) -> str:
    """Who was admitted of a generation: JSON, the ranks.

    Args:
        generation: which one.
        absent: how many ranks were absent before.
    """
    return f"gen/{generation}/admit/{absent}"


def admitting_key(generation: int, rank: int) -> str:
    """Set when the replacement of an absent rank is admitted: the round, as :meth:`Round.to_json` writes it."""
    return f"gen/{generation}/letting/{rank}"


@dataclass(frozen=True)
class Round:
    """Replacements that are admitted together.

    Attributes:
        generation: in which.
        absent: ranks that are absent before.
        ranks: those of them that are admitted.
    """

    generation: int
    absent: frozenset[int]
    ranks: frozenset[int]

    @property
    def away(self) -> frozenset[int]:
        """Ranks that are absent afterwards."""
        return self.absent - self.ranks

    @property
    def name(self) -> str:
        """Prefix of the keys by which its members agree."""
        return f"gen/{self.generation}/round/{len(self.absent)}"

    @property
    def key(self) -> str:
        """See :func:`admit_key`."""
        return admit_key(self.generation, len(self.absent))

    @property
    def word(self) -> str:
        """What its members say there."""
        return json.dumps(sorted(self.ranks))

    def members(self, world_size: int) -> tuple[int, ...]:
        """Ranks that take part: those that are there, and the replacements."""
        return tuple(rank for rank in range(world_size) if rank not in self.away)

    def to_json(self) -> str:
        """Inverse of :meth:`from_json`."""
        return json.dumps({"absent": sorted(self.absent), "ranks": sorted(self.ranks)})

    @classmethod
    def from_json(cls, raw: bytes | str, generation: int, rank: int, world_size: int) -> Round:
        """Inverse of :meth:`to_json`.

        Args:
            raw: what the store holds.
            generation: in which.
            rank: of the replacement that is admitted.
            world_size: number of ranks.

        Raises:
            DamagedRecord: it is something else.
        """
        key = admitting_key(generation, rank)
        stored: _Stored = decode(raw, _Stored, key)
        absent, ranks = frozenset(stored["absent"]), frozenset(stored["ranks"])
        if not absent < frozenset(range(world_size)):
            raise damaged(key, f"it has the absent ranks {sorted(absent)}, and there are {world_size}")
        if rank not in ranks or not ranks <= absent:
            raise damaged(key, f"it lets ranks {sorted(ranks)} in, of {sorted(absent)}")
        return cls(generation, absent, ranks)


class _Stored(TypedDict):
    """Shape of a stored round."""

    absent: list[Count]
    ranks: list[Count]


def ranks_in(said: bytes | str, key: str, absent: frozenset[int]) -> frozenset[int]:
    """Who was admitted.

    Args:
        said: what the store holds.
        key: where it was.
        absent: ranks that were absent before.

    Raises:
        DamagedRecord: it is no list of such ranks.
    """
    found: list[int] = decode(said, list[Count], key)
    if not absent.issuperset(found):
        raise damaged(key, f"it lets ranks {found} in, of {sorted(absent)}")
    return frozenset(found)


def still_absent(generation: int, absent: frozenset[int], look: Callable[[str], bytes | None]) -> frozenset[int]:
    """Who is absent after the rounds of a generation.

    Args:
        generation: which one.
        absent: ranks that were absent when it began.
        look: what is said under a key; None for nothing.

    Raises:
        DamagedRecord: it is not what is said of a round.
    """
    while absent:
        key = admit_key(generation, len(absent))
        said = look(key)
        ranks = frozenset[int]() if said is None else ranks_in(said, key, absent)
        if not ranks:
            break
        absent -= ranks
    return absent
