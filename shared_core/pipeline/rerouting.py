"""DeepSpeed's engine on plans: while a worker is away, its data-parallel peers compute its micro-batches.

:class:`shared_core.reroute.executor.Executor` runs the engine's step instead of DeepSpeed's schedule; layers, loss,
clipping, optimizer and scheduler stay DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor, nn

from shared_core.errors import RecoveryFailed, SurvivorGroupBroken, Unsupported
from shared_core.events import console, console_once
from shared_core.job import Job
from shared_core.loaders.randomness import RawRandom, restore_raw
from shared_core.pipeline import compat
from shared_core.pipeline.hosted_stage import HostedStage, StageState, StageUpdates, set_gradients, square_sum
from shared_core.pipeline.instrumented_engine import InstrumentedEngine
from shared_core.pipeline.sharded import WholeOptimizer, is_sharded
from shared_core.pipeline.shared_data import SharedData
from shared_core.pipeline.stage import as_tuple, has_running_statistics
from shared_core.reroute.executor import Executor
from shared_core.reroute.keeping import DataAway
from shared_core.reroute.messages import Tensors
from shared_core.reroute.places import StagePlaces
from shared_core.reroute.planning import Plans
from shared_core.reroute.step import Reader, StageModel, StepOptions, StepResult, Tied
from shared_core.reroute.summing import GROUPS, SumRule, gloo_order
from shared_core.reroute.times import drift_line
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import PlannedWorker, Topology
from shared_core.worker.recovery.survivor_groups import WaitFor

#: Kind under which the result of the last step is kept for replacements that skip it.
_RESULT = "pipeline step"
#: The same of the evaluations since the step boundary.
_EVALUATIONS = "pipeline evaluations"
_HOOKED = (
    "the script has hooks on its optimizer, which would not run in another stage: so after losses no worker moves to "
    "another stage. reroute.normalise=false silences this line"
)


class Rerouting:
    """Runs the steps of one engine; ``whole`` is the optimizer, where DeepSpeed's shards it."""

    def __init__(self, engine: InstrumentedEngine, job: Job, whole: WholeOptimizer | None) -> None:
        refuse_rerouting(engine)
        self._engine, self._job, options = engine, job, job.config
        grid = engine.grid
        self._topology = Topology(grid.data_parallel_size, grid.pipe_parallel_size, int(engine.micro_batches))
        self._me = PlannedWorker(grid.get_data_parallel_rank(), grid.get_stage_id())
        variant, ordered = Variant(options.reroute.plan), options.reroute.reduction == "ordered"
        if whole is not None and variant is Variant.STAGGERED:
            variant = Variant.DECOUPLED  # no update can be made before all norms are known, nor taken back
        folder = job.env.job_dir / f"plans{job.env.restart}"
        ahead, held = options.reroute.ahead, options.reroute.held_micro_batches
        self._plans = Plans(self._topology, variant, ordered, folder, ahead, held)
        #: Number of the step boundary before the last step; -1 before the first.
        self._stepped_at = -1
        self._prepared: tuple[frozenset[PlannedWorker], int] = (frozenset(), -1)
        self._layers = _Layers(engine, job, whole)
        self._places = StagePlaces(self._topology, self._rank)
        self._executor = Executor(
            self._me,
            self._places,
            self._layers,
            job.survivor_groups.survivor_group,
            lambda: bool(job.survivor_groups.joining_ranks()),
            self._plans,
            StepOptions(
                ordered=ordered,
                synchronous=variant is not Variant.STAGGERED,
                rule=self._layers.rule,
                moves=options.reroute.normalise,
            ),
            lambda kind, fields: job.reporter.emit(kind, **fields),
        )
        self.result: StepResult | None = None
        self._newest: StepResult | None = None
        self._closed = False
        # Others may need this worker until all have finished. A replacement has made no step with the engine before.
        before = job.survivor_groups.close_at_end(self.close)
        if before is not None and not job.joining:
            before()
        job.survivor_groups.before_collectives(self.wait_for_all)

    def _rank(self, worker: PlannedWorker) -> int:
        return int(self._engine.grid.stage_to_global(worker.stage, data=worker.pipeline))

    def _prepare(self) -> None:
        """Have plans made for further failures, and say what is planned if that has changed."""
        failed, executor, plans = self._executor.failed, self._executor, self._plans
        plans.fill(failed)
        before, self._prepared = self._prepared, (failed, plans.since)
        if self._prepared != before and executor.connected and self._job.rank == executor.survivor_group.ranks[0]:
            facts = plans.facts(failed, self._places.moves, switched=plans.since != before[1])
            self._job.reporter.emit("planned", **facts)
            if "drifted" in facts:
                console(drift_line(facts))

    def at_boundary(self) -> None:
        """Before each step and evaluation: admit replacements, if the last step has said so.

        An evaluation in the batch of a step, as Lightning's validations are, admits nobody.
        """
        executor, job, result = self._executor, self._job, self.result
        executor.move_to(int(self._engine.global_steps))
        if job.position.boundaries == self._stepped_at:
            return
        self.result = None
        join_request = result.admit if result is not None else -1
        if executor.connected and join_request >= 0:
            self._settle()
        if (
            executor.connected and executor.survivor_group.number == join_request
        ):  # else somebody failed or was admitted since
            self._admit(WaitFor.NOT_AT_ALL)

    def wait_for_all(self) -> None:
        """Admit replacements until nobody is away. All workers call it at a step boundary, or a step later."""
        while self._job.survivor_groups.absent and not self._job.joining:
            self._wait(WaitFor.FOR_ALL)

    def _wait(self, wait_for: WaitFor) -> None:
        """Admit replacements that are waited for. If somebody fails meanwhile, nobody may be admitted."""
        self._settle()
        self._admit(wait_for)

    def _admit(self, wait_for: WaitFor) -> None:
        """Admit replacements that are ready, as one worker sees them. All have come from :meth:`_settle`."""
        executor, job = self._executor, self._job
        survivor_group = executor.survivor_group
        try:
            mine = job.survivor_groups.joining_ranks(wait=wait_for) if job.rank == survivor_group.ranks[0] else ()
            ranks = list(survivor_group.exchange(list(mine))[survivor_group.ranks[0]])
        except SurvivorGroupBroken:
            return
        if ranks:
            if (gradients := executor.gradients) is not None and self._newest is not None:
                norm = compat.gradient_norm(self._engine)
                job.notes.keep(_RESULT, "", [job.position.boundaries, self._newest.to_tensor(), gradients, norm])
            boundary = job.position.boundaries
            job.notes.keep(_EVALUATIONS, "", [boundary, executor.evaluations.results(boundary)])
            job.survivor_groups.admit(ranks)
        executor.leave()

    def close(self) -> None:
        """There are no more steps: return when nobody needs this worker for one."""
        if not self._closed:
            self._closed = True
            self._settle()
            self._plans.stop()

    def _settle(self) -> None:
        try:
            self._executor.settle()
        except RecoveryFailed as error:
            self._job.fall_back(str(error))

    def run(self) -> None:
        if self._stepped_at < 0 and self._job.config.reroute.normalise and self._layers.hooked:
            console_once("hooks", _HOOKED)
        self._stepped_at = self._job.position.boundaries
        updates = self._job.updates
        if updates.state_version > updates.version:  # this one does nothing: the state contains it already
            self._pass_by()
            return
        self.result = None
        while self.result is None:
            try:
                self.result = self._newest = self._executor.run()
            except DataAway:
                self._wait(WaitFor.FOR_ONE)
            except RecoveryFailed as error:
                self._job.fall_back(str(error))
        self._prepare()

    def evaluates(self) -> bool:
        """Whether evaluations use survivor groups: not before the first step, nor in bf16, whose sums differ."""
        return (
            not self._engine.bfloat16_enabled()
            and self._job.position.boundaries > 0
            and int(self._engine.global_steps) > 0
        )

    def evaluate(self, micro_batches: int) -> Tensor:
        """The mean loss over all pipelines of the next batch of the engine's data, with DeepSpeed's arithmetic."""
        engine, job, executor = self._engine, self._job, self._executor
        items = self._layers.draw(micro_batches) if engine.is_first_stage() or engine.is_last_stage() else []
        boundary, results = job.notes.kept(_EVALUATIONS).get("", (-1, []))
        if boundary == job.position.boundaries:
            executor.evaluations.adopt(boundary, results)
        executor.begin_evaluation(job.position.boundaries, micro_batches, items)
        losses = None
        while losses is None:
            try:
                losses = executor.evaluate()
            except DataAway:
                self._wait(WaitFor.FOR_ONE)
            except RecoveryFailed as error:
                job.fall_back(str(error))
        sums = [sum(map(torch.tensor, row)) / micro_batches for row in losses]
        mean = torch.zeros(())
        for place in gloo_order(0, len(sums)):  # in which gloo adds single numbers
            mean += sums[place]
        return mean / len(sums) if len(sums) > 1 else mean

    def _pass_by(self) -> None:
        """Count a step that the others had made when they admitted this replacement, and take its data."""
        engine = self._engine
        if engine.is_first_stage() or engine.is_last_stage():
            self._layers.items()
        boundary, result, gradients, norm = self._job.notes.kept(_RESULT)[""]
        compat.set_gradient_norm(engine, norm)
        assert boundary == self._job.position.boundaries
        self._layers.pass_by(gradients, norm)
        engine.before_step()
        compat.step(engine)
        self._executor.move_to(int(engine.global_steps))
        self.result = replace(StepResult.from_tensor(result, self._topology), admit=-1)

    def total_loss(self) -> Tensor:
        """The mean loss of the last global batch, with DeepSpeed's arithmetic."""
        assert self.result is not None
        sums, dtype = [], self.result.loss_type
        for losses in self.result.losses:
            total = torch.zeros((), dtype=dtype)
            for loss in losses:
                total += torch.tensor(loss, dtype=dtype)
            sums.append(total / self._topology.micro_batches)
        mean = torch.zeros_like(sums[0])
        for place in gloo_order(0, len(sums)):  # in which gloo adds single numbers
            mean += sums[place]
        if len(sums) > 1:
            mean /= len(sums)
        told = dtype if self._engine.is_last_stage() else torch.float32  # in which it is sent to the others
        self._engine.dp_group_loss = sums[self._me.pipeline].to(told)
        return mean.to(told)


