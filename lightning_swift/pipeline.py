"""``strategy="swift_deepspeed_pipeline"``: Lightning drives a DeepSpeed pipeline whose stages may fail."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import DeepSpeedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from lightning_swift import compat
from lightning_swift.strategy import SwiftDDPStrategy
from shared_core.errors import ConfigError, MissingExtra, Unsupported
from shared_core.faults import point

if TYPE_CHECKING:
    from shared_core.pipeline import Shard, SwiftPipelineEngine


class SwiftPipelineStrategy(SwiftDDPStrategy):
    """Trains a LightningModule that is a list of layers with DeepSpeed's pipeline engine.

    The module has ``pipeline_layers()``, a list of ``deepspeed.pipe.LayerSpec``, ``TiedLayerSpec``, modules or
    functions, and ``loss(outputs, targets)``. In set-up this rank's layers are built and become the module's
    ``pipeline_stage``, so that in ``configure_optimizers`` ``self.parameters()`` are those of the stage. A batch of
    the loader is a pair (inputs, targets) and one optimizer step: it is split into micro-batches along the first
    dimension. Rank r is in stage ``r // d`` and reads the data of data-parallel index ``r % d``, where d is the number
    of pipelines: workers divided by stages.

    Training, validation and test steps are the strategy's. They log ``train_loss``, ``val_loss`` and ``test_loss``,
    the means over all pipelines, on every rank; a module with ``on_pipeline_loss(stage, loss)`` logs itself.

    Args:
        stages: stages of a pipeline; must divide the number of workers.
        micro_batches: micro-batches of a batch; 4 unless the configuration or ``accumulate_grad_batches`` says.
        partition_method: how layers are dealt out: ``parameters``, ``uniform`` or ``type:REGEX``; see DeepSpeed.
        activation_checkpoint_interval: layers between two checkpoints of activations; 0: all are kept.
        config: configuration of DeepSpeed, or the path of its JSON file.
        on_failure: as in :class:`SwiftDDPStrategy`; not ``shrink``, but ``reroute``: training continues at once without
            a failed worker, whose micro-batches are computed by those that hold the same stage (two pipelines at
            least). Then the shapes of micro-batches must stay the same, and what hooks keep must be the same at all
            workers of a stage.
        checkpoint_io: writes and reads the files of a checkpoint, one a stage.
        precision_plugin: 32-bit or bf16.

    All others are as in :class:`SwiftDDPStrategy`.

    Raises:
        MissingExtra: if DeepSpeed is not installed.
        Unsupported: for ``on_failure="shrink"``, and with ``"reroute"`` for what cannot be re-routed.
        ConfigError: for a bad value.

    Example::

        strategy = lightning_swift.SwiftPipelineStrategy(stages=1, micro_batches=2)
        trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy)
    """

    strategy_name = "swift_deepspeed_pipeline"
    metrics_alike = True

    def __init__(
        self,
        stages: int = 2,
        micro_batches: int | None = None,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        config: Mapping[str, Any] | str | Path | None = None,
        standbys: int = 1,
        on_failure: Literal["replace", "reroute", "restart"] = "replace",
        data: Literal["restore", "refetch", "seeded"] = "restore",
        checkpoint_dir: str | None = None,
        checkpoint_every_steps: int = 0,
        seed: int = 0,
        options: dict[str, Any] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise MissingExtra("pipelines need DeepSpeed: pip install 'swift-recovery[deepspeed]'")
        if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
            raise ConfigError(f"stages must be a whole number of at least 1, got {stages!r}")
        super().__init__(
            standbys=standbys,
            on_failure=on_failure,
            data=data,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every_steps=checkpoint_every_steps,
            seed=seed,
            options=options,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if self.config.resizes:
            raise Unsupported(
                "a pipeline cannot continue with another number of workers: use on_failure='replace' or 'restart', and "
                "leave resize.replace_timeout_s out"
            )
        self.stages = stages
        self._given = (micro_batches, read_config(config))
        self._layer_options = {
            "partition_method": partition_method,
            "activation_checkpoint_interval": activation_checkpoint_interval,
        }
        self._config = self._given[1]
        self._engine: SwiftPipelineEngine | None = None
        #: This rank's part of the optimizer, in bf16 and with ZeRO; else None.
        self._shard: Shard | None = None
        #: Micro-batches of a batch, and batches of a step.
        self._pieces = self._per_step = 1
        #: Micro-batches of this step from batches that were read already (accumulate_grad_batches).
        self._waiting: list[tuple[Any, Any]] = []
        #: Shapes in the last micro-batch that passed the pipeline; None before one.
        self._shapes: list[list[int]] | None = None

    # -- places -------------------------------------------------------------------------------------------------------

    @property
    def pipelines(self) -> int:
        """Data-parallel degree."""
        return self.world_size // self.stages

    @property
    def data_index(self) -> int:
        return self.global_rank % self.pipelines

    @property
    def stage(self) -> int:
        return self.global_rank // self.pipelines

    @property
    def reroutes(self) -> bool:
        """Never: the engine does."""
        return False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All stages of a pipeline read the same batches."""
        return {"num_replicas": self.pipelines, "rank": self.data_index}

    # -- set-up -------------------------------------------------------------------------------------------------------

    def connect(self, model: pl.LightningModule) -> None:
        check_module(model)
        trainer = model.trainer
        if trainer.state.fn == TrainerFn.PREDICTING:
            raise Unsupported("Trainer.predict: only the last stage of a pipeline has outputs; use Trainer.test")
        if compat.syncs_layers(self):
            raise Unsupported("sync_batchnorm: a pipeline's stages do not have the same layers; leave it out")
        precision = str(self.precision_plugin.precision)
        self._config = precision_config(self._given[1], precision)
        if precision != "32-true":
            # Inputs and targets become bf16, and DeepSpeed casts the layers.
            self.precision_plugin = DeepSpeedPrecision("bf16-true")
        if self.world_size % self.stages:
            raise ConfigError(f"stages={self.stages} does not divide the number of workers, {self.world_size}")
        self._pieces, self._per_step = micro_batches_of(*self._given, trainer.accumulate_grad_batches)
        super().connect(model)
        # Lightning looks for these in the module; they are called in the strategy.
        val = (
            trainer.validate_loop if trainer.state.fn == TrainerFn.VALIDATING else trainer.fit_loop.epoch_loop.val_loop
        )
        model.training_step = self.training_step  # type: ignore[method-assign]
        model.test_step = self.test_step  # type: ignore[method-assign]
        if compat.has_source(val):
            model.validation_step = self.validation_step  # type: ignore[method-assign]

    def setup_environment(self) -> None:
        deepspeed = _deepspeed(self.root_device)
        super().setup_environment()
        deepspeed.init_distributed(dist_backend=self.process_group_backend, auto_mpi_discovery=False, verbose=False)

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        stage = self._build(self.lightning_module)
        if fitting:
            self.setup_optimizers(trainer)
        if fitting or self._engine is None or self._engine.module is not stage:
            self._start_engine(stage, trainer, self.optimizers[0] if fitting else None)
        if self.job is not None:
            self._check(trainer)  # again: the module may have added callbacks
            self.job.checkpoints.keep_number("no restart can repartition a pipeline under Lightning yet")
            self.job.register("lightning.pipeline", lambda: self._shapes, self._set_shapes)

    def _build(self, module: pl.LightningModule) -> nn.Module:
        """Build the layers of this rank's stage, once for each module."""
        deepspeed = _deepspeed(self.root_device)
        stage = getattr(module, STAGE, None)
        if not isinstance(stage, deepspeed.PipelineModule):
            user: Any = module
            stage = deepspeed.PipelineModule(
                user.pipeline_layers(), num_stages=self.stages, loss_fn=user.loss, **self._layer_options
            )
            module.add_module(STAGE, stage)
        others = [name for name, _ in module.named_parameters() if not name.startswith(f"{STAGE}.")]
        if others:
            raise ConfigError(
                f"{type(module).__name__} has parameters outside its pipeline ({', '.join(others[:3])}): each rank "
                "would hold those of all stages. Make layers in pipeline_layers(), as LayerSpec(kind, arguments)"
            )
        found: nn.Module = stage
        return found

    def _start_engine(self, stage: nn.Module, trainer: pl.Trainer, optimizer: Optimizer | None) -> None:
        from shared_core.pipeline import Shard, initialize, is_sharded

        if self._engine is not None:
            self._engine.destroy()
        # ZeRO divides an optimizer: without one, it has nothing to do.
        given = {k: v for k, v in self._config.items() if optimizer is not None or k != "zero_optimization"}
        config = engine_config(
            given,
            self._pieces * self._per_step,
            trainer.gradient_clip_val,
            trainer.gradient_clip_algorithm,
        )
        self._engine, *_ = initialize(model=stage, optimizer=optimizer, config=config, dist_init_required=False)
        self._shard = Shard(self._engine.optimizer) if is_sharded(self._engine.optimizer) else None
        self._engine.drives = False
        self._engine.before_step = self._before_step
        self._waiting, self._shapes = [], None

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """As usual; but a replacement that skips a finished fit has no layers yet, and no optimizer."""
        if hasattr(self.lightning_module, STAGE):
            super().setup_optimizers(trainer)

    builds_late = True
    averages = False

    def after_skip(self, trainer: pl.Trainer, ended: Mapping[str, Any] | None) -> None:
        """Make the groups, the layers and the engine that the failed worker made in this call."""
        self.setup(trainer)
        if ended is not None:
            self.put_back(ended)

    def attach(self, modules: list[nn.Module], optimizers: list[Optimizer]) -> None:
        """Nothing: the engine says what is trained."""

    def process_dataloader(self, dataloader: object) -> object:
        if self.lightning_module is not None and self.lightning_module.trainer.training:
            check_loader(dataloader, self._pieces)
        return super().process_dataloader(dataloader)

    def on_train_end(self) -> None:
        """Workers that are away begin where the others are: in the same fit."""
        if not self.joining:
            self.engine.wait_for_all()

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> SwiftPipelineEngine:
        assert self._engine is not None
        return self._engine

    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        batches = self.lightning_module.trainer.num_training_batches
        if batches != float("inf") and batches % self._per_step:
            raise ConfigError(
                f"an epoch of {batches} batches is not a multiple of accumulate_grad_batches={self._per_step}: the "
                "engine's schedule has as many micro-batches in each step. Use limit_train_batches"
            )

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        """Train on a batch, or keep it: the mean loss of the step, on every rank; NaN for a kept batch."""
        assert self.lightning_module is not None
        self._waiting += split(batch, self._pieces)
        if compat.accumulates(self.lightning_module.trainer.fit_loop):
            return torch.tensor(float("nan"))
        pieces, self._waiting = self._waiting, []
        if len(pieces) != self._pieces * self._per_step:
            raise ConfigError(f"an epoch ended after {len(pieces)} of {self._pieces * self._per_step} micro-batches")
        self._prepare(pieces[0])
        loss: torch.Tensor = self.engine.train_batch(iter(pieces))
        self._report("train", loss, rows_of(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> torch.Tensor:
        return self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> torch.Tensor:
        return self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: Any) -> torch.Tensor:
        """The mean loss of a batch of any size, in as many micro-batches as it can be split into."""
        rows = rows_of(batch)
        number = most_pieces(rows, self._pieces * self._per_step)
        # Buffers that the engine allocates here are used by the next training step too.
        with torch.inference_mode(False):
            pieces = split(batch, number)
            self._prepare(pieces[0])
            loss: torch.Tensor = self.engine.eval_batch(iter(pieces), num_micro_batches=number)
        self._report(stage, loss, rows)
        return loss

    def _prepare(self, piece: tuple[Any, Any]) -> None:
        """All ranks read the data, so all know when stages have to tell each other new shapes."""
        shapes = shapes_of(piece)
        if self._shapes not in (None, shapes):
            self.engine.reset_activation_shape()
        self._shapes = shapes

    def _set_shapes(self, shapes: list[list[int]] | None) -> None:
        self._shapes = shapes

    def _report(self, stage: str, loss: torch.Tensor, rows: int) -> None:
        module: Any = self.lightning_module
        if hasattr(module, "on_pipeline_loss"):
            module.on_pipeline_loss(stage, loss)
        else:
            module.log(f"{stage}_loss", loss, prog_bar=True, batch_size=rows, sync_dist=stage != "train")

    def _before_step(self) -> None:
        """Call the user's hooks on complete gradients. Raises Unsupported if one changes what must stay."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        before = self._gradient_versions()
        for hook, arguments in (("on_after_backward", ()), ("on_before_optimizer_step", (self.optimizers[0],))):
            compat.call_hook(trainer, hook, *arguments)
        if self._gradient_versions() != before:
            raise Unsupported(
                "a hook on_after_backward or on_before_optimizer_step changed gradients; with on_failure='reroute' "
                "these are the sum that peers may still ask for, so hooks may only look at them. Use "
                "gradient_clip_val, or on_failure='replace'"
            )

    def _gradient_versions(self) -> list[tuple[int, int]]:
        """Which gradients there are, and how often they were changed, where that is not allowed."""
        if not self.engine.reroutes:
            return []
        return [(id(p.grad), p.grad._version) for p in self.engine.module.parameters() if p.grad is not None]

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Nothing is left to do: backward is part of the engine's schedule."""
        return closure_loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the batch, whose last instruction is the step."""
        return closure()

    # -- checkpoints: a folder with one file a stage -------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """There are no layers to load before."""
        return True

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """In bf16 and with ZeRO that of this rank alone, with the fp32 weights."""
        return super().optimizer_state(optimizer) if self._shard is None else self._shard.capture()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._shard is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for state in checkpoint["optimizer_states"]:
            if "masters" not in state:
                raise ConfigError(
                    "the optimizer in the checkpoint is that of a pipeline without ZeRO, in 32-bit: train on with the "
                    "same precision and zero_optimization"
                )
            self._shard.restore(state)
        if self._engine is not None:
            self._engine.optimizer_loaded()

    def _files(self, filepath: str | Path) -> StageFiles:
        shards = 0 if self._shard is None else self.pipelines
        return StageFiles(str(filepath), self.checkpoint_io, self.stage, self.stages, self.data_index, shards)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a folder: one file a stage, one a rank for sharded optimizers, one of all. A collective."""
        point("checkpoint.write")
        files = self._files(self.broadcast(filepath))
        files.write_parts(checkpoint, storage_options)
        self.barrier()
        if self.is_global_zero:
            files.commit(checkpoint, storage_options)
        self.barrier()
        files.drop_older(checkpoint["global_step"])

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self._files(checkpoint_path).read(weights_only)


def _deepspeed(device: torch.device) -> Any:
    """DeepSpeed, for this kind of device, which it chooses at its first import.

    Raises:
        ConfigError: it has chosen another.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    from shared_core.pipeline import install

    install()
    import deepspeed

    chosen = deepspeed.accelerator.get_accelerator().device_name()
    if chosen != device.type:
        raise ConfigError(
            f"DeepSpeed was imported for {chosen}, but the Trainer uses {device.type}: set DS_ACCELERATOR={device.type}"
        )
    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    return deepspeed


# -- what needs neither a process group nor DeepSpeed -----------------------------------------------------------------


#: Attribute of the LightningModule that holds the layers of this rank's stage.
STAGE = "pipeline_stage"
#: Micro-batches of a step where nobody says how many.
_MICRO_BATCHES = 4
#: What the strategy does itself, and a LightningModule cannot change.
_OWNED = {
    "training_step": "the engine runs the schedule: give the layers in pipeline_layers() and the loss in loss()",
    "validation_step": "the engine evaluates and logs val_loss; define on_pipeline_loss() to log something else",
    "test_step": "the engine evaluates and logs test_loss; define on_pipeline_loss() to log something else",
    "backward": "each micro-batch's backward is an instruction of the engine's schedule",
    "optimizer_step": "the step is an instruction of the engine's schedule; on_before_optimizer_step() is called",
    "configure_gradient_clipping": "the engine clips, by one norm for all stages: use Trainer(gradient_clip_val=...)",
}
_TRAINER_FILE = "trainer.ckpt"
_STATE, _OPTIMIZERS = "state_dict", "optimizer_states"


def check_module(module: pl.LightningModule) -> None:
    """Raise ConfigError for a module that is no list of layers, or wants to do what the engine does."""
    name = type(module).__name__
    for method, reason in _OWNED.items():
        if getattr(type(module), method) is not getattr(pl.LightningModule, method):
            raise ConfigError(f"{name} overrides {method}(), which a pipeline does not call: {reason}")
    for method, what in (("pipeline_layers", "the list of its layers"), ("loss", "the loss of (outputs, targets)")):
        if not callable(getattr(module, method, None)):
            raise ConfigError(f"{name} has no {method}(), which returns {what}: a pipeline needs it")
    if not module.automatic_optimization:
        raise ConfigError(f"{name} sets automatic_optimization=False: the engine steps the optimizer itself")


def micro_batches_of(given: int | None, config: Mapping[str, Any], accumulate: int) -> tuple[int, int]:
    """(micro-batches that one batch of the loader is split into, loader's batches of one optimizer step).

    ``accumulate`` is ``Trainer(accumulate_grad_batches=...)``, 1 if not given. Raises ConfigError for a contradiction.
    """
    steps = config.get("gradient_accumulation_steps")
    if given is not None and steps not in (None, "auto", given):
        raise ConfigError(
            f"micro_batches={given}, but the DeepSpeed configuration has gradient_accumulation_steps={steps}: they are "
            "the same thing, leave one out"
        )
    number = given if given is not None else steps if isinstance(steps, int) else None
    if accumulate > 1:
        if number is not None:
            raise ConfigError(
                f"Trainer(accumulate_grad_batches={accumulate}) makes each batch of the loader one micro-batch, and "
                f"{number} micro-batches per batch were given as well: leave one out"
            )
        return 1, accumulate
    number = _MICRO_BATCHES if number is None else number
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"micro_batches must be a whole number of at least 1, got {number!r}")
    return number, 1


def engine_config(
    config: Mapping[str, Any], micro_batches: int, clip: float | None, algorithm: str | None
) -> dict[str, Any]:
    """DeepSpeed's configuration, from the user's and the Trainer's clipping; ``micro_batches`` of a step.

    Raises ConfigError for what Lightning does and for a contradiction, Unsupported for clipping by value.
    """
    for section, instead in (("optimizer", "the optimizer"), ("scheduler", "the scheduler, which Lightning steps,")):
        if section in config:
            raise ConfigError(
                f"the DeepSpeed configuration has a section {section!r}, but {instead} comes from "
                "configure_optimizers(): remove the section"
            )
    if clip and algorithm is not None and str(getattr(algorithm, "value", algorithm)) != "norm":
        raise Unsupported(
            "gradient_clip_algorithm='value': DeepSpeed's engine clips by the norm only. Leave "
            "gradient_clip_algorithm out"
        )
    limit = config.get("gradient_clipping")
    if clip is not None and limit not in (None, "auto", clip):
        raise ConfigError(
            f"Trainer(gradient_clip_val={clip}), but the DeepSpeed configuration has gradient_clipping={limit}: leave "
            "one out"
        )
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,  # as with Lightning's own strategy
        **config,
    }
    made["gradient_accumulation_steps"] = micro_batches
    if clip is not None:
        made["gradient_clipping"] = clip
    return made


def precision_config(config: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """DeepSpeed's configuration with the Trainer's precision in it, as Lightning spells it out.

    Raises ConfigError for a contradiction, Unsupported for all but fp32, bf16 and ZeRO stages 0 and 1.
    """
    if precision not in ("32-true", "bf16-true", "bf16-mixed") or _enabled(config, "fp16"):
        asked = "a section 'fp16' in the DeepSpeed configuration" if _enabled(config, "fp16") else repr(precision)
        raise Unsupported(
            f"precision: a pipeline trains in 32-bit or bf16, got {asked}: fp16 has a loss scale that cannot be "
            "recovered in this version. Use precision='bf16-true', or leave precision out"
        )
    stage = dict(config.get("zero_optimization") or {}).get("stage", 0)
    if stage not in (0, 1):
        raise Unsupported(f"zero_optimization has stage {stage}: a pipeline can use stage 1, or leave the section out")
    wanted, said = precision != "32-true", _enabled(config, "bf16")
    if said not in (None, wanted):
        raise ConfigError(
            f"Trainer(precision={precision!r}), but the DeepSpeed configuration has bf16 {'on' if said else 'off'}: "
            "leave the section 'bf16' out, and say precision='bf16-true' for bf16"
        )
    made = dict(config)
    if wanted:
        made["bf16"] = {**dict(config.get("bf16") or {}), "enabled": True}
    return made


def _enabled(config: Mapping[str, Any], section: str) -> bool | None:
    """Whether a section is switched on; None if nothing is said."""
    said = dict(config.get(section) or {}).get("enabled", "auto")
    return None if said == "auto" else bool(said)


def read_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """DeepSpeed's configuration as plain data, also from a JSON file; ConfigError where that cannot be read."""
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    try:
        found = json.loads(Path(config).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the DeepSpeed configuration {config}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"the DeepSpeed configuration {config} must hold options, not {type(found).__name__}")
    return found


# -- batches ----------------------------------------------------------------------------------------------------------


def rows_of(batch: Any) -> int:
    """First dimension of all tensors of a batch. ConfigError if it is no pair, or the tensors differ in it."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise ConfigError(
            f"a batch is a {type(batch).__name__}, not a pair (inputs, targets): a pipeline's first stage reads the "
            "inputs and its last one the targets. Return pairs from the data set, or make them in collate_fn"
        )
    leaves = tree_leaves(batch)
    if not all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves):
        raise ConfigError("inputs and targets must be tensors (or tuples of tensors) with a dimension for the rows")
    rows = {len(leaf) for leaf in leaves}
    if len(rows) != 1:
        raise ConfigError(f"the tensors of a batch have different numbers of rows: {sorted(rows)}")
    return rows.pop()


def split(batch: Any, pieces: int) -> list[tuple[Any, Any]]:
    """Split a batch along the first dimension, into views. ConfigError if that leaves a rest."""
    rows = rows_of(batch)
    if not rows or rows % pieces:
        raise ConfigError(_uneven(rows, pieces))
    size = rows // pieces

    def piece(number: int) -> tuple[Any, Any]:
        inputs, targets = (
            tree_map(lambda leaf: leaf[number * size : (number + 1) * size], part) for part in (batch[0], batch[1])
        )
        return inputs, targets

    return [piece(number) for number in range(pieces)]


def most_pieces(rows: int, limit: int) -> int:
    """The largest number of equal pieces, at most ``limit``, of a batch that is evaluated."""
    return max(number for number in range(1, limit + 1) if rows % number == 0)


def shapes_of(piece: Any) -> list[list[int]]:
    return [list(leaf.shape) for leaf in tree_leaves(piece)]


def check_loader(loader: object, pieces: int) -> None:
    """Raise ConfigError for a training loader that shows before training that a batch cannot be split."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(loader, DataLoader) or loader.batch_size is None or not hasattr(sampler, "__len__"):
        return
    samples = len(loader.sampler)  # type: ignore[arg-type]
    for rows in [loader.batch_size] * (samples >= loader.batch_size) + [samples % loader.batch_size] * (
        not loader.drop_last
    ):
        if rows % pieces:
            raise ConfigError(_uneven(rows, pieces))


def _uneven(rows: int, pieces: int) -> str:
    return (
        f"a batch of {rows} rows cannot be split into {pieces} micro-batches: choose a batch size that is a multiple "
        "of micro_batches, and DataLoader(drop_last=True) where the last batch of an epoch is smaller"
    )


# -- checkpoints ------------------------------------------------------------------------------------------------------


class StageFiles:
    """A checkpoint: a folder with one file a stage, and one with what all ranks share, written last.

    Where the optimizer of a stage is divided over its ranks, each of these has a file, too. The shared file names the
    others. Files of an older checkpoint in the same folder stay until the new one is complete.

    Args:
        folder: path or URL.
        io: writes and reads files.
        index: data-parallel index of this rank.
        shards: ranks that the optimizer of a stage is divided over; 0: each of them has it all.
    """

    def __init__(self, folder: str, io: CheckpointIO, stage: int, stages: int, index: int = 0, shards: int = 0) -> None:
        self._folder, self._io, self._stage, self._stages = folder.rstrip("/"), io, stage, stages
        self._index, self._shards = index, shards

    def _parts(self, step: int) -> dict[str, tuple[str, ...]]:
        """Files of this rank's stage and what is in them; its own shard only."""
        stage, rest = f"stage{self._stage}-of-{self._stages}", f"step{step}.ckpt"
        if not self._shards:
            return {f"{stage}-{rest}": (_STATE, _OPTIMIZERS)}
        shard = f"{stage}-shard{self._index}-of-{self._shards}-{rest}"
        return {f"{stage}-{rest}": (_STATE,), shard: (_OPTIMIZERS,)}

    def write_parts(self, checkpoint: Mapping[str, Any], options: Any) -> None:
        """Write what this rank alone has, and, by the stage's first rank, what the stage alone has."""
        for file, names in self._parts(checkpoint["global_step"]).items():
            part = {name: checkpoint[name] for name in names if name in checkpoint}
            if part and (self._index == 0 or _STATE not in names):
                self._io.save_checkpoint(part, f"{self._folder}/{file}", options)

    def commit(self, checkpoint: Mapping[str, Any], options: Any) -> None:
        """Write what all ranks share; call it on one rank, once all parts are there."""
        shared = {name: value for name, value in checkpoint.items() if name not in (_STATE, _OPTIMIZERS)}
        shared |= {"pipeline_stages": self._stages, "pipeline_shards": self._shards if _OPTIMIZERS in checkpoint else 0}
        self._io.save_checkpoint(shared, f"{self._folder}/{_TRAINER_FILE}", options)

    def drop_older(self, step: int) -> None:
        """Remove parts of this stage that the shared file does not name any more; done by the stage's first rank."""
        if self._index:
            return
        fs = get_filesystem(self._folder)
        for path in fs.glob(f"{self._folder}/stage{self._stage}-of-*.ckpt"):
            if not path.endswith(f"-step{step}.ckpt"):
                fs.rm(path)

    def read(self, weights_only: bool | None) -> dict[str, Any]:
        """The checkpoint of this stage, as Lightning knows it. ConfigError if it is incomplete, or of other stages."""
        fs = get_filesystem(self._folder)
        if not fs.exists(f"{self._folder}/{_TRAINER_FILE}"):
            raise ConfigError(
                f"{self._folder} is not a complete checkpoint of a pipeline: it has no {_TRAINER_FILE}, which is "
                "written last. Choose another one"
            )
        shared = self._io.load_checkpoint(f"{self._folder}/{_TRAINER_FILE}", weights_only=weights_only)
        stages = shared.pop("pipeline_stages", None)
        if stages != self._stages:
            raise ConfigError(
                f"{self._folder} is the checkpoint of a pipeline of {stages} stages, and this one has {self._stages}: "
                "use as many"
            )
        shards = shared.pop("pipeline_shards", 0)
        parts = self._parts(shared["global_step"])
        if self._shards and shards != self._shards:
            if shards:
                raise ConfigError(
                    f"{self._folder} has the optimizer of each stage in {shards} parts, one for each of its ranks, and "
                    f"now there are {self._shards}: use as many pipelines"
                )
            parts.pop(next(file for file, names in parts.items() if _OPTIMIZERS in names))
        for part in parts:
            shared |= self._io.load_checkpoint(f"{self._folder}/{part}", weights_only=weights_only)
        return shared
