"""What is trained under an ``Accelerator``, and whether its loaders mark the step boundaries."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from accelerate import Accelerator
from accelerate.utils import model_has_dtensor
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accelerate_swift import compat
from shared_core import Job, SwiftConfig, TrainingLoop
from shared_core.adapters import LoopProgress
from shared_core.devices import check as check_device
from shared_core.encoding import holds_more, holds_weights
from shared_core.errors import Unsupported
from shared_core.events import console_once

# -- whether all workers train the same parameters, so that one can stand in for another ------------------------------


_ALONE = (
    "{} of the parameters that are trained are not in DistributedDataParallel, so each worker trains a copy of its "
    "own, and none can stand in for another. evaluate() or predict() before train() has this effect: use "
    "eval_on_start=True"
)
_APART = (
    "an update is made while gradients are not summed over the workers, as under LocalSGD or with optimizer.step() "
    "inside no_sync(): their parameters then differ, and none can stand in for another. Leave that out, or set "
    "SWIFT_RECOVERY=0 to train without recovery"
)


def refuse_alone(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Raise Unsupported for a ``transformers.Trainer`` whose workers train parameters that nothing keeps equal."""
    summed = {id(each) for model in models if isinstance(model, DistributedDataParallel) for each in model.parameters()}
    alone = [each for each in _parameters(optimizers) if id(each) not in summed and not isinstance(each, DTensor)]
    if alone:
        raise Unsupported(_ALONE.format(len(alone)))


def refuse_apart(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Any]:
    """Have each update refused that is made from gradients of this worker alone; returns handles that end this."""
    handles = []
    for optimizer in optimizers:
        own = {id(each) for each in _parameters([optimizer])}
        wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
        wrapped = [model for model in wrapped if own & {id(each) for each in model.parameters()}]
        if wrapped:
            handles.append(optimizer.register_step_pre_hook(partial(_refuse_unsummed, wrapped)))
    return handles


def _refuse_unsummed(models: Sequence[DistributedDataParallel], *_: Any) -> None:
    if not any(model.require_backward_grad_sync for model in models):
        raise Unsupported(_APART)


