"""Who takes the place of a failed machine. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reassignment:
    """A new map of places to machines.

    Attributes:
        machines: by place; None where nobody can take the place yet.
        failed: places that failed just now, with the machines that held them.
        filled: places that a spare machine takes.
    """

    machines: tuple[str | None, ...]
    failed: dict[int, str]
    filled: tuple[int, ...]

    def ranks(self, nproc: int) -> list[int]:
        """Ranks of all places that change hands; ``nproc`` workers on each machine."""
        places = sorted({*self.failed, *self.filled})
        return [place * nproc + local_rank for place in places for local_rank in range(nproc)]


def grown(machines: Sequence[str | None], alive: Sequence[str], most: int) -> tuple[str, ...]:
    """The machines that hold places, then spare ones up to ``most``, in the order of ``alive``."""
    held = [name for name in machines if name is not None]
    spares = [name for name in alive if name not in machines]
    return (*held, *spares[: max(0, most - len(held))])


def reassign(machines: Sequence[str | None], failed: Collection[str], alive: Sequence[str]) -> Reassignment | None:
    """Give the places of failed machines to spare ones, in the order in which these came; None if nothing changes."""
    gone = {place: name for place, name in enumerate(machines) if name is not None and name in failed}
    spares = [name for name in alive if name not in machines and name not in failed]
    after: list[str | None] = [None if place in gone else name for place, name in enumerate(machines)]
    filled = []
    for place, name in enumerate(after):
        if name is None and spares:
            after[place] = spares.pop(0)
            filled.append(place)
    if not gone and not filled:
        return None
    return Reassignment(tuple(after), gone, tuple(filled))
