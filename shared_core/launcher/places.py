"""The places of this machine's workers in the job."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec


@dataclass(frozen=True)
class WorkerPlaces:
    """The workers of this machine in one attempt. All machines have the same number.

    Attributes:
        machine: place of this machine, from 0.
        workers: torchelastic's, by local rank; empty before there is a place.
    """

    spec: WorkerSpec
    machine: int = 0
    machines: int = 1
    workers: tuple[Worker, ...] = ()

    @classmethod
    def of(cls, spec: WorkerSpec, machine: int, machines: int, local: int) -> WorkerPlaces:
        first, world = machine * local, machines * local
        workers = tuple(Worker(i, first + i, first + i, world, world) for i in range(local))
        return cls(spec, machine, machines, workers)

    @property
    def ranks(self) -> list[int]:
        return [worker.global_rank for worker in self.workers]

    @property
    def world_size(self) -> int:
        """Workers of all machines. Needs a place."""
        return int(self.workers[0].world_size)

    @property
    def speaks(self) -> bool:
        """Whether this machine's agent is the one that prints what concerns all machines."""
        return self.machine == 0

    def local_rank(self, rank: int) -> int:
        """Place of a rank on this machine; 0 for one of another machine."""
        return self.ranks.index(rank) if rank in self.ranks else 0