def _parameters(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [each for group in groups for each in group["params"] if each.requires_grad]


#: How Accelerate leaves a sharded model as it is.
_PREPARE = "prepare it with accelerator.prepare_model(model, evaluation_mode=True). See docs/accelerate.md"


class Watch:
    """What is trained; shared by the plugin, the ``Accelerator`` that it has taken, and its loaders.

    Attributes:
        progress: of the core's loop; without a job until :meth:`begin`.
        loop: that loop, as the script uses it.
        replays: a replacement runs the whole script, and its engine skips the calls that others have finished.
        fetching: None where loaders mark the step boundaries. A ``transformers.Trainer`` marks them itself, and says
            here whether it fetches what it trains on: its models may be in evaluation mode then.
        engine: a pipeline engine, which says itself what is trained; else None.
    """

    def __init__(self) -> None:
        self.progress = LoopProgress(name="plugin")
        self.loop = TrainingLoop(self.progress)
        self.replays = False
        self.fetching: bool | None = None
        self.engine: Any = None
        self._accelerator: Accelerator | None = None
        self._models: list[nn.Module] = []
        self._attached: list[Any] = []
        self._handles: list[Any] = []
        self._numbered = self._kept = 0
        self._epoch_keys: list[str] = []

    def begin(self, accelerator: Accelerator, job: Job, config: SwiftConfig) -> None:
        self._accelerator = accelerator
        self.progress.begin(job, config, replays=self.replays)

    def begin_epoch(self) -> None:
        """An epoch begins: loaders of the one before are gone."""
        while self._epoch_keys:
            self.progress.loaders.forget(self._epoch_keys.pop())

    def begin_training(self) -> None:
        """A training loader is about to be iterated: say what is trained, and check that this can work."""
        assert self.loop.job is not None
        self.progress.refuse_own_steps()
        self.attach()

    def refuse_look(self) -> NoReturn:
        """All workers start again: others would have to deal out a batch again that they have had."""
        job = self.loop.job
        assert job is not None
        job.fall_back(
            f"rank {job.rank}: the script asks for a batch of a training loader with next(), outside its pass, and "
            "with dispatch_batches=True rank 0 would have to deal it out again: look at a batch inside the pass, or "
            "set dispatch_batches=False"
        )

    def attach(self) -> None:
        """Tell the job what is trained, if that has changed. Raises Unsupported for what cannot be recovered."""
        accelerator, job = self._accelerator, self.loop.job
        assert accelerator is not None and job is not None
        if accelerator.num_processes != job.world_size:
            raise Unsupported(
                f"swiftrun started {job.world_size} workers, but this Accelerator sees {accelerator.num_processes}: "
                "without a GPU, pass Accelerator(cpu=True) or set ACCELERATE_USE_CPU=true"
            )
        kind = accelerator.distributed_type.value
        check_device(accelerator.device, "the model", allowed=job.config.uses_devices)
        if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED"):
            raise Unsupported(
                f"recovery under Accelerate's {kind} is not in this version: only MULTI_CPU, MULTI_GPU and DEEPSPEED "
                "are supported"
            )
        if self.engine is not None:
            return
        models = self._models
        asked = os.environ.get("ACCELERATE_USE_FSDP") == "true"  # by the script, or by accelerate launch
        if asked and job.rank == 0 and not any(map(model_has_dtensor, models)):
            console_once(
                "fsdp_plugin",
                "Accelerate shards on GPUs only: on a CPU it ignores fsdp_plugin, and uses DistributedDataParallel. "
                "How to shard here: docs/accelerate.md",
            )
        # An engine of DeepSpeed has its optimizer inside.
        inside = kind == "DEEPSPEED"
        optimizers: list[Optimizer] = [] if inside else [each.optimizer for each in compat.optimizers_of(accelerator)]
        trained = [*models, *optimizers]
        if len(trained) != len(self._attached) or any(a is not b for a, b in zip(trained, self._attached, strict=True)):
            self._attached = trained
            job.attach(models, optimizers)
            if optimizers:
                job.keep_images()
            self._check_alike(job, optimizers)
            if any(holds_weights(each) for each in compat.registered(accelerator)):
                job.keep_boundaries()
            for number, each in enumerate(compat.schedulers_of(accelerator)):
                if holds_more(each.scheduler):
                    job.variables.tell(f"scheduler {number}", each.scheduler)

    def _check_alike(self, job: Job, optimizers: list[Optimizer]) -> None:
        """Raise Unsupported where the workers do not train the same."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if job.world_size > 1 and not job.reroutes:
            if self.fetching is not None:  # a Trainer has all in one model
                refuse_alone(self._models, optimizers)
            self._handles = refuse_apart(self._models, optimizers)

    @property
    def training(self) -> bool:
        """Whether what is read now is trained on. Raises Unsupported for a sharded model that was not prepared."""
        if self.fetching is not None:
            return self.fetching
        if not self._models and self._trains_shards():
            raise Unsupported(
                f"nobody can be replaced in the training of a sharded model that was not prepared: {_PREPARE}"
            )
        # DeepSpeed's engine passes the mode on, and stays in its own.
        return any(getattr(model, "module", model).training for model in self._models)

    def _trains_shards(self) -> bool:
        from torch.distributed.tensor import DTensor

        assert self._accelerator is not None
        groups = [group for each in compat.optimizers_of(self._accelerator) for group in each.param_groups]
        return any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])

    def refuse_wrapping(self, model: nn.Module) -> None:
        """Raise Unsupported where Accelerate would put ``DistributedDataParallel`` around a sharded model."""
        if model_has_dtensor(model):
            raise Unsupported(
                f"on a CPU Accelerate puts DistributedDataParallel around a sharded model, too, unless you {_PREPARE}"
            )

    def note_model(self, prepared: Any) -> Any:
        """Remember a model as it is after Accelerate has wrapped it; Accelerate itself keeps what it was before."""
        if not any(prepared is each for each in self._models):
            self._models.append(prepared)
        return prepared

    def next_key(self) -> str:
        """Names loaders in their order, those of an epoch apart: a replacement prepares none of earlier epochs."""
        if self.loop.epoch is not None:
            self._epoch_keys.append(f"epoch {len(self._epoch_keys) + 1}")
            return self._epoch_keys[-1]
        self._numbered += 1
        return str(self._numbered)

    def kept_key(self) -> str:
        self._kept += 1
        return f"kept {self._kept}"
