"""The data of pipelines at more workers than draw them, so that a step outlives both ends of a pipeline.

Only the first and the last stage of a pipeline draw its data. In each step the first stage sends the inputs, and the
last one the labels, to its peers, which *keep* them until the step is over. A peer has all that it keeps before its
last forward, and no stage has its sum of gradients before all forwards are made: so once anything of a step is final,
every worker of these stages has its data. Whoever computes for a failed worker has its data in the same way.

Where those that draw can read other pipelines' data, too, nobody keeps any. One of them reads the data of a pipeline
whose two ends have failed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import count
from typing import Any, NamedTuple

from shared_core.errors import RecoveryFailed, Unsupported
from shared_core.reroute.history import StepPlan
from shared_core.reroute.messages import MessageChannel, MessageKey, MessageKind, Tensors
from shared_core.reroute.places import WorkerPlace
from shared_core.reroute.step import Item, Step
from shared_core.schedule.schedule import Action, Kind, PlannedWorker, Topology

#: What is known of a micro-batch before anything has come.
NOTHING: Item = (None, None)


class DataAway(Exception):
    """Both ends of a pipeline failed before anybody else had the data of a step: a replacement has to draw them."""


class KeptPart(NamedTuple):
    """Half of a micro-batch's data: what carries it, the stage that computes with it, its index in an :data:`Item`."""

    kind: MessageKind
    stage: int
    number: int


def parts_of(topology: Topology) -> tuple[KeptPart, KeptPart]:
    return KeptPart(MessageKind.INPUTS, 0, 0), KeptPart(MessageKind.LABELS, topology.stages - 1, 1)


def keepers(topology: Topology, failed: Collection[PlannedWorker], pipeline: int, stage: int) -> list[PlannedWorker]:
    """Who gets the data of a pipeline for one of its ends besides the worker at that end: all peers that are there.

    Fewer would do for one failure. But workers of a machine fail together, and then nobody could make a step again
    whose sum a stage has already.
    """
    peers = [PlannedWorker((pipeline + number) % topology.pipelines, stage) for number in range(1, topology.pipelines)]
    return [peer for peer in peers if peer not in failed]


def first_without_data(
    topology: Topology, failed: Collection[PlannedWorker], held: Mapping[int, Collection[tuple[int, int]]], first: int
) -> int | None:
    """The first step from ``first`` on that lacks data of a pipeline whose ends failed; None if there is none.

    ``held`` has, by step, (pipeline, kind of message) of all data that somebody has.
    """
    parts, last = parts_of(topology), topology.stages - 1
    dark = [d for d in range(topology.pipelines) if {PlannedWorker(d, 0), PlannedWorker(d, last)} <= set(failed)]
    if not dark:
        return None
    needed = {(d, int(part.kind)) for d in dark for part in parts}
    return next(number for number in count(first) if not needed <= set(held.get(number, ())))


def readers_of(views: Mapping[int, Any]) -> list[int]:
    """Ranks that can read the data of any pipeline, from what all have told."""
    return sorted(rank for rank, view in views.items() if view["reads"])


def data_until(topology: Topology, gone: frozenset[PlannedWorker], views: Mapping[int, Any]) -> int | None:
    """The first step whose data are missing, from what all have told; None if there is none.

    Raises RecoveryFailed if a worker has already summed gradients of that step.
    """
    if readers_of(views):
        return None
    held: dict[int, set[tuple[int, int]]] = {}
    for view in views.values():
        for number, facts in view["steps"].items():
            held.setdefault(int(number), set()).update((d, kind) for d, kind in facts["data"])
    oldest = min(view["at"][0] for view in views.values())
    until = first_without_data(topology, gone, held, oldest)
    for rank, view in views.items():
        reduced = view["steps"].get(str(until), {}).get("reduced")
        if until is not None and (view["at"][0] > until or reduced):
            raise RecoveryFailed(
                f"the data of step {until} are lost, with the first and the last stage of a pipeline and all that "
                f"kept copies, but rank {rank} has already summed gradients of that step"
            )
    return until


