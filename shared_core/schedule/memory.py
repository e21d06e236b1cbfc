"""How many micro-batches a worker can hold, and holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shared_core.errors import ConfigError
from shared_core.schedule.schedule import Action, Kind, PlannedWorker, Topology


@dataclass(frozen=True)
class Memory:
    """How many micro-batches a worker can hold at once.

    Attributes:
        micro_batches: at every worker; None is no limit.
        workers: of workers that differ.
    """

    micro_batches: float | None = None
    workers: Mapping[PlannedWorker, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for limit in (self.micro_batches, *self.workers.values()):
            if limit is not None and not limit >= 1:
                raise ConfigError(f"a worker must be able to hold at least 1 micro-batch, got {limit!r}")

    def at(self, worker: PlannedWorker) -> float:
        """The limit of a worker."""
        limit = self.workers.get(worker, self.micro_batches)
        return math.inf if limit is None else limit

    @classmethod
    def of_stages(cls, topology: Topology, room: Sequence[float]) -> Memory:
        """The same limit for all workers of a stage; no entries are no limits."""
        return cls(workers={worker: room[worker.stage] for worker in topology.workers()} if room else {})


NO_LIMIT = Memory()


def held_after(done: Collection[Action]) -> float:
    """How many micro-batches a worker holds that has executed these actions: activations stay until W."""
    change = {Kind.F: 1.0, Kind.I: 0.0, Kind.W: -1.0, Kind.B: -1.0, Kind.OPT: 0.0}
    return sum(change[action.kind] for action in done)
