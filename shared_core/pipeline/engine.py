"""DeepSpeed's pipeline engine with stages that can be replaced while the others wait.

It keeps DeepSpeed's own schedule, instructions and arithmetic. It adds a step boundary before each call, the
engine's hidden state to what the rank publishes, the ranks of the stage as its replicas, and a place for faults
before each instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule

from shared_core.errors import ConfigError, Unsupported
from shared_core.job import Job
from shared_core.job import install as install_backend
from shared_core.loaders import write_random
from shared_core.loaders.randomness import DrawLog, RawRandom, changed
from shared_core.pipeline import compat
from shared_core.pipeline.instrumented_engine import InstrumentedEngine
from shared_core.pipeline.planned_groups import PlannedGroups
from shared_core.pipeline.rerouting import Rerouting, refuse_rerouting, trained
from shared_core.pipeline.sharded import SHARD, Shard, WholeOptimizer, evaluates, is_sharded
from shared_core.pipeline.shared_replay import SharedReplay

# -- calls of an engine by a script that knows nothing of recoveries --------------------------------------------------


#: Name of the registered state that holds the number of calls.
STATE = "swift.pipeline"
_RESULTS, _DRAWS, _ENDS = "pipeline results", "pipeline draws", "pipeline ends"


class Calls:
    """The calls of one engine. ``count`` includes skipped ones; ``draws`` are items taken from the data."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.count = self.draws = 0
        self._log = DrawLog()
        self._end: RawRandom | None = None
        self._target: int | None = None
        self._recorded: dict[str, dict[str, Any]] = {}
        self._begins = False

    # -- in a replacement -----------------------------------------------------------------------------

    def finished(self) -> bool:
        """Whether the failed worker, or others without it, have finished the next call, which is then skipped."""
        if not self._job.joining:
            return self.behind
        if self._target is None:
            published = self._job.peek(STATE)
            self._target = published["calls"] if published else 0
            self._recorded = {kind: self._job.notes.kept(kind) for kind in (_RESULTS, _DRAWS, _ENDS)}
        return self.count < self._target

    def admit(self, count: int, draws: int) -> bool:
        """This replacement copies a replica that is ahead: whether others have finished the present call.

        ``count`` calls and ``draws`` items are those of this worker itself.
        """
        self._job.position.note_rejoined(False)
        self._target, self.count, self.draws = self.count, count, draws
        self._recorded = {kind: self._job.notes.kept(kind) for kind in (_RESULTS, _DRAWS, _ENDS)}
        self._begins = count < self._target
        return self._begins

    @property
    def behind(self) -> bool:
        return self._target is not None and self.count < self._target

    def comes_in(self) -> bool:
        """Whether this is the first call after those that others had finished; true once. Its boundary is passed."""
        if not self._begins or self.count != self._target:
            return False
        self._begins = False
        return True

    def skip(self, data: Iterator[Any], draws: int) -> Any:
        """Take ``draws`` items from ``data`` and return what the failed worker returned."""
        for _ in range(draws):
            write_random(self._recorded[_DRAWS].get(str(self.draws), {}))
            next(data)
            self.draws += 1
        write_random(self._recorded[_ENDS].get(str(self.count), {}))
        result = self._recorded[_RESULTS][str(self.count)]
        self.count += 1
        self._job.entries.between()
        return result

    def restore(self, count: int, draws: int) -> None:
        self.count, self.draws = count, draws

    # -- live --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a call's step boundary: keep the generators' states if the script has drawn since the last call."""
        if self._end is not None and self.count:
            drawn = changed(self._end, RawRandom())
            if drawn:
                self._job.notes.keep(_ENDS, str(self.count - 1), self._end.pack(drawn))
        self._end = None

    def draw(self, take: Callable[[], Any]) -> Any:
        """Take the next item with ``take``, and keep the generators' states that it starts from."""
        before = RawRandom()
        item = take()
        self._log.note(self.draws, before, RawRandom())
        for note in self._log.notes.values():
            self._job.notes.keep(_DRAWS, str(self.draws), note)
        self._log.notes.clear()
        self.draws += 1
        return item

    def done(self, result: Any) -> None:
        self._job.notes.keep(_RESULTS, str(self.count), result)
        self.count += 1
        self._end = RawRandom()
        self._job.entries.between()


