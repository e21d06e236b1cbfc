"""DeepSpeed pipelines behind Accelerate's usual loop: ``Accelerator(deepspeed_plugin=plugin)``.

Accelerate cannot drive a pipeline engine: it calls ``forward``, ``backward`` and ``step``, of which a pipeline has
none. Here ``model(batch)`` runs the whole schedule, and the calls that follow find nothing left to do, as in
Accelerate's own integration of Megatron-LM.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.data_loader import DataLoaderShard, get_sampler
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DeepSpeedPlugin, DistributedType
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, HfDeepSpeedConfig
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import DataLoader

from accelerate_swift import compat
from accelerate_swift.plugin import SwiftPlugin, enabled
from shared_core import install, pipeline
from shared_core.adapters import launched_by_swiftrun
from shared_core.errors import ConfigError, Unsupported

_STEPS, _MICRO = "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"


class SwiftDeepSpeedPipelinePlugin(DeepSpeedPlugin):  # type: ignore[misc]  # Accelerate has no type annotations
    """Trains a ``deepspeed.pipe.PipelineModule`` in Accelerate's usual loop, through the failure of workers.

    ``Accelerator(deepspeed_plugin=plugin)`` is all that Accelerate needs; then ``accelerator.prepare`` returns
    DeepSpeed's pipeline engine in the place of the model. ``model((inputs, targets))`` trains on a batch, in as many
    micro-batches as asked for, or evaluates it after ``model.eval()``, and returns the mean loss on every rank: a
    tensor without dimensions. Make the plugin before anything else of Accelerate: it creates the process group. Without
    ``swiftrun``, or with ``SWIFT_RECOVERY=0`` in the environment, the engine is DeepSpeed's own.

    Args:
        num_stages: stages of the pipeline. The number of workers is a multiple of it; each pipeline has its own part of
            the data.
        micro_batches: micro-batches of a step. A loader's batch is one step of one pipeline: all its micro-batches.
        swift: options of the recovery, and how many workers to start where the script is run as ``python train.py``.
        deepspeed: as :class:`accelerate.DeepSpeedPlugin`. As there, ``gradient_clipping`` is 1 unless it is given.

    Raises:
        ConfigError: if the number of workers is not a multiple of ``num_stages``, or the DeepSpeed configuration says
            another number of micro-batches.
        MissingExtra: if DeepSpeed is not installed.
        SwiftError: where the script cannot be started again under ``swiftrun``.
        Unsupported: for precisions other than fp32 and bf16, for ZeRO stages 2 and 3, and with
            ``on_failure="reroute"`` for what cannot be re-routed.

    Example::

        plugin = accelerate_swift.SwiftDeepSpeedPipelinePlugin(num_stages=1, micro_batches=2)
        accelerator = Accelerator(deepspeed_plugin=plugin)
    """

    def __init__(
        self, num_stages: int, micro_batches: int, *, swift: SwiftPlugin | None = None, **deepspeed: Any
    ) -> None:
        for name, value in (("num_stages", num_stages), ("micro_batches", micro_batches)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        self.num_stages = num_stages
        self.micro_batches = micro_batches
        self.swift = swift or SwiftPlugin()
        self._accelerator: Accelerator | None = None
        options = self._options(deepspeed)
        self._create_group()
        super().__init__(**options)
        stage = self.get_value("zero_optimization.stage", 0)
        if stage not in (0, 1):
            raise Unsupported(f"ZeRO stage {stage} shards more than a pipeline allows: use zero_stage=0 or 1")

    # -- what the user calls ------------------------------------------------------------------------------------------

    def pipeline_module(self, layers: Sequence[Any], loss_fn: Any, **options: Any) -> Any:
        """A ``deepspeed.pipe.PipelineModule`` of as many stages as this plugin has.

        Call it after the ``Accelerator`` was built.

        Args:
            layers: modules, functions, ``LayerSpec`` and ``TiedLayerSpec``.
            loss_fn: takes the outputs and the targets of a micro-batch.
            options: more arguments of ``PipelineModule``.

        Raises:
            ConfigError: no ``Accelerator`` has taken this plugin.
        """
        if self._accelerator is None:
            raise ConfigError(
                "no Accelerator has taken this plugin: build Accelerator(deepspeed_plugin=plugin) first, without "
                "cpu=True, which Accelerate takes to mean 'no DeepSpeed' (the plugin itself chooses the CPU)"
            )
        kind = pipeline.import_deepspeed().PipelineModule
        return kind(list(layers), num_stages=self.num_stages, loss_fn=loss_fn, **options)

    def epochs(self, count: int, start: int = 0) -> Iterator[int]:
        """As :meth:`accelerate_swift.SwiftPlugin.epochs`."""
        return self.swift.epochs(count, start)

    def steps(self, loader: Any) -> Iterator[tuple[int, Any]]:
        """As :meth:`accelerate_swift.SwiftPlugin.steps`."""
        return self.swift.steps(loader)

    def register(self, *objects: Any, **values: Any) -> SimpleNamespace:
        """As :meth:`accelerate_swift.SwiftPlugin.register`."""
        return self.swift.register(*objects, **values)

    # -- what Accelerate calls ----------------------------------------------------------------------------------------

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """``Accelerator`` calls it while it is built, when the process group exists.

        Raises:
            ConfigError: another :class:`SwiftPlugin` was given to the ``Accelerator``, or the DeepSpeed configuration
                switches bf16 off.
            Unsupported: for any precision but fp32 and bf16.
        """
        if mixed_precision not in ("no", "bf16") or self.get_value("fp16.enabled") is True:
            asked = mixed_precision if mixed_precision not in ("no", "bf16") else "fp16 in the DeepSpeed configuration"
            raise Unsupported(
                f"a pipeline trains in fp32 or bf16, got {asked}: fp16 and fp8 have scales that cannot be recovered in "
                "this version. Use mixed_precision='no' or 'bf16'"
            )
        if mixed_precision == "bf16" and self.get_value("bf16.enabled") is False:
            raise ConfigError(
                "mixed_precision='bf16', but the DeepSpeed configuration has bf16 off: leave its section 'bf16' out"
            )
        super().set_mixed_precision(mixed_precision)
        accelerator = compat.accelerator_under_construction()
        if accelerator is not None:
            self._adopt(accelerator)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        options = {"zero_stage": 0} | given
        source = options.get("hf_ds_config") or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        said = options.get(_STEPS)
        if source != "none":
            options["hf_ds_config"] = source if isinstance(source, HfDeepSpeedConfig) else HfDeepSpeedConfig(source)
            config = options["hf_ds_config"].config
            config.setdefault("zero_optimization", {"stage": 0})
            said = config.get(_STEPS) if said is None else said
            config[_STEPS] = self.micro_batches
        if said not in (None, "auto", self.micro_batches):
            raise ConfigError(
                f"{_STEPS}={said} and micro_batches={self.micro_batches} are two names of one thing, the micro-batches "
                "of a step: leave the former out"
            )
        return options | {_STEPS: self.micro_batches}

    def _create_group(self) -> None:
        """Become ``swiftrun`` or stay what this is, and create the process group.

        Accelerate asks its plugin only when there is a group already, and would create none at all for DeepSpeed on a
        CPU: it must be told the backend, and not that it is to use the CPU.
        """
        if compat.is_set_up() and PartialState().distributed_type != DistributedType.DEEPSPEED:
            raise ConfigError(
                "Accelerate has set up its process group already, for training without DeepSpeed: make the plugin "
                "before the first Accelerator, PartialState or set_seed()"
            )
        if enabled():
            self.swift.hand_over()
            job = install() if launched_by_swiftrun() else None
            self.swift.watch.replays = job is not None and job.reroutes
        if "LOCAL_RANK" not in os.environ:
            raise ConfigError(
                f"a pipeline of {self.num_stages} stages was started as a single process: use swiftrun "
                f"--nproc-per-node {self.num_stages} SCRIPT, or pass swift=SwiftPlugin(num_processes="
                f"{self.num_stages})"
            )
        pipeline.import_deepspeed()
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
        os.environ.pop("ACCELERATE_USE_CPU", None)  # with it, Accelerate leaves DeepSpeed alone
        state = PartialState(**(self.swift.group_options() | {"backend": "gloo"}))
        if state.num_processes % self.num_stages:
            raise ConfigError(
                f"{state.num_processes} workers cannot hold pipelines of {self.num_stages} stages each: start a "
                f"multiple of {self.num_stages}"
            )
        #: Number of pipelines, and which of them this rank is in, as DeepSpeed lays them out.
        self.pipelines = state.num_processes // self.num_stages
        self.pipeline = state.process_index % self.pipelines

    def _adopt(self, accelerator: Accelerator) -> None:
        other = getattr(accelerator, "_swift_plugin", None)
        if other is not None and other is not self.swift:
            raise ConfigError(
                "a SwiftPlugin was given to the Accelerator and another is part of the pipeline plugin: pass it as "
                "SwiftDeepSpeedPipelinePlugin(swift=SwiftPlugin(...)) only"
            )
        self._accelerator = accelerator
        if other is None and enabled() and launched_by_swiftrun():
            self.swift.adopt(accelerator)
        accelerator._pipeline_plugin = self
        compat.become(accelerator, _Pipelined)

    def _check_model(self, model: nn.Module) -> None:
        if not isinstance(model, pipeline.import_deepspeed().PipelineModule):
            raise ConfigError(
                f"the model must be a deepspeed.pipe.PipelineModule, got a {type(model).__name__}: make it of layers, "
                "with plugin.pipeline_module(layers, loss_fn)"
            )
        grid = model.mpu()
        place = (grid.get_data_parallel_world_size(), grid.get_data_parallel_rank())
        if model.num_stages != self.num_stages or place != (self.pipelines, self.pipeline):
            raise ConfigError(
                f"the model has {model.num_stages} stages and pipeline {place[1]} of {place[0]} on this rank, where "
                f"the plugin has {self.num_stages} stages and pipeline {self.pipeline} of {self.pipelines}: give "
                "both the same num_stages, and the model no topology of its own"
            )

    def _fill_batch_size(self, loaders: Sequence[Any], split_batches: bool) -> None:
        """Say how large a micro-batch is, where the configuration leaves that to the loaders.

        DeepSpeed only counts samples by it; batches of other sizes, as of an evaluation, are as good.
        """
        sizes = [loader.batch_size for loader in loaders]
        if self.get_value(_MICRO, "auto") != "auto" or not sizes or None in sizes:
            return
        size = min(sizes) if self.is_train_batch_min else max(sizes)
        parts = self.micro_batches * (self.pipelines if split_batches else 1)
        if size % parts:
            raise ConfigError(
                f"a loader's batch of {size} cannot be cut into {parts} micro-batches: its batch_size is that of a "
                f"whole step of a pipeline, a multiple of {parts}"
            )
        self.deepspeed_config[_MICRO] = size // parts

    def _engine_class(self) -> type:
        recovers = enabled() and launched_by_swiftrun()
        stock = pipeline.import_deepspeed().PipelineEngine
        return compat.mixed(_LoopEngine, pipeline.SwiftPipelineEngine if recovers else stock)

    def _take(self, engine: Any) -> None:
        """``engine`` was made: step boundaries lie where the loop draws its batches."""
        job = self.swift.loop.job
        if job is None:
            return
        engine.drives = self.swift.watch.replays
        self.swift.watch.engine = engine
        self.swift.watch.note_model(engine.module)
        job.checkpoints.keep_number("no restart can repartition a pipeline under Accelerate yet")
        if not self.swift.watch.replays:
            job.register("accelerate.pipeline", lambda: engine.shapes, lambda shapes: setattr(engine, "shapes", shapes))


class _LoopEngine:
    """Goes before a pipeline engine of DeepSpeed's, so that it is called as a model is."""

    #: Shapes of the last micro-batch; None before one.
    shapes: list[list[int]] | None = None

    def forward(self: Any, batch: Any) -> torch.Tensor:
        """Train on a batch, or evaluate it where the model is not in training mode.

        Args:
            batch: inputs and targets: a tensor, or a tuple of tensors, each; ``micro_batches`` times the rows of a
                micro-batch. With bf16, those of fp32 become bf16.

        Returns:
            The mean loss over all pipelines, without dimensions.

        Raises:
            ConfigError: the batch is anything else.
        """
        if self.bfloat16_enabled():
            batch = tree_map(_to_bf16, batch)
        parts, shapes = _cut(batch, self.micro_batches)
        if self.shapes not in (None, shapes):
            self.reset_activation_shape()
        self.shapes = shapes
        run = self.train_batch if self.module.training else self.eval_batch
        loss: torch.Tensor = run(iter(parts))
        return loss.reshape(())

    def clip_fp32_gradients(self: Any) -> None:
        """As DeepSpeed does, and keep the norm, which it forgets."""
        if getattr(self, "reroutes", False):
            return  # whoever sums the gradients clips them
        from deepspeed.runtime.utils import clip_grad_norm_

        self._global_grad_norm = clip_grad_norm_(self.module.parameters(), self.gradient_clipping(), mpu=self.mpu)


