"""Replacements are admitted while others continue without them: in rounds, within one generation.

A round is known by how many ranks are absent before it, so its number falls from round to round. Of each round one
record counts, the first: who is in. An agent that has seen another failure writes "nobody", and no round follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from shared_core.codec import Count, Record, damaged, decode

#: No replacement is in, and none will be in this generation.
NOBODY = "[]"


def admit_key(generation: int, absent: int) -> str:
    """Key of the ranks, as JSON, that were admitted when ``absent`` ranks were absent."""
    return f"gen/{generation}/admit/{absent}"


def admitting_key(generation: int, rank: int) -> str:
    """Set when the replacement of an absent rank is admitted: the round, as :meth:`Round.to_json` writes it."""
    return f"gen/{generation}/letting/{rank}"


@dataclass(frozen=True)
class Round(Record):
    """Replacements that are admitted together: ``ranks`` of those ``absent`` before."""

    generation: Count
    absent: frozenset[Count]
    ranks: frozenset[Count]

    @property
    def away(self) -> frozenset[int]:
        return self.absent - self.ranks

    @property
    def name(self) -> str:
        """Prefix of the keys by which its members agree."""
        return f"gen/{self.generation}/round/{len(self.absent)}"

    @property
    def key(self) -> str:
        return admit_key(self.generation, len(self.absent))

    @property
    def word(self) -> str:
        """What its members write under :attr:`key`."""
        return json.dumps(sorted(self.ranks))

    def members(self, world_size: int) -> tuple[int, ...]:
        return tuple(rank for rank in range(world_size) if rank not in self.away)

    @classmethod
    def from_json(cls, raw: bytes | str, generation: int, rank: int, world_size: int) -> Round:
        """Inverse of :meth:`to_json`, for the replacement of ``rank``; raises DamagedRecord."""
        key = admitting_key(generation, rank)
        found: Round = decode(raw, cls, key)
        absent, ranks = found.absent, found.ranks
        if found.generation != generation:
            raise damaged(key, f"it is of generation {found.generation}")
        if not absent < frozenset(range(world_size)):
            raise damaged(key, f"it has the absent ranks {sorted(absent)}, and there are {world_size}")
        if rank not in ranks or not ranks <= absent:
            raise damaged(key, f"it lets ranks {sorted(ranks)} in, of {sorted(absent)}")
        return found


def ranks_in(said: bytes | str, key: str, absent: frozenset[int]) -> frozenset[int]:
    """The ranks that were admitted, of those ``absent`` before; raises DamagedRecord. ``key`` is for the message."""
    found: list[int] = decode(said, list[Count], key)
    if not absent.issuperset(found):
        raise damaged(key, f"it lets ranks {found} in, of {sorted(absent)}")
    return frozenset(found)


def still_absent(generation: int, absent: frozenset[int], look: Callable[[str], bytes | None]) -> frozenset[int]:
    """The ranks that are absent after the rounds of a generation; raises DamagedRecord.

    ``look`` reads a key, or None.
    """
    while absent:
        key = admit_key(generation, len(absent))
        said = look(key)
        ranks = frozenset[int]() if said is None else ranks_in(said, key, absent)
        if not ranks:
            break
        absent -= ranks
    return absent