class _Layers(StageState, StageUpdates):
    """The engine's own stage, as a :class:`shared_core.reroute.step.HomeModel`."""

    def __init__(self, engine: InstrumentedEngine, job: Job, whole: WholeOptimizer | None) -> None:
        StageState.__init__(self, engine)
        StageUpdates.__init__(self, engine.optimizer, trained(engine))
        self._job, self._whole = job, whole
        self._shapes: list[list[tuple[int, ...]]] | None = None
        self.module: nn.Module = engine.module
        self.accumulates = whole.accumulates if whole is not None else None
        self.tied = _tied(engine, self.parameters)
        self._buffers = dict(engine.module.named_buffers())
        self.reader: Reader | None = None

    @property
    def rule(self) -> SumRule:
        engine, average = self._engine, bool(self._engine.gradient_average)
        if self._whole is not None:
            return self._whole.rule(engine.communication_data_type, average)
        # Where layers are tied a gradient has another place at each stage, and so another order.
        scale = 1.0 / engine.grid.data_parallel_size if average else 1.0
        return SumRule(scale=scale, as_gloo=not self.tied)

    def draw(self, micro_batches: int) -> list[tuple[Tensors, Tensors]]:
        """Inputs and labels of the next micro-batches of this pipeline."""
        data, self.reader = self._engine.data_iterator, None
        if isinstance(data, SharedData):
            numbers, finish = range(data.drawn, data.drawn + micro_batches), self._engine.batch_fn or (lambda one: one)
            self.reader = lambda pipeline: [_item(finish(data.read(pipeline, number))) for number in numbers]
        return [_item(compat.next_batch(self._engine)) for _ in range(micro_batches)]

    def items(self) -> list[tuple[Tensors, Tensors]]:
        items = self.draw(int(self._engine.micro_batches))
        for item in items:
            shapes = [[tuple(tensor.shape) for tensor in part] for part in item]
            if self._shapes not in (None, shapes):
                raise Unsupported(
                    f"rank {self._job.rank}: a micro-batch has tensors of shapes {shapes}, those before it had "
                    f"{self._shapes}. With on_failure='reroute' they must stay the same: use drop_last=True"
                )
            self._shapes = shapes
        return items

    def forward(
        self, inputs: Tensors, labels: Tensors | None, pipeline: int, micro_batch: int, step: int | None = None
    ) -> Tensors:
        engine, before = self._engine, RawRandom()
        module = engine.module
        module.micro_offset = engine.offset_of(micro_batch, pipeline, step)
        copies = tuple(t.clone() for t in inputs)
        if compat.checkpoints_reentrantly(engine):  # else the first stage's parameters would get no gradients
            copies = tuple(t if t.requires_grad else t.requires_grad_(t.is_floating_point()) for t in copies)
        versions = [buffer._version for buffer in self._buffers.values()]
        with autocast_if_enabled(engine):
            outputs = module(copies if len(copies) > 1 else copies[0])
        restore_raw(before)
        for (name, buffer), version in zip(self._buffers.items(), versions, strict=True):
            if module.training and buffer._version != version:
                raise Unsupported(
                    f"rank {self._job.rank}: the forward pass changes the buffer {name}. With on_failure='reroute' "
                    "layers must not change buffers, because several workers compute for one stage: choose "
                    "on_failure='replace'"
                )
        if labels is None:
            return as_tuple(outputs)
        loss = outputs
        if module.loss_fn is not None:
            loss = module.loss_fn(outputs, labels if len(labels) > 1 else labels[0])
        return loss.float() / int(engine.micro_batches), loss

    def set_gradients(self, flat: Tensor) -> None:
        if self._whole is not None:
            self._whole.set_gradients(flat)
            return
        set_gradients(self.parameters, flat)

    def pass_by(self, gradients: Tensor, norm: Any) -> None:
        """Of a step that the state contains already: hooks look at its gradients; its update does nothing."""
        self.set_gradients(gradients)
        if self._whole is not None:
            self._whole.found(norm)

    def norm(self) -> float | None:
        if self._whole is not None:
            return self._whole.norm()
        if self._engine.gradient_clipping() <= 0.0:
            return None
        # DeepSpeed leaves other stages out, except layers that say that they are divided among workers.
        first = self._engine.mpu.get_model_parallel_rank() == 0
        return square_sum(self.parameters, first)

    def clip(self, norms: Sequence[float | None]) -> float:
        if self._whole is not None:
            return self._whole.clip(norms)
        if self._engine.gradient_clipping() <= 0.0:
            return 1.0
        total = torch.zeros(1)
        for norm in norms:
            total += torch.tensor([norm or 0.0])
        total = total.pow(0.5)
        part = total / self._engine.grid.data_parallel_size  # it averages over replicas, too
        total = sum(([part] * self._engine.grid.data_parallel_size)[1:], start=part)
        compat.set_gradient_norm(self._engine, total)
        coefficient = torch.tensor([float(self._engine.gradient_clipping())]) / (total + 1e-6)
        return float(torch.min(torch.tensor([1.0]), coefficient))

    def update(self, factor: float, tentative: bool) -> None:
        self._engine.before_step()
        if self._whole is not None:
            compat.step(self._engine)
            return
        self._begin(tentative)
        self._scale(factor)
        compat.step(self._engine)

    def update_again(self, factor: float) -> None:
        assert self._undo is not None
        optimizer = self._engine.optimizer
        now = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        self._job.reporter.emit("update_taken_back", step=int(self._engine.global_steps) - 1, factor=factor)
        self._undo.undo()
        self._job.updates.take_back()
        self._scale(factor)
        optimizer.step()
        self._undo.commit()
        self._engine.zero_grad()
        for group, values in zip(optimizer.param_groups, now, strict=True):
            group.update(values)  # the scheduler has been on since

    def build(self, stage: int, description: Mapping[str, Any], state: Tensor) -> StageModel:
        return HostedStage(self._engine, self._job, self, stage, description, state)


