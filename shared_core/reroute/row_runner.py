"""The steps of one worker: forwards and backwards in the order of a plan, with their messages, and the end of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import SurvivorGroupBroken
from shared_core.faults import inject
from shared_core.reroute.history import PlanHistory, StepPlan
from shared_core.reroute.keeping import Keeping
from shared_core.reroute.messages import DTYPES, MessageChannel, MessageKey, MessageKind, Tensors
from shared_core.reroute.places import WorkerPlace
from shared_core.reroute.reports import Measuring, Word
from shared_core.reroute.split import StageBackward
from shared_core.reroute.step import (
    FormerParameters,
    StageModel,
    Step,
    StepOptions,
    StepResult,
    Tied,
    accumulating,
    detached,
    differentiable,
    leaves_of,
    merge,
    table_of,
)
from shared_core.reroute.summing import flatten, hand_over, reduce_in_order
from shared_core.schedule.schedule import Action, Kind, PlannedWorker

# -- the end of a step: the sum of gradients, the update, and the losses that all are told ----------------------------


#: Values before the losses in their message: the survivor group that admits, the losses' dtype, a word about times.
_FLAGS = 3


class Finishing:
    """Ends steps. ``steps`` is the caller's own mapping; ``joining_ranks`` is asked at one worker only."""

    channel: MessageChannel

    def __init__(
        self,
        place: WorkerPlace,
        model: StageModel,
        former: FormerParameters,
        history: PlanHistory,
        steps: Mapping[int, Step],
        joining_ranks: Callable[[], bool],
        options: StepOptions,
        measuring: Measuring,
    ) -> None:
        self._place, self._model, self._former = place, model, former
        self._topology, self._me, self._rank = place.topology, place.me, place.places.rank
        self._history, self._steps, self._joining_ranks = history, steps, joining_ranks
        self._options, self._measuring = options, measuring
        self._last = place.last
        self._told: set[tuple[int, str]] = set()
        self._heard: set[tuple[int, PlannedWorker]] = set()

    def connect(self, channel: MessageChannel) -> None:
        """Use a new survivor group: what was told over the one before may not have come."""
        self.channel, self._told, self._heard = channel, set(), set()

    def forget_before(self, number: int) -> None:
        self._told = {(step, what) for step, what in self._told if step >= number}
        self._heard = {(step, who) for step, who in self._heard if step >= number}

    def norm_is_known(self, number: int, stage: int) -> None:
        """All have the norm of this stage and step: it need not be told."""
        self._told.add((number, f"norm {stage}"))

    def _peers(self, stages: Collection[int]) -> dict[PlannedWorker, int]:
        workers = [worker for worker in self._topology.workers() if worker.stage in stages]
        return {worker: self._rank(worker) for worker in workers if worker not in self._history.failed}

    def tell_read(self, step: Step, plan: StepPlan) -> None:
        """With the last gradient of the step: tell those that wait for it. See :meth:`_await_read`."""
        d, s = self._me
        if self._last or any(_goes_back(one) for one in plan.plan.schedule.rows[self._me][step.at + 1 :]):
            return
        for worker, row in plan.plan.schedule.rows.items():
            if worker.stage == s + 1 and any(one.kind is Kind.OPT for one in row):
                self.channel.send(MessageKey(step.number, MessageKind.READ, s, d), [torch.zeros(1)], self._rank(worker))

    def _await_read(self, step: Step, plan: StepPlan) -> None:
        """Wait until the stage before has all gradients of this one, which so seldom have to be made again.

        It costs nothing: the stage before sends nothing of the next step earlier.
        """
        for worker, row in plan.plan.schedule.rows.items():
            if worker.stage == self._me.stage - 1 and any(map(_goes_back, row)):
                key = MessageKey(step.number, MessageKind.READ, worker.stage, worker.pipeline)
                self.channel.fetch_like(key, [torch.zeros(1)], self._rank(worker))

    def reduce(self, step: Step, plan: StepPlan) -> None:
        """Sum the gradients of this stage over the pipelines into ``step.reduced``."""
        self._await_read(step, plan)
        if step.reduced is not None:
            return
        began, tied = time.perf_counter(), self._model.tied
        common = {index for each in tied for index in each.parameters}
        own = [index for index in range(len(self._model.parameters)) if index not in common]
        reduced = self._add_up(step, plan, (self._me.stage,), own, 0)
        # Who has the sum can do without the others, so it has their losses, too.
        for worker in self._tails() if self._last else ():
            self._hear(step, worker)
        reduce_s = time.perf_counter() - began
        if tied:
            parts = dict(zip(own, self._cut(reduced, own), strict=True))
            for each in tied:
                if each.number in step.tied:
                    flat = step.tied[each.number]
                else:
                    flat = self._add_up(step, plan, each.stages, each.parameters, each.number)
                parts.update(zip(each.parameters, self._cut(flat, each.parameters), strict=True))
            reduced = torch.cat([parts[index] for index in sorted(parts)])
        step.reduced, step.reduce_s = reduced, reduce_s
        if self._me == min(self._peers((self._me.stage,))):
            self.feed(step, [move.source for move in self._place.places.moves])

    def _add_up(self, step: Step, plan: StepPlan, stages: Sequence[int], indices: Sequence[int], group: int) -> Tensor:
        """Sum of the gradients of these parameters over the pipelines, and over the stages that have them; flat."""
        peers, pipelines = self._peers(stages), self._topology.pipelines
        if self._options.ordered:
            holders = {PlannedWorker(d, s): plan.plan.host(d, s, 0) for s in stages for d in range(pipelines)}
        else:
            holders = {peer: peer for peer in peers}
        parameters = [self._model.parameters[index] for index in indices]
        none: list[Tensor | None] = [None] * len(self._model.parameters)
        mine = {}
        for home in [home for home, holder in holders.items() if holder == self._me]:
            gradients = step.sums.get(home.pipeline if self._options.ordered else -1, none)
            mine[home] = flatten([gradients[index] for index in indices], parameters, self._model.accumulates)
        return reduce_in_order(self.channel, step.number, group, self._me, holders, mine, peers, self._options.rule)

    def feed(self, step: Step, moved: Sequence[PlannedWorker]) -> None:
        """Send the sum to workers of this stage that compute elsewhere; ``moved`` are the places they belong to."""
        assert step.reduced is not None
        for source in moved:
            if source.stage == self._me.stage:
                key = MessageKey(step.number, MessageKind.FOLLOW, source.stage, source.pipeline)
                self.channel.send(key, [step.reduced], self._place.places.home_rank(source))

    def _cut(self, flat: Tensor, indices: Sequence[int]) -> list[Tensor]:
        return list(flat.split([self._model.parameters[index].numel() for index in indices]))

    def pass_on_sums(self, step: Step, having: set[int], waiting: set[int]) -> None:
        """After a failure: give this stage's sum to peers that lack it, and common parts to other stages.

        Sums that are made again need not have the same bits, and an update may have been made. ``having`` are the ranks
        that have the sum of their stage, ``waiting`` those in this step that lack it.
        """
        parameters, everything = self._model.parameters, tuple(range(len(self._model.parameters)))
        step.tied.clear()
        for each in (Tied(0, (self._me.stage,), everything), *self._model.tied):
            stages = [set(self._peers((stage,)).values()) for stage in each.stages]
            givers = having & set().union(*stages)
            lacking = [ranks for ranks in stages if each.number == 0 or having.isdisjoint(ranks)]
            takers = waiting & set().union(*lacking)
            if not givers or not takers:
                continue
            key, me = MessageKey(step.number, MessageKind.AGAIN, 0, 0, each.number), self._rank(self._me)
            held = None
            if me == min(givers):
                assert step.reduced is not None
                parts = self._cut(step.reduced, everything)
                held = torch.cat([parts[index] for index in each.parameters]) if each.number else step.reduced
            size = sum(parameters[index].numel() for index in each.parameters)
            dtype = self._model.accumulates or (parameters[0].dtype if parameters else torch.float32)
            like = torch.empty(size, dtype=dtype)
            flat = hand_over(self.channel, key, me, min(givers), takers, held, like)
            if flat is None:
                continue
            if each.number:
                step.tied[each.number] = flat
            else:
                step.reduced = flat

    def finish(self, step: Step) -> None:
        """Make the update and gather the losses; after SurvivorGroupBroken another call continues."""
        assert step.reduced is not None
        if not step.updated:
            self._model.set_gradients(step.reduced)
            step.norms[self._me.stage] = self._model.norm()
            self._tell_norm(step)
            if not (self._may_be_hasty(step) and self._clip(step) == 1.0):
                self._await_norms(step)
                step.verdict = self._clip(step)
            inject.point("reroute.step")
            step.tentative, began = step.verdict is None, time.perf_counter()
            self._former.keep(step)
            self._model.update(1.0 if step.verdict is None else step.verdict, step.tentative)
            self._measuring.add(step.number, Kind.OPT, began - step.reduce_s)
            step.updated = True
            step.sums.clear()
        self._gather_result(step)
        self._validate(step)

    def _clip(self, step: Step) -> float:
        """The factor of the gradients, from the norms that are known."""
        return self._model.clip([step.norms.get(stage) for stage in range(self._topology.stages)])

    def _may_be_hasty(self, step: Step) -> bool:
        """Whether to update before all norms are known: the step before clipped nothing."""
        if self._options.synchronous or step.norms[self._me.stage] is None:
            return False
        before = self._steps.get(step.number - 1)
        return before is not None and before.verdict == 1.0

    def _validate(self, step: Step) -> None:
        """Correct the update, if it was made before all norms were known, before the caller sees it."""
        if step.verdict is not None:
            return
        self._await_norms(step)
        verdict = self._clip(step)
        if verdict == 1.0:
            self._model.accept()
        else:
            assert step.reduced is not None
            self._model.set_gradients(step.reduced)
            self._model.update_again(verdict)
        step.verdict = verdict

    def _tell_norm(self, step: Step) -> None:
        """Tell the other stages this stage's norm, where updates must not be made, or not stay, without it."""
        stage = self._me.stage
        told = (step.number, f"norm {stage}") in self._told
        if told or self._me != min(self._peers((stage,))) or not self._needs_norms(step):
            return
        self._told.add((step.number, f"norm {stage}"))
        norm = step.norms[stage]
        value = torch.tensor([math.nan if norm is None else norm], dtype=torch.float64)
        for worker in self._topology.workers():
            if worker not in self._history.failed and worker.stage != stage:
                self.channel.send(MessageKey(step.number, MessageKind.NORM, stage, 0), [value], self._rank(worker))

    def _needs_norms(self, step: Step) -> bool:
        return self._options.synchronous or step.norms[self._me.stage] is not None

    def _await_norms(self, step: Step) -> None:
        if not self._needs_norms(step):
            return
        clips = step.norms[self._me.stage] is not None
        for other in range(self._topology.stages):
            if other in step.norms:
                continue
            key, like = MessageKey(step.number, MessageKind.NORM, other, 0), torch.empty(1, dtype=torch.float64)
            (value,) = self.channel.fetch_like(key, [like], self._rank(min(self._peers((other,)))))
            step.norms[other] = float(value) if clips else None

    def tell_losses(self, step: Step, row: Sequence[Action]) -> None:
        """At a last stage, after its last forward, long before its step ends: tell all others the losses."""
        told = (step.number, "losses") in self._told or step.result is not None
        if told or not self._last or any(action.kind is Kind.F for action in row[step.at :]):
            return
        self._told.add((step.number, "losses"))
        if self._me == self._tails()[0] and self._history.failed and self._joining_ranks():
            step.admit = self.channel.survivor_group.number
        word = self._measuring.word(step.number)
        head = [step.admit, DTYPES.index(step.loss_type), word]
        table = torch.cat([torch.tensor(head, dtype=torch.float64), table_of(step.losses, self._topology)])
        key = MessageKey(step.number, MessageKind.LOSSES, self._me.stage, self._me.pipeline)
        for worker in self._topology.workers():
            if worker not in self._history.failed and worker != self._me:
                if word is Word.SWITCH:
                    inject.point("reroute.switching")
                self.channel.send(key, [table], self._rank(worker))
        self._measuring.tell(step.number, word)

    def _tails(self) -> list[PlannedWorker]:
        return sorted(self._peers((self._topology.stages - 1,)))

    def _hear(self, step: Step, worker: PlannedWorker) -> None:
        if worker == self._me or step.result is not None or (step.number, worker) in self._heard:
            return
        like = torch.empty(_FLAGS + self._topology.pipelines * self._topology.micro_batches, dtype=torch.float64)
        key = MessageKey(step.number, MessageKind.LOSSES, worker.stage, worker.pipeline)
        (table,) = self.channel.fetch_like(key, [like], self._rank(worker))
        self._heard.add((step.number, worker))
        merge(step.losses, table[_FLAGS:], self._topology)
        step.loss_type = DTYPES[int(table[1])]
        if worker == self._tails()[0]:
            step.admit = int(table[0])
            self._measuring.hear(step.number, Word(int(table[2])))

    def _gather_result(self, step: Step) -> None:
        if step.result is not None:
            return
        for worker in self._tails():
            self._hear(step, worker)
        topology = self._topology
        rows = table_of(step.losses, topology).view(topology.pipelines, topology.micro_batches).tolist()
        step.result = StepResult(tuple(map(tuple, rows)), step.admit, step.loss_type)


def _goes_back(action: Action) -> bool:
    """Whether an action needs a gradient of the stage behind."""
    return action.kind in (Kind.B, Kind.I)


# -- the actions before it --------------------------------------------------------------------------------------------


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
        self._topology, self._me, self._rank = place.topology, place.me, place.places.rank
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
            inputs = self._inputs(step, plan, action)
            labels = self._keeping.labels(step, plan, action) if self._last else None
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

    def _accumulating(self, step: Step, home: int) -> AbstractContextManager[None]:
        sums = step.sums if step.reduced is None else {}  # the sum has these gradients
        return accumulating(self._model, sums, home if self._options.ordered else -1)

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
