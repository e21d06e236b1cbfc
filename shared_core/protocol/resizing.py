"""When the number of workers changes: decisions of the agent, without acting on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from shared_core.config import SwiftConfig
from shared_core.protocol.generation import Entry, EntryKind
from shared_core.protocol.worker_env import Resized


@dataclass
class Resizing:
    """The number of workers, and the change under way. Times are those of :func:`time.monotonic`.

    Attributes:
        full: workers for which there are places.
        stay: ranks that continue after the change under way; empty while there is none.
        target: number of workers after it.
        grow_at: when empty places are filled again; None for never.
        due: when the replacement of a rank must have joined.
        line: what the present workers continued from, when their number last changed.
        least: machines that are enough.
        most: machines that there may be.
        after: machines that continue after the change under way.
        vacant: since when a machine's place is empty.
        declined: the number of workers could not change; it is not tried again before places change hands.
    """

    config: SwiftConfig
    full: int
    stay: tuple[int, ...] = ()
    target: int = 0
    grow_at: float | None = None
    due: dict[int, float] = field(default_factory=dict)
    line: Resized | None = None
    least: int = 1
    most: int = 1
    after: tuple[str, ...] = ()
    vacant: float | None = None
    declined: bool = False

    def begin(self, stay: Iterable[int], target: int) -> None:
        self.stay, self.target = tuple(sorted(stay)), target
        self.grow_at = None
        self.due.clear()

    def follow(self, entry: Entry, nproc: int) -> None:
        """An agent has written a generation: a change begins with it, or the one under way is given up."""
        if entry.after:
            self.after = entry.after
            self.begin(entry.stay, len(self.after) * nproc)
        elif entry.kind is not EntryKind.DRAIN:
            self.end()

    def machines(
        self, machines: Sequence[str | None], alive: Sequence[str], *, changed: bool, now: float
    ) -> tuple[str, ...] | None:
        """The machines that are to continue, if their number is to change now; else None. ``alive`` are in the order in
        which they came. ``changed``: places have just changed hands.
        """
        self.declined = self.declined and not changed
        if self.declined:
            return None
        if None not in machines:
            self.vacant = None
            after = grown(machines, alive, self.most)
            return after if len(after) > len(machines) and not changed and not self.stay else None
        self.vacant = now if self.vacant is None else self.vacant
        held = tuple(name for name in machines if name is not None)
        config = self.config
        at_once = bool(self.stay) or config.shrinks
        in_time = config.resize.replace_timeout_s and now >= self.vacant + config.resize.replace_timeout_s
        if len(held) < max(1, self.least) or (self.stay and not changed) or not (at_once or in_time):
            return None
        return held

    def end(self) -> None:
        self.stay = ()

    def start_over(self, line: Resized | None) -> None:
        """Attempts on this machine start over, from ``line`` if others have changed their number meanwhile."""
        self.end()
        self.line = line

    def decline(self, now: float, workers: int) -> None:
        self.declined = True
        self.schedule(now, workers)

    def done(self, now: float, workers: int, line: Resized | None) -> None:
        self.end()
        self.vacant, self.declined, self.after = None, False, ()
        self.due.clear()
        self.line = line
        self.schedule(now, workers)

    def schedule(self, now: float, workers: int) -> None:
        wait = self.config.resize.grow_after_s
        self.grow_at = now + wait if workers < self.full and wait > 0 else None

    def grows(self, now: float) -> bool:
        """Whether it is time to fill empty places; True once for each :meth:`schedule`."""
        if self.grow_at is None or now < self.grow_at:
            return False
        self.grow_at = None
        return True

    def shrinks(self, goodbyes: bool) -> bool:
        """Whether a failure is answered by continuing with fewer workers. ``goodbyes``: some worker has finished; what
        it did after its last step boundary must not be done twice.
        """
        return bool(self.stay) or (self.config.shrinks and not goodbyes)

    def expect(self, ranks: Sequence[int], now: float) -> None:
        if self.config.replaces and self.config.resize.replace_timeout_s:
            self.due.update(dict.fromkeys(ranks, now + self.config.resize.replace_timeout_s))

    def joined(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.due.pop(rank, None)

    def late(self, now: float) -> list[int]:
        return sorted(rank for rank, when in self.due.items() if when <= now)


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