def _item(batch: Any) -> tuple[Tensors, Tensors]:
    return as_tuple(batch[0]), as_tuple(batch[1])


def trained(engine: InstrumentedEngine) -> list[nn.Parameter]:
    """Parameters of an engine's stage that are trained, in the order in which gradients are summed."""
    return [p for p in engine.module.parameters() if p.requires_grad and p.numel()]


def _tied(engine: InstrumentedEngine, parameters: Sequence[nn.Parameter]) -> list[Tied]:
    """Parameters of tied layers of this stage that other stages have, too; those of the same stages are one."""
    module, stages = engine.module, dict[str, set[int]]()
    for index, spec in enumerate(compat.layers_of(module)):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(int(module.stage_owner(index)))
    sets = sorted({tuple(sorted(each)) for each in stages.values() if len(each) > 1})
    if len(sets) >= GROUPS:
        raise Unsupported(f"on_failure='reroute' takes layers tied between at most {GROUPS - 1} sets of stages")
    places = {id(parameter): index for index, parameter in enumerate(parameters)}
    found: dict[tuple[int, ...], list[int]] = {}
    for key in sorted(module.tied_comms):
        for name in module.tied_comms[key]["weight_attr"]:
            place = places.get(id(compat.tied_parameter(module, key, name)))
            if place is not None and len(stages[key]) > 1:  # it is trained
                found.setdefault(tuple(sorted(stages[key])), []).append(place)
    return [Tied(sets.index(each) + 1, each, tuple(found[each])) for each in sets if each in found]


def refuse_rerouting(engine: InstrumentedEngine) -> None:
    usual = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    reasons: list[tuple[bool, str]] = [
        (is_sharded(engine.optimizer) and engine.torch_autocast_enabled(), "ZeRO-1 and torch_autocast together"),
        (engine.communication_data_type != usual, "a communication_data_type"),
        (engine.has_moe_layers, "mixtures of experts"),
        (engine.grid.data_parallel_size < 2, "pipelines without data-parallel replicas"),
        (not engine.postscale_gradients() or engine.gradient_predivide_factor() != 1.0, "prescaled gradients"),
        (engine.module.get_additional_losses() is not None, "additional losses"),
        (
            has_running_statistics(engine.module),
            "batch or instance normalisation with running statistics, which belong to one worker",
        ),
    ]
    for holds, what in reasons:
        if holds:
            raise Unsupported(f"on_failure='reroute' cannot be used with {what}: choose on_failure='replace'")