# -- the engine -------------------------------------------------------------------------------------------------------


#: Plain numbers of the engine that change from batch to batch.
_FIRST = ("first_output_send", "first_gradient_send")
_NUMBERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps", *_FIRST)
#: Buffers that are allocated in the first batch, when shapes become known, and only overwritten later.
_BUFFERS = ("pipe_recv_buf", "grad_layer", "meta_buffer")


class SwiftPipelineEngine(InstrumentedEngine):
    """A :class:`deepspeed.PipelineEngine` whose stages survive; made by :func:`shared_core.pipeline.initialize`.

    Outside ``swiftrun`` it is DeepSpeed's engine. ``drives``: the engine marks the step boundaries, at each call of
    :meth:`train_batch` and :meth:`eval_batch`; an adapter whose framework has boundaries of its own sets it to False
    before the first call.

    Raises:
        Unsupported: for tensor parallelism, for fp16, and for optimizers that are not torch's.
        ConfigError: if the default process group was made before the product was installed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drives = True
        self._calls: Calls | None = None
        self._shared: SharedReplay | None = None
        self._groups: PlannedGroups | None = None
        self._rerouting: Rerouting | None = None
        self._others: list[dict[str, Any]] = []
        self._shard: Shard | None = None
        self._whole: WholeOptimizer | None = None
        if self._job is None:
            return
        if self._job.runtime.world is None:
            raise ConfigError(
                "the default process group is not one that survives failures: call shared_core.install() before "
                "torch.distributed.init_process_group() or deepspeed.init_distributed()"
            )
        self._refuse()
        sharded = is_sharded(self.optimizer)
        if sharded and not self._job.reroutes:
            self._shard = Shard(self.optimizer)
            self._job.attach([self.module], [], replicas=self.grid.dp_group, sharded=True)
            self._job.register(SHARD, self._shard.capture, self._shard.restore)
        else:
            if sharded:
                refuse_rerouting(self)
                place = self.grid.get_data_parallel_rank(), self.grid.data_parallel_size
                self._whole = WholeOptimizer(self.optimizer, trained(self), *place)
            optimizers = [self._whole.optimizer if self._whole is not None else self.optimizer]
            self._job.attach(
                [self.module], [] if evaluates(self.optimizer) else optimizers, replicas=self.grid.dp_group
            )
            self._job.parts.unregister(SHARD)  # of an engine before
        if sharded:
            self._job.checkpoints.keep_number(
                "DeepSpeed's bf16 and ZeRO optimizers keep the parameters of a stage in one piece"
            )
        self._job.register(STATE, self._capture, self._restore)
        self._calls = Calls(self._job)
        if self._job.reroutes and not evaluates(self.optimizer):
            self._rerouting = Rerouting(self, self._job, self._whole)
        if self.grid.data_parallel_size > 1:
            return
        shared = SharedReplay(self, self._job)
        if shared.possible and self._shard is None:
            self._shared = shared
            shared.offer()
        if self._options.log.groups == "plan":
            self._groups = PlannedGroups(self, self._job)

    def _refuse(self) -> None:
        if self.is_model_parallel:
            raise Unsupported("pipelines with a model-parallel axis cannot be recovered: use pipe and data axes only")
        if self.fp16_enabled() or self.torch_autocast_z0_gradscaler is not None:
            raise Unsupported("fp16 with its loss scale cannot be recovered in this version: train in bf16 or fp32")
        known = evaluates(self.optimizer) or isinstance(self.optimizer, torch.optim.Optimizer)
        if not known and not is_sharded(self.optimizer):
            raise Unsupported(
                f"the optimizer is {type(self.optimizer).__name__}, not one of torch's: pass one, or choose a type "
                "with torch_adam in the DeepSpeed configuration"
            )

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        self._begin_schedule()
        training = isinstance(pipe_schedule, schedule.TrainSchedule)
        if training and self._rerouting is not None:
            self._rerouting.run()
        elif training and self._shared is not None and self._shared.takes(self.compute_s / max(self.timed, 1)):
            self._shared.run()
        else:
            super()._exec_schedule(pipe_schedule)

    def _aggregate_total_loss(self) -> Any:
        if self._rerouting is not None and self.module.training:
            return self._rerouting.total_loss()
        return super()._aggregate_total_loss()

    @property
    def reroutes(self) -> bool:
        """Whether training steps continue without failed workers."""
        return self._rerouting is not None

    @property
    def catching_up(self) -> bool:
        """Whether this is a replacement whose script is still at calls that others have finished."""
        return self._calls is not None and (self._calls.behind or (self._job is not None and self._job.joining))

    def wait_for_all(self) -> None:
        """Admit replacements until no worker is away (``on_failure="reroute"``).

        All workers call it at the same place, between two steps; a collective of all workers does so by itself.
        """
        if self._rerouting is not None:
            self._rerouting.wait_for_all()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As DeepSpeed's.

        Raises:
            Unsupported: where steps are re-routed: plans are made for one number of micro-batches.
        """
        wanted, rest = divmod(train_batch_size, self.train_micro_batch_size_per_gpu() * self.dp_world_size)
        if self._rerouting is not None and not rest and wanted != self.micro_batches:
            raise Unsupported(
                f"set_train_batch_size({train_batch_size}) makes steps of {wanted} micro-batches, and "
                f"on_failure='reroute' has planned for {self.micro_batches}: keep the number, or choose "
                "on_failure='replace'"
            )
        super().set_train_batch_size(train_batch_size)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        loaded = super().load_checkpoint(*args, **kwargs)
        self.optimizer_loaded()
        return loaded

    def optimizer_loaded(self) -> None:
        """Share the optimizer state that was loaded without :meth:`load_checkpoint`. A collective of all workers."""
        if self._whole is not None:
            self._whole.loaded(self.grid.get_data_parallel_group())

    def destroy(self) -> None:
        if self._rerouting is not None and self._job is not None and not self._job.joining:
            self._rerouting.close()
        super().destroy()

    def clip_fp32_gradients(self) -> None:
        if self._rerouting is None:
            super().clip_fp32_gradients()

    # -- what a rank publishes ---------------------------------------------------------------------

    def _capture(self) -> dict[str, Any]:
        return {
            "numbers": {name: getattr(self, name) for name in _NUMBERS},
            "buffers": {name: _shapes(getattr(self, name)) for name in _BUFFERS},
            "micro_offset": self.module.micro_offset,
            "scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
            "calls": self._calls.count if self._calls is not None else 0,
            "draws": self._calls.draws if self._calls is not None else 0,
            "groups": self._hyperparameters() if self._whole is not None else [],
        }

    def _restore(self, values: dict[str, Any]) -> None:
        recut = self._job is not None and self._job.position.resized  # then stages tell each other again what they send
        for name, number in values["numbers"].items():
            if not (recut and name in _FIRST):
                setattr(self, name, number)
        for name, shapes in values["buffers"].items() if not recut else ():
            setattr(self, name, _allocate(shapes))
        self.module.micro_offset = values["micro_offset"]
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(values["scheduler"])
        if self._whole is not None:
            self._set_hyperparameters(values["groups"])
            self._whole.link()
        if self._calls is not None:
            self._calls.restore(values["calls"], values["draws"])

    # -- calls -------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None) -> Any:
        """Train on the next global batch; see :meth:`deepspeed.PipelineEngine.train_batch`.

        Returns:
            The mean loss of the global batch, on every rank: a tensor without dimensions.
        """
        call = super().train_batch
        return self._call(self.micro_batches, data_iter, lambda: call(data_iter))

    def eval_batch(self, data_iter: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on the next global batch; see :meth:`deepspeed.PipelineEngine.eval_batch`."""
        number = kwargs.get("num_micro_batches") or self.micro_batches
        stock, plain = super().eval_batch, not args and kwargs.keys() <= {"num_micro_batches"}

        def call() -> Any:
            if self._rerouting is None:
                return stock(data_iter, *args, **kwargs)
            if plain and self._rerouting.evaluates() and not self.monitor.enabled:
                return self._evaluate(self._rerouting, data_iter, number)
            self._rerouting.wait_for_all()
            return stock(data_iter, *args, **kwargs)

        return self._call(number, data_iter, call)

    def _evaluate(self, rerouting: Rerouting, data_iter: Any, micro_batches: int) -> torch.Tensor:
        self.module.eval()
        of_training = self.data_iterator
        self.set_dataiterator(data_iter)
        loss = rerouting.evaluate(micro_batches)
        self.set_dataiterator(of_training)
        return loss

    def _call(self, micro_batches: int, data_iter: Any, call: Callable[[], Any]) -> Any:
        if self._job is None:
            return call()
        source = data_iter if data_iter is not None else self.data_iterator
        self._job.variables.reads(source)
        if not self.drives or self._calls is None:
            self._after_boundary(self._job)
            return call()
        if self._calls.finished():
            draws = micro_batches if self.is_first_stage() or self.is_last_stage() else 0
            result, norm = self._calls.skip(source, draws)
            compat.set_gradient_norm(self, norm)
            return result
        if self._calls.comes_in():
            self._set_hyperparameters(self._others)
        else:
            count, taken, mine = self._calls.count, self._calls.draws, self._hyperparameters()
            self._calls.begin()
            self._job.step_boundary()
            if self._job.position.rejoined and self._calls.admit(count, taken):
                # A scheduler of the script's steps through the calls that are skipped now.
                self._others = self._hyperparameters()
                self._set_hyperparameters(mine)
                return self._call(micro_batches, data_iter, call)
        self._after_boundary(self._job)
        result = call()
        self._calls.done([result, compat.gradient_norm(self)])
        return result

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """Of the optimizer, where steps are re-routed; else empty."""
        groups = self.optimizer.param_groups if self._rerouting is not None else []
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def _set_hyperparameters(self, values: list[dict[str, Any]]) -> None:
        for group, value in zip(self.optimizer.param_groups if values else [], values, strict=True):
            group.update(value)

    def _after_boundary(self, job: Job) -> None:
        if not job.reroutes:  # steps make no log
            job.replays.mark()
        if self._groups is not None:
            self._groups.at_boundary()
        if self._rerouting is not None:
            self._rerouting.at_boundary()

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        if self._rerouting is None:  # else it has been called, because gradients are clipped by now
            self.before_step()
        with self._job.updates.update() if self._job is not None and self._shard is not None else nullcontext():
            super()._take_model_step(*args, **kwargs)

    def _next_batch(self) -> Any:
        if self._calls is None or not self.drives:
            return super()._next_batch()
        return self._calls.draw(super()._next_batch)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad]
    return None if value is None else {type(value).__name__: [_shapes(each) for each in value]}


def _allocate(shapes: Any) -> Any:
    if shapes is None:
        return None
    if isinstance(shapes, list):
        shape, dtype, grad = shapes
        return torch.zeros(shape, dtype=getattr(torch, dtype), requires_grad=grad)
    ((kind, items),) = shapes.items()
    made = [_allocate(each) for each in items]
    return tuple(made) if kind == "tuple" else made


def install() -> Job | None:
    """:func:`shared_core.install` for a script that uses DeepSpeed; call it before ``deepspeed.init_distributed()``."""
    compat.import_deepspeed()
    return install_backend()


def initialize(*args: Any, **kwargs: Any) -> tuple[SwiftPipelineEngine, Any, Any, Any]:
    """As ``deepspeed.initialize``, for a ``deepspeed.pipe.PipelineModule``.

    Returns:
        The engine, its optimizer, the training loader and the scheduler, as DeepSpeed does.

    Raises:
        TypeError: the model is no ``PipelineModule``.
        Unsupported: for what cannot be recovered; see :class:`SwiftPipelineEngine`.
    """
    model = kwargs.get("model", args[1] if len(args) > 1 else None)
    if not isinstance(model, deepspeed.PipelineModule):
        raise TypeError(f"model must be a deepspeed.pipe.PipelineModule, got {type(model).__name__}")
    with compat.engines(SwiftPipelineEngine):
        return deepspeed.initialize(*args, **kwargs)  # type: ignore[no-any-return]
