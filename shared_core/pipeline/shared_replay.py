"""A newcomer's steps between the checkpoint and its predecessor's place, computed together with the survivors.

Only steps that all survivors have made are shared: every message of theirs is in a log. What remains is replayed by
the schedule, as always.
"""

from __future__ import annotations

import time

import torch
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe import schedule

from shared_core.errors import SwiftError
from shared_core.job import Job
from shared_core.pipeline import compat, lending, stage
from shared_core.pipeline.cost import ReplayCost
from shared_core.pipeline.instrumented_engine import InstrumentedEngine
from shared_core.pipeline.lending import Helpers
from shared_core.pipeline.stage import Computed, Work, as_tuple, has_running_statistics
from shared_core.system import threads
from shared_core.worker.recovery.exchange import Replaying


class SharedReplay:
    """Shares the replay of one engine's stage.

    Args:
        engine: of this worker.
        job: of this worker.
    """

    def __init__(self, engine: InstrumentedEngine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._helpers: Helpers | None = None
        self._decided = False
        self._steps, self._took = 0, 0.0
        #: Seconds of a step by the newcomer alone, and with its helpers; 0 if not measured.
        self._expected = (0.0, 0.0)

    @property
    def possible(self) -> bool:
        """Whether micro-batches of every stage can be computed out of order and elsewhere; all ranks answer alike."""
        engine, config = self._engine, self._job.config
        module = engine.module
        keys = [spec.key for spec in compat.layers_of(module) if isinstance(spec, TiedLayerSpec)]
        # Recomputing segments adds to a parameter that two of them use in another order, and does so without autocast.
        alters = len(set(keys)) < len(keys) or engine.torch_autocast_enabled()
        return (
            config.replay.randomness == "seeded"
            and config.replay.parallel != "never"
            and not engine.dynamic_shape
            and not (alters and module.activation_checkpoint_interval > 0)
            and module.get_additional_losses() is None
        )

    def offer(self) -> None:
        """Help newcomers from now on."""
        engine, job, threads = self._engine, self._job, torch.get_num_threads()

        def stage_of(rank: int) -> stage.Stage:
            return stage.clone(engine, compat.stage_of(engine, rank), job.config.seed)

        job.replays.help(lambda replaying: lending.help_newcomers(job.replays, replaying, stage_of, threads))

    # -- in the newcomer ---------------------------------------------------------------------------

    def takes(self, micro_s: float) -> bool:
        """Whether the next step is shared.

        Args:
            micro_s: measured seconds of a micro-batch's forward and backward; 0 before the first.
        """
        replaying = self._job.replays.own
        if replaying is None:
            return False
        if self._engine.global_steps >= replaying.complete:
            self._end()
            return False
        if not self._decided and (micro_s or self._job.config.replay.parallel == "always") and self._shapes_known():
            self._decided = True
            self._ask(micro_s)
        return self._helpers is not None

    def _shapes_known(self) -> bool:
        engine = self._engine
        incoming = engine.is_first_stage() or engine.pipe_recv_buf is not None
        return incoming and (engine.is_last_stage() or isinstance(engine.grad_layer, torch.Tensor))

    def _ask(self, micro_s: float) -> None:
        """Decide who computes; whoever is not needed may go."""
        replaying = self._job.replays.own
        assert replaying is not None
        if not self._messages_in_logs(replaying):
            self._dismiss(replaying)
            return
        try:
            inner = lending.meet(self._job.replays, replaying, self._job.rank)
            replay, count = self._replay(micro_s, lending.bytes_per_s(inner)), len(replaying.survivors)
            use = lending.workers_to_use(replay, count, self._job.config.replay.parallel)
            helpers = Helpers(self._job.replays, inner, count, use, self._ordered)
            self._expected = (replay.seconds(1), replay.seconds(use + 1)) if micro_s else (0.0, 0.0)
        except (RuntimeError, SwiftError):
            return  # a loss, or nobody comes: the schedule does it
        if helpers.use:
            self._helpers = helpers
        else:
            helpers.end()

    def _messages_in_logs(self, replaying: Replaying) -> bool:
        """Whether both neighbours have sent all they will, and no layer depends on the order of micro-batches."""
        engine = self._engine
        neighbours = {
            engine.grid.stage_to_global(stage_id=each)
            for each in (engine.stage_id - 1, engine.stage_id + 1)
            if 0 <= each < engine.num_stages
        }
        return neighbours <= set(replaying.survivors) and not has_running_statistics(engine.module)

    def _dismiss(self, replaying: Replaying) -> None:
        def dismiss() -> None:
            try:
                inner = lending.meet(self._job.replays, replaying, self._job.rank)
                Helpers(self._job.replays, inner, len(replaying.survivors)).end()
            except (RuntimeError, SwiftError):
                return

        threads.start(dismiss, name="swift-dismiss")

    @property
    def _ordered(self) -> bool:
        return self._job.config.replay.sums == "ordered"

    def _replay(self, micro_s: float, bytes_per_s: float) -> ReplayCost:
        engine = self._engine
        stage_bytes = sum(p.numel() * p.element_size() for p in engine.module.parameters())
        buffers = [*as_tuple(engine.pipe_recv_buf), *as_tuple(engine.grad_layer)]
        message_bytes = 2 * sum(t.numel() * t.element_size() for t in buffers)
        return ReplayCost(engine.micro_batches, micro_s, stage_bytes, message_bytes, bytes_per_s, self._ordered)

    def _end(self) -> None:
        job, helpers, replaying = self._job, self._helpers, self._job.replays.own
        assert replaying is not None
        if helpers is not None:
            alone, planned = self._expected
            fields = {"step_s": self._took / max(self._steps, 1), "planned_s": planned, "alone_s": alone}
            job.news.emit("help", steps=self._steps, helpers=helpers.use, ordered=helpers.ordered, **fields)
            helpers.end()
        elif not self._decided:
            self._dismiss(replaying)
        self._helpers, self._decided = None, False
        job.replays.end()

    def run(self) -> None:
        """One step, as the schedule would have made it."""
        engine = self._engine
        own = stage.own(engine, self._job.config.seed)
        compat.use_one_buffer(engine)
        engine.fwd_outputs = []
        works = [self._work(place) for place in range(engine.micro_batches)]
        assert self._helpers is not None
        began = time.perf_counter()
        try:
            done = self._helpers.compute(own, works)
        except (RuntimeError, SwiftError):
            self._job.replays.drop_side(self._helpers.inner)  # a helper was lost
            self._helpers = None
            done = lending.compute_here(own, works)
        self._steps += 1
        self._took += time.perf_counter() - began
        self._pass_on(works, done)
        for place, parameter in enumerate(own.parameters):
            for each in done:
                gradient = each.gradients[place]
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        engine.module.micro_offset = engine.offset_of(engine.micro_batches - 1) + 1
        for instruction in (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep):
            compat.instructions_of(engine)[instruction](engine)

    def _work(self, place: int) -> Work:
        engine = self._engine
        buffers = engine.pipe_buffers
        if engine.is_first_stage() or engine.is_last_stage():
            compat.load_micro_batch(engine)
        if not engine.is_first_stage():
            compat.receive_activations(engine)
        work = Work(engine.number_of(place), buffers["inputs"][0])
        if engine.is_last_stage():
            work.labels = buffers["labels"][0]
        else:
            compat.receive_gradients(engine)
            work.gradient = engine.grad_layer.clone()
        return work

    def _pass_on(self, works: list[Work], done: list[Computed]) -> None:
        """Send what the neighbours have had already: it goes into the log again, and no further."""
        engine = self._engine
        buffers = engine.pipe_buffers
        for work, each in zip(works, done, strict=True):
            if engine.is_last_stage():
                assert each.loss is not None
                engine.loss = each.loss
                engine.fwd_outputs.append(each.loss)
                if engine.total_loss is None:
                    engine.total_loss = torch.zeros_like(each.loss)
                engine.total_loss += each.loss
            else:
                buffers["outputs"][0] = each.outputs
                compat.send_activations(engine)
                buffers["outputs"][0] = None
            if not engine.is_first_stage():
                inputs, gradients = as_tuple(work.inputs), as_tuple(each.input_gradients)
                held = [tensor.detach() for tensor in inputs]
                for tensor, gradient in zip(held, gradients, strict=True):
                    tensor.grad = gradient
                buffers["inputs"][0] = tuple(held) if isinstance(work.inputs, tuple) else held[0]
                compat.send_gradients(engine)