class Keeping:
    _channel: MessageChannel

    def __init__(self, place: WorkerPlace) -> None:
        self._topology, self._me, self._rank = place.topology, place.me, place.places.rank
        self._places = place.places
        self._parts = parts_of(place.topology)
        self._held: dict[tuple[int, int, int], set[int]] = {}
        self._readers: list[int] = []

    def held(self, step: Step) -> list[list[int]]:
        """(pipeline, kind of message) of the data of a step that this worker has; plain data."""
        pipelines = range(self._topology.pipelines)
        return [[d, int(part.kind)] for d in pipelines for part in self._parts if self._has_all(step, d, part)]

    def connect(self, channel: MessageChannel, steps: Mapping[int, Step], views: Mapping[int, Any]) -> None:
        """Use a new survivor group; ``views`` has :meth:`held` of each step, and who can read, by rank."""
        self._channel, self._held, self._readers = channel, {}, readers_of(views)
        for rank, view in views.items():
            for number, facts in view["steps"].items():
                for d, kind in facts["data"]:
                    self._held.setdefault((int(number), d, kind), set()).add(rank)
        for step in steps.values():  # what has come in part comes again
            for d, part in ((d, part) for d in range(self._topology.pipelines) for part in self._parts):
                if not self._has_all(step, d, part):
                    for j in range(self._topology.micro_batches):
                        self._put(step, (d, j), part, None)

    def give(self, step: Step, plan: StepPlan) -> None:
        """Send what this worker owes of a step, once on each survivor group, and begin to receive what it keeps."""
        me = self._rank(self._me)
        for d in range(self._topology.pipelines):
            for part in self._parts:
                source, there = self._source(step, plan, d, part), self._takers(plan, d, part)
                if source == me and not self._has_all(step, d, part):
                    self._read(step, d)
                if source == me:
                    # Who has moved may be one of the keepers of what it has drawn itself.
                    having = {me} | self._held.get((step.number, d, part.kind), set())
                    for rank in sorted({self._rank(taker) for taker in there} - having):
                        for j in range(self._topology.micro_batches):
                            self._channel.send_shaped(
                                self._key(step, d, j, part), step.items[d, j][part.number] or (), rank
                            )
                elif source is not None and self._me in there and not self._has_all(step, d, part):
                    for j in range(self._topology.micro_batches):
                        self._channel.post(self._key(step, d, j, part), source)

    def complete(self, step: Step, plan: StepPlan) -> None:
        """Before the last forward of a row: wait for all that is to be kept."""
        row = plan.plan.schedule.rows[self._me]
        if sum(action.kind is Kind.F for action in row[step.at :]) > 1:
            return
        for d in range(self._topology.pipelines):
            for part in self._parts:
                if self._me in self._takers(plan, d, part):
                    for j in range(self._topology.micro_batches):
                        self._get(step, plan, (d, j), part)

    def inputs(self, step: Step, plan: StepPlan, action: Action) -> Tensors:
        """Wait for the data that the first stage computes with. Raises SurvivorGroupBroken after a failure."""
        return self._get(step, plan, (action.pipeline, action.micro_batch), self._parts[0])

    def labels(self, step: Step, plan: StepPlan, action: Action) -> Tensors:
        """Wait for the data that the last stage computes with. Raises SurvivorGroupBroken after a failure."""
        return self._get(step, plan, (action.pipeline, action.micro_batch), self._parts[1])

    def _get(self, step: Step, plan: StepPlan, place: tuple[int, int], part: KeptPart) -> Tensors:
        known = step.items.get(place, NOTHING)[part.number]
        if known is not None:
            return known
        source = self._source(step, plan, place[0], part)
        assert source is not None
        known = self._channel.fetch(self._key(step, *place, part), source)
        self._put(step, place, part, known)
        return known

    def _source(self, step: Step, plan: StepPlan, d: int, part: KeptPart) -> int | None:
        """Rank that sends a part of the data: an end of the pipeline, else the lowest one that has or can read it."""
        last, gone = self._topology.stages - 1, self._places.gone(plan.plan.failed)
        for end in (part.stage, last - part.stage):
            if PlannedWorker(d, end) not in gone:  # it has drawn them, wherever it computes
                return self._places.home_rank(PlannedWorker(d, end))
        return min(self._held.get((step.number, d, part.kind)) or self._readers, default=None)

    def _read(self, step: Step, d: int) -> None:
        """Read the data of a pipeline that nobody has drawn; all count on this worker for them."""
        if step.reader is None:
            raise Unsupported(
                f"pipeline {d} has lost its first and its last stage, and the data of step {step.number} are no "
                "SharedData, as those of a step before were: give the engine SharedData in every step, or in none"
            )
        for j, item in enumerate(step.reader(d)):
            step.items[d, j] = item

    def _takers(self, plan: StepPlan, d: int, part: KeptPart) -> list[PlannedWorker]:
        """Who still needs a part in the step: all keepers, or with readers only those that compute with it."""
        hosts = {plan.plan.host(d, part.stage, j) for j in range(self._topology.micro_batches)}
        peers = keepers(self._topology, plan.plan.failed, d, part.stage)
        found = [peer for peer in peers if not self._readers or peer in hosts]
        own = PlannedWorker(d, part.stage)
        if any(move.target == own for move in self._places.moves):
            found.append(own)  # who computes there has drawn the data of another pipeline
        return [worker for worker in found if plan.plan.schedule.rows.get(worker)]

    def _key(self, step: Step, d: int, j: int, part: KeptPart) -> MessageKey:
        return MessageKey(step.number, part.kind, part.stage, d, j)

    def _has_all(self, step: Step, d: int, part: KeptPart) -> bool:
        there = [step.items.get((d, j), NOTHING)[part.number] for j in range(self._topology.micro_batches)]
        return all(tensors is not None for tensors in there)

    def _put(self, step: Step, place: tuple[int, int], part: KeptPart, tensors: Tensors | None) -> None:
        inputs, labels = step.items.get(place, NOTHING)
        step.items[place] = (inputs, tensors) if part.number else (tensors, labels)
