"""Members of a group as a short text, so that what ranks publish at each step boundary does not grow with the job.

Groups are regular: ``0-4095``, or every eighth rank. A list of ranks would grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated

from shared_core.codec import Form

_RANK = r"\d{1,9}"
_RUN = rf"{_RANK}(-{_RANK}(:{_RANK})?)?"

#: Global ranks in group order: ``3``, ``0-7``, ``1-13:4``, or several of these with commas in between.
Members = Annotated[str, Form(rf"{_RUN}(,{_RUN})*", "members of a group")]


def members_text(ranks: Sequence[int]) -> Members:
    """The shortest text for at least one rank, in group order. Inverse of :func:`members_of`."""
    parts, at = [], 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 0
        end = at + 1
        while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - at < 3:  # no shorter
            parts.append(str(ranks[at]))
            at += 1
            continue
        parts.append(f"{ranks[at]}-{ranks[end - 1]}" + (f":{step}" if step > 1 else ""))
        at = end
    return ",".join(parts)


@lru_cache(maxsize=1024)
def members_of(text: Members) -> tuple[int, ...]:
    """The global ranks, in group order. Check untrusted text with :func:`wrong_members` first: it may be huge."""
    return tuple(rank for run in _runs(text) for rank in run)


@lru_cache(maxsize=1024)
def wrong_members(text: Members, world_size: int) -> str:
    """What is wrong with the members of a group in a job of ``world_size`` ranks; empty if nothing is."""
    runs = list(_runs(text))
    if not all(run and run[-1] < world_size for run in runs) or sum(map(len, runs)) > world_size:
        return f"{text!r:.80}, not some of {world_size}"
    return "" if len(set(members_of(text))) == len(members_of(text)) else f"{text!r:.80}, some of them twice"


def _runs(text: Members) -> Iterator[range]:
    for run in text.split(","):
        first, _, rest = run.partition("-")
        last, _, step = rest.partition(":")
        stride = int(step or 1)
        yield range(int(first), int(last or first) + 1, stride) if stride else range(0)  # refused as empty
