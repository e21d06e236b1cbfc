"""Runs the actions of one worker in the order of a plan: its forwards and backwards, with their messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from shared_core.errors import SurvivorGroupBroken
from shared_core.faults import inject
from shared_core.reroute.finishing import Finishing
from shared_core.reroute.former import FormerParameters
from shared_core.reroute.history import StepPlan
from shared_core.reroute.keeping import Keeping
from shared_core.reroute.measuring import Measuring
from shared_core.reroute.messages import MessageChannel, MessageKey, MessageKind, Tensors
from shared_core.reroute.places import WorkerPlace
from shared_core.reroute.split import StageBackward
from shared_core.reroute.step import (
    Accumulating,
    StageModel,
    Step,
    StepOptions,
    detached,
    differentiable,
    leaves_of,
)
from shared_core.schedule.schedule import Action, Kind, PlannedWorker

#: Messages that a worker begins to receive before it needs them.
_PREFETCHED = 3
_POINTS = {
    Kind.F: "reroute.forward",
    Kind.B: "reroute.backward",
    Kind.I: "reroute.backward_input",
    Kind.W: "reroute.backward_weight",
    Kind.OPT: "reroute.reduce",
}


class RowRunner:
    """Runs the rows of plans at one worker; see :class:`~shared_core.reroute.executor.Executor` for ``noted``."""

    _channel: MessageChannel

    def __init__(
        self,
        place: WorkerPlace,
        model: StageModel,
        former: FormerParameters,
        options: StepOptions,
        finishing: Finishing,
        keeping: Keeping,
        measuring: Measuring,
        noted: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._place, self._model = place, model
        self._topology, self._me, self._rank = place.topology, place.me, place.rank_of
        self._options, self._finishing, self._measuring, self._noted = options, finishing, measuring, noted
        self._former, self._keeping, self._last = former, keeping, place.last
        self._watched = False

    def connect(self, channel: MessageChannel) -> None:
        """Use a new survivor group; after it, the first forward for another worker is noted."""
        self._channel, self._watched = channel, True

    def run(self, step: Step, plan: StepPlan) -> None:
        """Run what is left of this worker's row; after SurvivorGroupBroken another call continues."""
        row = plan.plan.schedule.rows[self._me]
        self._finishing.tell_losses(step, row)
        while step.at < len(row):
            if self._channel.survivor_group.broken():
                raise SurvivorGroupBroken
            self._keeping.complete(step, plan)
            action = row[step.at]
            for coming in row[step.at : step.at + _PREFETCHED]:
                self._post(step, plan, coming)
            inject.point("reroute.action")
            inject.point(_POINTS[action.kind])
            made = self._act(step, plan, action)
            step.at += 1
            if made is not None:
                self.deliver(plan, made, step.made[made])  # it is done, also if a failure comes before it is sent
            self._finishing.tell_losses(step, row)

    def _act(self, step: Step, plan: StepPlan, action: Action) -> MessageKey | None:
        """Run one action: all waits come before any change. Returns the key of the message that it made, if any."""
        if action.kind is Kind.OPT:
            self._finishing.reduce(step, plan)
            return None
        place = (action.pipeline, action.micro_batch)
        if action.kind is Kind.F:
            inputs, labels = self._inputs(step, plan, action), self._labels(step, plan, action)
            if self._watched and action.pipeline != self._me.pipeline:
                self._watched = False
                self._noted("took_over", {"step": step.number, "action": str(action)})
            began = time.perf_counter()
            leaves = leaves_of(inputs, first=action.stage == 0)
            with self._as_of(step):
                outputs = self._model.forward(leaves, labels, *place, step.number)
            ends = differentiable(outputs, self._last)
            step.records[place] = StageBackward(ends, leaves, apart=self._options.ordered), outputs
            self._measuring.add(step.number, Kind.F, began)
            self._measuring.measure_held(step.number, leaves, outputs, self._model.parameters)
            if self._last:
                step.losses[place], step.loss_type = float(outputs[1].detach()), outputs[1].dtype
                return None
            return self._keep(step, action, MessageKind.ACTIVATION, detached(outputs))
        if action.kind is Kind.W:
            self._backward_weight(step, action)
            return None
        record, outputs = step.records[place]
        gradients = None if self._last else self._gradients(step, plan, action, outputs)
        self._finishing.tell_read(step, plan)
        whole, began = action.kind is Kind.B, time.perf_counter()
        halves = whole and self._measuring.takes_halves(step.number) and (action.micro_batch + step.number) % 2 == 1
        with self._as_of(step), self._accumulating(step, action.pipeline):
            found = record.backward(gradients) if whole and not halves else record.backward_input(gradients)
        if whole and not halves:
            del step.records[place]
        else:
            step.records[place] = record, ()
        self._measuring.add(step.number, Kind.I if halves else action.kind, began)
        if halves:
            self._backward_weight(step, action)
        if action.stage == 0:
            return None
        return self._keep(step, action, MessageKind.GRADIENT, tuple(g for g in found if g is not None))

    def _backward_weight(self, step: Step, action: Action) -> None:
        began = time.perf_counter()
        record, _ = step.records.pop((action.pipeline, action.micro_batch))
        with self._as_of(step), self._accumulating(step, action.pipeline):
            record.backward_weight()
        self._measuring.add(step.number, Kind.W, began)

    def _as_of(self, step: Step) -> AbstractContextManager[None]:
        """Inside, the layers compute as in this step, also if this stage has made its update already."""
        return nullcontext() if step.reduced is None else self._former.of(step)

    def _accumulating(self, step: Step, home: int) -> Accumulating:
        sums = step.sums if step.reduced is None else {}  # the sum has these gradients
        return Accumulating(self._model, sums, home if self._options.ordered else -1)

    # -- messages ----------------------------------------------------------------------------------

    def _key(self, step: Step, what: MessageKind, stage: int, action: Action) -> MessageKey:
        return MessageKey(step.number, what, stage, action.pipeline, action.micro_batch)

    def _source(self, plan: StepPlan, action: Action, stage: int) -> PlannedWorker:
        return plan.plan.host(action.pipeline, stage, action.micro_batch)

    def _post(self, step: Step, plan: StepPlan, action: Action) -> None:
        """Begin to receive what an action needs, if its shape is known."""
        if action.kind is Kind.F and action.stage > 0:
            source = self._source(plan, action, action.stage - 1)
            self._channel.post(self._key(step, MessageKind.ACTIVATION, action.stage, action), self._rank(source))
        elif action.kind in (Kind.B, Kind.I) and not self._last:
            record = step.records.get((action.pipeline, action.micro_batch))
            if record is not None:
                source = self._source(plan, action, action.stage + 1)
                key = self._key(step, MessageKind.GRADIENT, action.stage, action)
                self._channel.post_like(key, differentiable(record[1], False), self._rank(source))

    def _inputs(self, step: Step, plan: StepPlan, action: Action) -> Tensors:
        if action.stage == 0:
            return self._keeping.inputs(step, plan, action)
        source = self._source(plan, action, action.stage - 1)
        return self._channel.fetch(self._key(step, MessageKind.ACTIVATION, action.stage, action), self._rank(source))

    def _labels(self, step: Step, plan: StepPlan, action: Action) -> Tensors | None:
        return self._keeping.labels(step, plan, action) if self._last else None

    def _gradients(self, step: Step, plan: StepPlan, action: Action, outputs: Tensors) -> Tensors:
        source = self._source(plan, action, action.stage + 1)
        key = self._key(step, MessageKind.GRADIENT, action.stage, action)
        return self._channel.fetch_like(key, differentiable(outputs, False), self._rank(source))

    def _keep(self, step: Step, action: Action, what: MessageKind, parts: Tensors) -> MessageKey:
        stage = action.stage + (1 if what is MessageKind.ACTIVATION else -1)
        key = self._key(step, what, stage, action)
        step.made[key] = parts
        return key

    def deliver(self, plan: StepPlan, key: MessageKey, parts: Tensors) -> None:
        """Send a message to whoever has the action in its row that reads it."""
        kind = Kind.F if key.kind is MessageKind.ACTIVATION else Kind.B
        reader = plan.awaits(Action(key.stage, kind, key.micro_batch, key.pipeline))
        if reader is None:
            return
        if key.kind is MessageKind.ACTIVATION:
            self._channel.send_shaped(key, parts, self._rank(reader))
        else:
            self._channel.send(key, parts, self._rank(reader))
