"""Evaluations that continue without failed workers: forwards alone, over the survivor group of the training steps.

Nothing of an evaluation lasts but its losses. So after a failure the survivors make it again with the same data. All
exchange the losses at its end, so whoever has them has them of all, and gives them to the others after a failure. Peers
keep the data of each pipeline as in a step (:mod:`shared_core.reroute.keeping`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shared_core.errors import SurvivorGroupBroken
from shared_core.faults import inject
from shared_core.reroute.keeping import NOTHING, DataAway, KeptPart, keepers, parts_of
from shared_core.reroute.messages import MessageChannel, MessageKey, MessageKind, Tensors
from shared_core.reroute.places import WorkerPlace
from shared_core.reroute.step import Item, Reader, StageModel
from shared_core.schedule.schedule import PlannedWorker, Topology

#: Losses by pipeline, then micro-batch.
Losses = list[list[float]]
_KINDS = {
    MessageKind.INPUTS: MessageKind.EVALUATION_INPUTS,
    MessageKind.LABELS: MessageKind.EVALUATION_LABELS,
}


class When(NamedTuple):
    """Which evaluation: the number of the step boundary before it, and its index after that boundary, from 0."""

    boundary: int
    number: int


def host_of(topology: Topology, failed: Collection[PlannedWorker], pipeline: int, stage: int) -> PlannedWorker:
    """Who computes the micro-batches of a pipeline at a stage: its own worker, else the next peer that is there."""
    peers = [PlannedWorker((pipeline + number) % topology.pipelines, stage) for number in range(topology.pipelines)]
    return next(peer for peer in peers if peer not in failed)


class Evaluating:
    def __init__(self, place: WorkerPlace, model: StageModel) -> None:
        self._place, self._model = place, model
        self._topology, self._me, self._rank = place.topology, place.me, place.places.rank
        self._parts = parts_of(place.topology)
        self._results: dict[When, Losses] = {}
        self._now, self._count = When(-1, 0), 0
        self._items: dict[tuple[int, int], Item] = {}
        self._held: dict[tuple[int, int], set[int]] = {}
        self._reader: Reader | None = None

    def begin(self, boundary: int, micro_batches: int, items: Sequence[Item], reader: Reader | None) -> None:
        """Name the next evaluation, after step boundary ``boundary``.

        ``items`` are of this worker's pipeline, empty but at its ends; ``reader`` is None where it cannot read others.
        """
        self._reader = reader
        self._now = When(boundary, self._now.number + 1 if self._now.boundary == boundary else 0)
        self._results = {when: losses for when, losses in self._results.items() if when.boundary >= boundary}
        self._count, self._held = micro_batches, {}
        self._items = {(self._me.pipeline, j): item for j, item in enumerate(items)}

    def known(self) -> Losses | None:
        """Losses of the evaluation that was begun; None if nobody has told them."""
        return self._results.get(self._now)

    def results(self, boundary: int) -> list[Losses]:
        """Of the evaluations since a step boundary, in order."""
        return [self._results[when] for when in sorted(self._results) if when.boundary == boundary]

    def adopt(self, boundary: int, results: Sequence[Losses]) -> None:
        """Take the evaluations that others had made since a step boundary when they admitted this replacement."""
        self._results.update({When(boundary, index): losses for index, losses in enumerate(results)})

    def view(self) -> dict[str, Any]:
        """What others are told after a failure; plain data, losses as hexadecimal text."""
        pipelines = range(self._topology.pipelines)
        return {
            "now": list(self._now),
            "data": [[d, int(part.kind)] for d in pipelines for part in self._parts if self._has_all(d, part)],
            "results": [[*when, [list(map(float.hex, row)) for row in rows]] for when, rows in self._results.items()],
        }

    def learn(self, views: Mapping[int, Any]) -> None:
        self._held = {}
        for rank, view in views.items():
            for boundary, index, rows in view["results"]:
                self._results.setdefault(When(boundary, index), [list(map(float.fromhex, row)) for row in rows])
            if When(*view["now"]) == self._now:
                for d, kind in view["data"]:
                    self._held.setdefault((d, kind), set()).add(rank)
        for (d, j), item in list(self._items.items()):  # what has come in part comes again
            kept = [item[part.number] if self._has_all(d, part) else None for part in self._parts]
            self._items[d, j] = kept[0], kept[1]

    def run(self, channel: MessageChannel, failed: Collection[PlannedWorker]) -> Losses:
        """Make the evaluation that was begun, unless others have made it.

        After SurvivorGroupBroken another call makes it again. DataAway: its data went with both ends of a pipeline.
        """
        if (known := self.known()) is not None:
            return known
        topology, stage = self._topology, self._me.stage
        pipelines = range(topology.pipelines)
        sources = {(d, part): self._source(failed, d, part) for d in pipelines for part in self._parts}
        if dark := {d for (d, _), source in sources.items() if source is None}:
            reads = channel.survivor_group.exchange(self._reader is not None)
            reader = min((rank for rank, can in reads.items() if can), default=None)
            if reader is None:
                raise DataAway
            sources = {place: reader if place[0] in dark else source for place, source in sources.items()}
            if self._reader is not None and reader == self._rank(self._me):
                self._items.update({(d, j): item for d in dark for j, item in enumerate(self._reader(d))})
        for (d, part), source in sources.items():
            if source == self._rank(self._me) and self._has_all(d, part):
                self._give(channel, failed, d, part)
        losses: dict[int, list[float]] = {}
        with torch.no_grad():
            for j in range(self._count):
                for d in pipelines:
                    if host_of(topology, failed, d, stage) == self._me:
                        self._forward(channel, failed, sources, d, j, losses)
        for (d, part), source in sources.items():
            if self._me in keepers(self._topology, failed, d, part.stage):
                for j in range(self._count):
                    self._get(channel, source, d, j, part)
        inject.point("reroute.evaluated")
        told = channel.survivor_group.exchange({str(d): list(map(float.hex, row)) for d, row in losses.items()})
        rows = {int(d): list(map(float.fromhex, row)) for mine in told.values() for d, row in mine.items()}
        self._results[self._now] = [rows[d] for d in pipelines]
        return self._results[self._now]

    def _forward(
        self,
        channel: MessageChannel,
        failed: Collection[PlannedWorker],
        sources: Mapping[tuple[int, KeptPart], int | None],
        d: int,
        j: int,
        losses: dict[int, list[float]],
    ) -> None:
        if channel.survivor_group.broken():
            raise SurvivorGroupBroken
        inject.point("reroute.evaluate")
        topology, stage, (first, last) = self._topology, self._me.stage, self._parts
        if stage == 0:
            inputs = self._get(channel, sources[d, first], d, j, first)
        else:
            before = self._rank(host_of(topology, failed, d, stage - 1))
            inputs = channel.fetch_described(self._key(MessageKind.EVALUATION, stage, d, j), before)
        labels = self._get(channel, sources[d, last], d, j, last) if self._place.last else None
        outputs = self._model.forward(inputs, labels, d, j)
        if self._place.last:
            losses.setdefault(d, []).append(float(outputs[1]))
        else:
            behind = self._rank(host_of(topology, failed, d, stage + 1))
            channel.send_described(self._key(MessageKind.EVALUATION, stage + 1, d, j), outputs, behind)

    def _give(self, channel: MessageChannel, failed: Collection[PlannedWorker], d: int, part: KeptPart) -> None:
        having = {self._rank(self._me)} | self._held.get((d, part.kind), set())
        for rank in sorted({self._rank(taker) for taker in keepers(self._topology, failed, d, part.stage)} - having):
            for j in range(self._count):
                tensors = self._items[d, j][part.number]
                channel.send_described(self._key(part.kind, part.stage, d, j), tensors or (), rank)

    def _get(self, channel: MessageChannel, source: int | None, d: int, j: int, part: KeptPart) -> Tensors:
        item = self._items.get((d, j), NOTHING)
        known = item[part.number]
        if known is None:
            assert source is not None
            known = channel.fetch_described(self._key(part.kind, part.stage, d, j), source)
            self._items[d, j] = (item[0], known) if part.number else (known, item[1])
        return known

    def _source(self, failed: Collection[PlannedWorker], d: int, part: KeptPart) -> int | None:
        for end in (part.stage, self._topology.stages - 1 - part.stage):
            if PlannedWorker(d, end) not in failed:
                return self._rank(PlannedWorker(d, end))
        return min(self._held.get((d, part.kind), ()), default=None)

    def _has_all(self, d: int, part: KeptPart) -> bool:
        there = [self._items.get((d, j), NOTHING)[part.number] for j in range(self._count)]
        return bool(there) and all(tensors is not None for tensors in there)

    def _key(self, kind: MessageKind, stage: int, d: int, j: int) -> MessageKey:
        # Messages of the same tag come in the order in which they were sent.
        return MessageKey(0, _KINDS.get(kind, kind), stage, d, j % self._topology.micro_batches)
