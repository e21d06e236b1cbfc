"""DeepSpeed's pipeline engine whose micro-batches are numbered, seeded and timed, and whose messages say what they are.

Replay, re-routing and planned groups of logs need this of an engine, and nothing of its recovery.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError
from shared_core.faults import inject
from shared_core.job import Job, current_job
from shared_core.loaders import seed_random
from shared_core.loaders.randomness import RawRandom, restore_raw
from shared_core.pipeline import compat
from shared_core.pipeline.stage import layer_seed

_POINTS = {
    schedule.LoadMicroBatch: "pipe.load",
    schedule.ForwardPass: "pipe.forward",
    schedule.BackwardPass: "pipe.backward",
    schedule.SendActivation: "pipe.send_activation",
    schedule.RecvActivation: "pipe.recv_activation",
    schedule.SendGrad: "pipe.send_grad",
    schedule.RecvGrad: "pipe.recv_grad",
    schedule.ReduceTiedGrads: "pipe.reduce_tied",
    schedule.ReduceGrads: "pipe.reduce",
    schedule.OptimizerStep: "pipe.step",
}
#: More than the layers of any model; see :meth:`InstrumentedEngine._seed_layers`.
_LAYERS = 1 << 20


def _with_faults(point: str, execute: Callable[..., None]) -> Callable[..., None]:
    def run(engine: InstrumentedEngine, *args: Any, **kwargs: Any) -> None:
        inject.point("pipe.instruction")
        inject.point(point)
        execute(engine, *args, **kwargs)

    return run


class _LayerSeeds:
    """``seed_fn`` of a module; see :meth:`InstrumentedEngine._seed_layers`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, value: int) -> None:
        seed_random(layer_seed(self._seed, value // _LAYERS, value % _LAYERS))


class InstrumentedEngine(PipelineEngine):  # type: ignore[misc]
    """A :class:`deepspeed.PipelineEngine` with a place for faults before each instruction.

    Attributes:
        before_step: called when the gradients of a batch are complete, before they are clipped and applied.
        compute_s: seconds of forward and backward passes that this process has made.
        timed: backward passes that it has made.

    Raises ConfigError if layers are to be seeded, and the module seeds them itself.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before_step: Callable[[], None] = lambda: None
        self._job: Job | None = current_job()
        self._options = self._job.config if self._job is not None else SwiftConfig.from_env()
        self._sent: dict[str, int] = {}
        self._micro_batch = self.timed = 0
        self.compute_s = 0.0
        self._seeded = self._options.replay.randomness == "seeded" or self._options.reroutes
        if self._seeded:
            self._seed_layers()

    # -- random numbers ----------------------------------------------------------------------------

    def _seed_layers(self) -> None:
        """Make the random numbers of each layer a function of seed, micro-batch and layer.

        DeepSpeed calls ``seed_fn(base_seed * n + layer)`` before each layer, with a number n that grows by one with
        each micro-batch and that a recomputed layer sees again; :meth:`offset_of` says which.
        """
        module = self.module
        if module.seed_layers and not isinstance(module.seed_fn, _LayerSeeds):  # of an engine before
            raise ConfigError("PipelineModule(seed_layers=True) and replay.randomness='seeded' exclude each other")
        module.seed_layers, module.base_seed = True, _LAYERS
        module.seed_fn = _LayerSeeds(self._options.seed)

    def number_of(self, micro_batch: int, pipeline: int | None = None, step: int | None = None) -> int:
        """Number of a micro-batch over all steps and pipelines; by default of the present step and this pipeline."""
        home = self.grid.data_parallel_id if pipeline is None else pipeline
        number = self.global_steps if step is None else step
        return int((number * self.grid.data_parallel_size + home) * self.micro_batches + micro_batch)

    def offset_of(self, micro_batch: int, pipeline: int | None = None, step: int | None = None) -> int:
        """``micro_offset`` of the module before its forward, from which DeepSpeed makes the number of a micro-batch."""
        return self.number_of(micro_batch, pipeline, step) - 2

    # -- instructions ------------------------------------------------------------------------------

    def _exec_forward_pass(self, buffer_id: int) -> None:
        began = time.perf_counter()
        if self._seeded:
            before = RawRandom()
            self.module.micro_offset = self.offset_of(self._micro_batch)
            self._micro_batch += 1
            super()._exec_forward_pass(buffer_id)
            restore_raw(before)  # the data's random numbers are not the layers'
        else:
            super()._exec_forward_pass(buffer_id)
        self.compute_s += time.perf_counter() - began

    def _exec_backward_pass(self, buffer_id: int) -> None:
        began = time.perf_counter()
        super()._exec_backward_pass(buffer_id)
        self.compute_s += time.perf_counter() - began
        self.timed += 1

    def _exec_send_activations(self, buffer_id: int) -> None:
        self._note("forward")
        super()._exec_send_activations(buffer_id)

    def _exec_send_grads(self, buffer_id: int) -> None:
        self._note("backward")
        super()._exec_send_grads(buffer_id)

    def _note(self, direction: str) -> None:
        if self._job is not None:
            micro_batch = self._sent[direction] = self._sent.get(direction, -1) + 1
            what = {"version": self.global_steps, "micro_batch": micro_batch, "direction": direction}
            self._job.replays.note_messages(what | ({} if self.module.training else {"evaluation": True}))

    _INSTRUCTION_MAP = {
        kind: _with_faults(_POINTS[kind], execute)
        for kind, execute in (
            dict(compat.instructions_of(PipelineEngine))
            | {
                schedule.ForwardPass: _exec_forward_pass,
                schedule.BackwardPass: _exec_backward_pass,
                schedule.SendActivation: _exec_send_activations,
                schedule.SendGrad: _exec_send_grads,
            }
        ).items()
    }

    def _begin_schedule(self) -> None:
        self._micro_batch = 0
        self._sent = {}

    def bytes_to_next(self) -> int:
        """Bytes of activations and gradients that cross to and from the next stage in a step; 0 at the last stage."""
        layer = self.grad_layer
        tensors = [] if layer is None else [layer] if isinstance(layer, torch.Tensor) else layer
        return 2 * int(self.micro_batches) * sum(t.numel() * t.element_size() for t in tensors)
