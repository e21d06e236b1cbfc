"""Who computes the micro-batches of a failed worker: its data-parallel peers, which hold the same parameters."""

from __future__ import annotations

from collections.abc import Collection

from shared_core.errors import ConfigError
from shared_core.schedule.schedule import PlannedWorker, Topology
from shared_core.schedule.timing import EQUAL_SLOTS, StageTimes, Times

#: Who computes a micro-batch: (home pipeline, stage, micro-batch) to the worker.
Route = dict[tuple[int, int, int], PlannedWorker]


def survivors(topology: Topology, failed: Collection[PlannedWorker]) -> list[list[int]]:
    """Pipelines that still have a worker, for every stage; ConfigError where a stage has none."""
    for worker in failed:
        if not (0 <= worker.pipeline < topology.pipelines and 0 <= worker.stage < topology.stages):
            raise ConfigError(
                f"failed worker {worker.pipeline}:{worker.stage} does not exist: there are "
                f"{topology.pipelines} pipelines of {topology.stages} stages, counted from 0"
            )
    gone = set(failed)
    alive = [[d for d in range(topology.pipelines) if PlannedWorker(d, s) not in gone] for s in range(topology.stages)]
    for stage, pipelines in enumerate(alive):
        if not pipelines:
            raise ConfigError(
                f"all {topology.pipelines} workers of stage {stage} failed: nobody holds its parameters; wait for a "
                "replacement or restart from a checkpoint"
            )
    return alive


def deal(
    topology: Topology, failed: Collection[PlannedWorker], *, times: Times = EQUAL_SLOTS, ordered: bool = False
) -> Route:
    """Deal every micro-batch of a failed worker out to the peer that would finish first, all its work counted.

    ``ordered``, all of a failed worker to one peer. Peers that are equally fast take turns, over all failures of
    a stage.
    """
    alive = survivors(topology, failed)
    route: Route = {}
    for stage, peers in enumerate(alive):
        gone = sorted(worker.pipeline for worker in set(failed) if worker.stage == stage)
        # In order, the next pipeline takes all: that spreads failures of several stages over the pipelines.
        first = next((i for i, peer in enumerate(peers) if peer > gone[0]), 0) if ordered and gone else 0
        turns = [PlannedWorker(peer, stage) for peer in (*peers[first:], *peers[:first])]
        takes = {peer: _micro_batch(times.at(peer)) for peer in turns}
        count = dict.fromkeys(turns, topology.micro_batches)
        size = topology.micro_batches if ordered else 1
        for d in gone:
            for j in range(topology.micro_batches):
                if j % size == 0:
                    host = min(turns, key=lambda peer: (count[peer] + size) * takes[peer])
                    count[host] += size
                route[d, stage, j] = host
    return route


def _micro_batch(times: StageTimes) -> float:
    return times.forward + times.backward_input + times.backward_weight