def _to_bf16(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


def _cut(batch: Any, count: int) -> tuple[list[Any], list[list[int]]]:
    """``count`` micro-batches of equal size, views of the batch, and the shapes of one."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ConfigError(f"a pipeline is called with one pair, model((inputs, targets)), got a {type(batch).__name__}")
    leaves, structure = tree_flatten(batch)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            raise ConfigError(f"inputs and targets of a pipeline are tensors with rows, got a {type(leaf).__name__}")
        if not len(leaf) or len(leaf) % count:
            raise ConfigError(
                f"a batch of {len(leaf)} rows cannot be cut into {count} micro-batches: the loader's batch_size is a "
                f"multiple of {count}; use drop_last=True where its last batch is not"
            )
    cut = [leaf.split(len(leaf) // count) for leaf in leaves]
    parts = [tree_unflatten([pieces[i] for pieces in cut], structure) for i in range(count)]
    return parts, [list(pieces[0].shape) for pieces in cut]


class _Stepped(DeepSpeedEngineWrapper):  # type: ignore[misc]
    """What ``accelerator.backward`` turns to: the engine has run backward, and stepped, already."""

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Do nothing."""


class _PipelineScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """Steps once for each pipeline in a step of the optimizer, where Accelerate's own steps once for each worker."""

    pipelines: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(1 if self.split_batches or not self.step_with_optimizer else self.pipelines):
            if compat.may_step(self):  # as in Accelerate
                self.scheduler.step(*args, **kwargs)


class _Pipelined(Accelerator):  # type: ignore[misc]
    """An ``Accelerator`` whose model is a pipeline; an existing object is turned into one."""

    _pipeline_plugin: SwiftDeepSpeedPipelinePlugin
    _counts_pipelines = False
    gradient_accumulation_steps: int

    @property
    def num_processes(self) -> int:
        return self._pipeline_plugin.pipelines if self._counts_pipelines else int(super().num_processes)

    @property
    def process_index(self) -> int:
        return self._pipeline_plugin.pipeline if self._counts_pipelines else int(super().process_index)

    @contextlib.contextmanager
    def _counting_pipelines(self) -> Iterator[None]:
        """Inside, data and sizes of batches are divided by pipelines; Accelerate divides them by workers."""
        before, self._counts_pipelines = self._counts_pipelines, True
        try:
            yield
        finally:
            self._counts_pipelines = before

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        if self.dispatch_batches:
            raise Unsupported(
                "dispatch_batches=True gives each worker rows of its own, where all stages of a pipeline need the "
                "same: set dispatch_batches=False"
            )
        self.dataloader_config.dispatch_batches = False  # else Accelerate sets it for iterable datasets
        with self._counting_pipelines():
            generator = self._common_generator(data_loader)
            prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if generator is not None and issubclass(type(prepared), DataLoaderShard):
            prepared.rng_types = [*(prepared.rng_types or ()), "generator"]
            prepared.synchronized_generator = generator
        return prepared

    def _common_generator(self, data_loader: Any) -> torch.Generator | None:
        """The generator that shuffles for a single pipeline; None where Accelerate sees to it.

        Accelerate lets all workers have the same where it deals out batches, and takes one that gets them all to
        be alone.
        """
        sampler = get_sampler(data_loader)
        if (
            self.num_processes > 1
            or compat.is_prepared(data_loader)
            or self.use_seedable_sampler
            or not hasattr(sampler, "generator")
        ):
            return None
        if sampler.generator is None:
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        found: torch.Generator = sampler.generator
        return found

    def _prepare_deepspeed(self, *args: Any) -> Any:
        plugin = self._pipeline_plugin
        if self.gradient_accumulation_steps != 1:
            raise ConfigError(
                f"{_STEPS}={self.gradient_accumulation_steps} of the Accelerator conflicts with the pipeline plugin, "
                f"which accumulates over micro_batches={plugin.micro_batches} in each call: leave the former out"
            )
        models = [each for each in args if isinstance(each, nn.Module)]
        for model in models:
            plugin._check_model(model)
        plugin._fill_batch_size([each for each in args if isinstance(each, DataLoader)], self.split_batches)
        # Accelerate compares it with DeepSpeed's configuration; the loop that it drives accumulates nothing.
        self.gradient_accumulation_steps = plugin.micro_batches
        try:
            with self._counting_pipelines(), pipeline.engines(plugin._engine_class()):
                result = super()._prepare_deepspeed(*args)
        finally:
            self.gradient_accumulation_steps = 1
        for scheduler in compat.schedulers_of(self):
            if type(scheduler) is AcceleratedScheduler:
                scheduler.__class__ = _PipelineScheduler
                scheduler.pipelines = plugin.pipelines
        if models:
            engine = compat.models_of(self)[-1]
            self.deepspeed_engine_wrapped = _Stepped(engine)
            plugin._take(engine)
        return result

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        self._check_checkpoints()
        replays = self._pipeline_plugin.swift.watch.replays
        if replays and any(getattr(model, "catching_up", False) for model in compat.models_of(self)):
            return None  # the others have saved at this place
        return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        self._check_checkpoints()
        return super().load_state(*args, **kwargs)

    def _check_checkpoints(self) -> None:
        """DeepSpeed loses most of what it saves of an optimizer in bf16 without ZeRO, and cannot load the rest."""
        if any(model.bfloat16_enabled() and not model.zero_optimization() for model in compat.models_of(self)):
            raise Unsupported(
                "save_state and load_state in bf16 without ZeRO: DeepSpeed writes the optimizer of only one rank of "
                "each stage, and cannot load it. Give the plugin zero_stage=1"
            )

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """The norm of the gradients of the step that was taken, which the engine has clipped; None where it does
        not clip.

        Raises:
            ConfigError: the engine clips by another norm.
        """
        clipping = compat.models_of(self)[-1].gradient_clipping() if compat.models_of(self) else max_norm
        if max_norm != clipping or norm_type != 2:
            raise ConfigError(
                f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}): the pipeline has clipped its gradients "
                f"and stepped already, with gradient_clipping={clipping} and norm_type=2; give the plugin "
                f"gradient_clipping={max_norm}"
            )
        return super().clip_grad_norm_(parameters, max_norm, norm_type)


__all__ = ["SwiftDeepSpeedPipelinePlugin"]
