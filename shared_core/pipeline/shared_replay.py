"""A replacement's steps between the checkpoint and the failed worker's place, computed together with the survivors.

Only steps that all survivors have made are shared: every message of theirs is in a log. The schedule replays the
rest, as always. Replacements of a line (see :mod:`shared_core.pipeline.replay_helpers`) still send each other every
message, in the order of the schedule: so each can continue by itself where a helper fails, whatever the others of
the line have noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe import schedule

from shared_core.errors import SwiftError
from shared_core.job import Job
from shared_core.loaders.randomness import RawRandom, restore_raw
from shared_core.pipeline import compat, replay_helpers, stage
from shared_core.pipeline.instrumented_engine import InstrumentedEngine
from shared_core.pipeline.replay_helpers import Helpers, Line, ReplayPart, Wish
from shared_core.pipeline.stage import Computed, Passed, Stage, Work, as_tuple, has_running_statistics
from shared_core.system import threads
from shared_core.worker.recovery.exchange import Replaying

_T = TypeVar("_T")


class SharedReplay:
    def __init__(self, engine: InstrumentedEngine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._helpers: Helpers | None = None
        self._decided = False
        self._line: Line = ()
        self._steps, self._took = 0, 0.0

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
        """Start the threads that help replacements."""
        engine, job, threads = self._engine, self._job, torch.get_num_threads()

        def stage_of(rank: int) -> Stage:
            return stage.clone(engine, compat.stage_of(engine, rank), job.config.seed)

        def help_them(replaying: Replaying) -> None:
            to_help = replay_helpers.lines(replaying, lambda rank: compat.stage_of(engine, rank))
            replay_helpers.help_replacements(job.replays, replaying, to_help, stage_of, threads)

        job.replays.help(help_them)

    # -- in the replacement ---------------------------------------------------------------------------

    def takes(self, micro_s: float) -> bool:
        """Whether the next step is shared. ``micro_s``: seconds of a micro-batch, both ways; 0 before the first."""
        replaying = self._job.replays.own
        if replaying is None:
            return False
        if self._engine.global_steps >= replaying.complete:
            self._end()
            return False
        if not self._decided and (micro_s or self._job.config.replay.parallel == "always") and self._has_trained():
            self._decided = True
            self._ask(replaying, micro_s)
        return self._helpers is not None

    def _has_trained(self) -> bool:
        """Whether a step here or at the failed worker has made the shapes of messages known; alike in a whole line."""
        engine = self._engine
        first, last = engine.is_first_stage(), engine.is_last_stage()
        known = (first or engine.pipe_recv_buf is not None) and (last or engine.grad_layer is not None)
        return known and (engine.timed > 0 or engine.global_steps > 0)

    def _ask(self, replaying: Replaying, micro_s: float) -> None:
        """Decide who computes; dismiss helpers that are not needed."""
        job = self._job
        self._line = self._line_of(replaying)
        if not self._messages_in_logs(replaying):
            self._dismiss(replaying)
            return
        policy = job.config.replay.parallel
        wish = Wish(int(self._engine.micro_batches), policy, job.config.replay.sums == "ordered")
        try:
            helpers = replay_helpers.agree(job.replays, replaying, self._line, self._part(micro_s), wish)
        except (RuntimeError, SwiftError):
            return  # a failure, or nobody comes: the schedule does it
        if helpers.use:
            self._helpers = helpers
        else:
            helpers.end()

    def _line_of(self, replaying: Replaying) -> Line:
        engine, rank = self._engine, self._job.rank
        return next(
            line for line in replay_helpers.lines(replaying, lambda each: compat.stage_of(engine, each)) if rank in line
        )

    def _messages_in_logs(self, replaying: Replaying) -> bool:
        """Whether both neighbors of the line are survivors, which have sent all they will."""
        engine = self._engine
        first, last = (compat.stage_of(engine, self._line[place]) for place in (0, -1))
        neighbours = {
            engine.grid.stage_to_global(stage_id=each)
            for each in (first - 1, last + 1)
            if 0 <= each < engine.num_stages
        }
        return neighbours <= set(replaying.survivors)

    def _dismiss(self, replaying: Replaying) -> None:
        line = self._line

        def dismiss() -> None:
            try:
                inner = replay_helpers.meet(self._job.replays, replaying, line)
                Helpers(self._job.replays, inner, len(line)).end()
            except (RuntimeError, SwiftError):
                return

        threads.start(dismiss, name="swift-dismiss")

    def _part(self, micro_s: float) -> ReplayPart:
        engine = self._engine
        stage_bytes = sum(p.numel() * p.element_size() for p in engine.module.parameters())
        before, after = (
            sum(t.numel() * t.element_size() for t in as_tuple(buffer))
            for buffer in (engine.pipe_recv_buf, engine.grad_layer)
        )
        handed = before * (not self._joined(-1)) + after * (not self._joined(+1))
        # No layer may depend on the order of micro-batches, and one tensor has to pass to the next stage.
        one = engine.is_last_stage() or isinstance(engine.grad_layer, torch.Tensor)
        able = one and not has_running_statistics(engine.module)
        return ReplayPart(micro_s, stage_bytes, handed + before + after, able)

    def _joined(self, way: int) -> bool:
        """Whether the previous (-1) or the next (+1) stage is in the line."""
        return 0 <= self._line.index(self._job.rank) + way < len(self._line)

    def _end(self) -> None:
        job, helpers, replaying = self._job, self._helpers, self._job.replays.own
        assert replaying is not None
        if helpers is not None:
            alone, planned = helpers.expected
            fields = {"step_s": self._took / max(self._steps, 1), "planned_s": planned, "alone_s": alone}
            job.reporter.emit("help", steps=self._steps, helpers=helpers.use, ordered=helpers.ordered, **fields)
            helpers.end()
        elif not self._decided:
            self._line = self._line_of(replaying)
            self._dismiss(replaying)
        self._helpers, self._decided = None, False
        job.replays.end()

    def run(self) -> None:
        """One step, with the bits and messages of the schedule."""
        engine = self._engine
        own = stage.own(engine, self._job.config.seed)
        compat.use_one_buffer(engine)
        engine.fwd_outputs = []
        works = [self._work(place) for place in range(engine.micro_batches)]
        assert self._helpers is not None
        began = time.perf_counter()
        done = self._pass(own, works, self._helped(own, works))
        self._steps += 1
        self._took += time.perf_counter() - began
        for place, parameter in enumerate(own.parameters):
            for each in done:
                gradient = each.gradients[place]
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        engine.module.micro_offset = engine.offset_of(engine.micro_batches - 1) + 1
        for instruction in (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep):
            compat.instructions_of(engine)[instruction](engine)

    def _helped(self, own: Stage, works: list[Work]) -> list[Computed] | None:
        """None where somebody failed: this stage computes the step alone. Others notice: a cut group ends for all."""
        assert self._helpers is not None
        try:
            return self._helpers.compute(own, works)
        except (RuntimeError, SwiftError):
            self._job.replays.drop_side(self._helpers.inner)
            self._helpers = None
            return None

    def _work(self, place: int) -> Work:
        engine, buffers = self._engine, self._engine.pipe_buffers
        work = Work(engine.number_of(place), None)
        if engine.is_first_stage() or engine.is_last_stage():
            compat.load_micro_batch(engine)
        if not self._joined(-1):
            if not engine.is_first_stage():
                compat.receive_activations(engine)
            work.inputs = buffers["inputs"][0]
        if engine.is_last_stage():
            work.labels = buffers["labels"][0]
        elif not self._joined(+1):
            compat.receive_gradients(engine)
            work.gradient = engine.grad_layer.clone()
        return work

    def _pass(self, own: Stage, works: list[Work], known: list[Computed] | None) -> list[Computed]:
        """Forward and backward of all micro-batches in the schedule's order; messages that neighbors have are
        only logged.

        ``known`` are the results, where they are computed elsewhere; None: compute them here.
        """
        engine = self._engine
        ahead, behind = iter(range(len(works))), iter(range(len(works)))
        passed: dict[int, Passed] = {}
        done: list[Computed] = []
        for forward in _order(engine):
            place = next(ahead if forward else behind)
            work = works[place]
            if forward:
                if self._joined(-1):
                    compat.receive_activations(engine)
                    work.inputs = engine.pipe_buffers["inputs"][0]
                if known is None:
                    passed[place] = _undisturbed(partial(own.forward, work))
                self._send_on(passed[place] if known is None else known[place])
                continue
            if self._joined(+1):
                compat.receive_gradients(engine)
                work.gradient = engine.grad_layer.clone()
            if known is None:
                done.append(_undisturbed(partial(own.backward, passed.pop(place), work.gradient)))
            else:
                done.append(known[place])
            self._send_back(work, done[-1])
        return done

    def _send_on(self, made: Passed | Computed) -> None:
        engine, buffers = self._engine, self._engine.pipe_buffers
        if not engine.is_last_stage():
            buffers["outputs"][0] = made.outputs
            compat.send_activations(engine)
            buffers["outputs"][0] = None

    def _send_back(self, work: Work, each: Computed) -> None:
        engine, buffers = self._engine, self._engine.pipe_buffers
        if engine.is_last_stage():
            assert each.loss is not None
            engine.loss = each.loss
            engine.fwd_outputs.append(each.loss)
            if engine.total_loss is None:
                engine.total_loss = torch.zeros_like(each.loss)
            engine.total_loss += each.loss
        if not engine.is_first_stage():
            inputs, gradients = as_tuple(work.inputs), as_tuple(each.input_gradients)
            held = [tensor.detach() for tensor in inputs]
            for tensor, gradient in zip(held, gradients, strict=True):
                tensor.grad = gradient
            buffers["inputs"][0] = tuple(held) if isinstance(work.inputs, tuple) else held[0]
            compat.send_gradients(engine)


def _order(engine: InstrumentedEngine) -> Iterator[bool]:
    """The schedule's order: whether each pass is a forward or a backward. Both take the micro-batches as they come."""
    steps = schedule.TrainSchedule(engine.micro_batches, engine.num_stages, engine.stage_id).steps()
    kinds = (schedule.ForwardPass, schedule.BackwardPass)
    return (isinstance(each, kinds[0]) for slot in steps for each in slot if isinstance(each, kinds))


def _undisturbed(compute: Callable[[], _T]) -> _T:
    """Compute, and restore the global generators afterwards."""
    before = RawRandom()
    try:
        return compute()
    finally:
        restore_raw(before)
