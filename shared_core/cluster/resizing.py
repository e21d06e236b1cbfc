"""When the number of workers changes: decisions of the agent, without acting on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared_core.cluster.worker import Resized
from shared_core.config import SwiftConfig


@dataclass
class Resizing:
    """The number of workers: what it is to be, and the change under way.

    Attributes:
        config: the job's options.
        full: workers that there are places for.
        stay: ranks that hand over in the change under way; empty while there is none.
        target: number of workers after it.
        grow_at: ``time.monotonic()`` when empty places are filled again; None if not at all.
        due: until when the newcomer of a rank has to have joined.
        line: what the present workers went on from, when their number last changed.
    """

    config: SwiftConfig
    full: int
    stay: tuple[int, ...] = ()
    target: int = 0
    grow_at: float | None = None
    due: dict[int, float] = field(default_factory=dict)
    line: Resized | None = None

    def begin(self, stay: Iterable[int], target: int) -> None:
        """A change begins, or begins anew with other survivors."""
        self.stay, self.target = tuple(sorted(stay)), target
        self.grow_at = None
        self.due.clear()

    def end(self) -> None:
        """There is no change under way any more."""
        self.stay = ()

    def done(self, now: float, workers: int, line: Resized | None) -> None:
        """The workers that follow are being started."""
        self.end()
        self.due.clear()
        self.line = line
        self.schedule(now, workers)

    def schedule(self, now: float, workers: int) -> None:
        """See when empty places are to be filled."""
        wait = self.config.grow_after_s
        self.grow_at = now + wait if workers < self.full and wait > 0 else None

    def shrinks(self, goodbyes: bool) -> bool:
        """Whether a loss is answered by going on with fewer.

        Args:
            goodbyes: some worker has finished: what it did after its last batch top must not be done twice.
        """
        return bool(self.stay) or (self.config.on_failure == "shrink" and not goodbyes)

    def expect(self, ranks: Sequence[int], now: float) -> None:
        """Newcomers of these ranks are started."""
        if self.config.on_failure == "replace" and self.config.replace_timeout_s:
            self.due.update(dict.fromkeys(ranks, now + self.config.replace_timeout_s))

    def late(self, now: float) -> list[int]:
        """Ranks whose newcomers have not joined in time."""
        return sorted(rank for rank, when in self.due.items() if when <= now)
