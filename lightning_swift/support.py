"""What cannot be recovered exactly is refused before training starts. ``docs/lightning.md`` lists it all."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
)
from lightning.pytorch.strategies import FSDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MetricTracker

from lightning_swift.averages import AVERAGING
from shared_core import SwiftConfig
from shared_core.errors import ConfigError, Unsupported

_CALLBACKS: tuple[tuple[type[pl.Callback], str], ...] = (
    (
        BaseFinetuning,
        "fine-tuning callbacks add parameter groups while training runs; freeze layers before fit and train in "
        "several fits",
    ),
    (ModelPruning, "ModelPruning replaces parameters while training runs; prune before fit"),
    (BatchSizeFinder, "BatchSizeFinder runs trial fits inside a fit; find the batch size in a run of its own"),
    (LearningRateFinder, "LearningRateFinder runs trial fits inside a fit; find the learning rate in a run of its own"),
)


def check_trainer(trainer: pl.Trainer, *, averages: bool = True) -> None:
    """Raise Unsupported for what is asked of this trainer and cannot be recovered."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        for kind, reason in _CALLBACKS:
            if isinstance(callback, kind):
                raise Unsupported(f"swift recovery does not support {type(callback).__name__}: {reason}")
        if not averages and isinstance(callback, AVERAGING):
            raise Unsupported(
                f"swift recovery does not support {type(callback).__name__} in a pipeline, with sharded "
                "models or with on_failure='reroute': nobody else has a failed worker's average. Choose "
                "strategy='swift_ddp' with on_failure='replace', or average checkpoints after training"
            )
    module = trainer.lightning_module
    for name, part in module.named_modules() if module is not None else ():
        if isinstance(part, MetricTracker):
            raise Unsupported(
                f"swift recovery does not support MetricTracker ({name}): it adds modules while training runs, which a "
                "worker that takes a failed one's place would not have. Use the metric itself, and keep what it "
                "computes in a list"
            )


def check_overlapped_update(trainer: pl.Trainer) -> None:
    """With ``state.overlapped_update``: raise Unsupported for what changes gradients after backward."""
    scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
    if trainer.gradient_clip_val or scaler:
        what = "precision='16-mixed'" if scaler else f"gradient_clip_val={trainer.gradient_clip_val}"
        raise Unsupported(
            f"state.overlapped_update updates parameters before Trainer({what}) could change their gradients: leave "
            "one of them off"
        )


def check_ddp_options(
    comm_state: object | None, comm_hook: Any, comm_wrapper: Any, averaging: int | None, options: dict[str, Any]
) -> None:
    """Raise Unsupported for options whose state cannot be rebuilt, ConfigError for unknown ones."""
    known = {
        *inspect.signature(DistributedDataParallel.__init__).parameters,
        *inspect.signature(SwiftConfig).parameters,
    }
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"unknown option {name!r} of the strategy{hint}")
    if comm_state is not None or comm_hook is not None or comm_wrapper is not None:
        name = getattr(comm_hook, "__name__", type(comm_hook or comm_state).__name__)
        raise Unsupported(
            f"swift recovery does not support the DDP communication hook {name}: its state (PowerSGD's error "
            "feedback, for instance) is not published. Remove ddp_comm_hook, ddp_comm_state and "
            "ddp_comm_wrapper"
        )
    if averaging is not None:
        raise Unsupported(
            "swift recovery does not support model_averaging_period (post-local SGD): replicas differ between "
            "averages, so none can stand in for another. Remove it"
        )


def refuse_strategy(strategy: object) -> Unsupported:
    if isinstance(strategy, FSDPStrategy):
        why = "it shards with FullyShardedDataParallel (FSDP1). Call fully_shard() in configure_model() and choose"
        instead = "swift_fsdp"
    else:
        why, instead = "spawned workers, and strategies of other kinds, cannot be recovered. Choose", "swift_ddp"
    return Unsupported(
        "swift recovery works with strategy='ddp', 'swift_ddp' or 'swift_fsdp', not with "
        f"{type(strategy).__name__}: {why} strategy={instead!r}, or remove SwiftCallback (or SWIFT_RECOVERY from the "
        "environment)"
    )


# -- the separate package ``pytorch_lightning`` -----------------------------------------------------------------------


def _refuse_package(**_: Any) -> Any:
    raise Unsupported(
        "lightning_swift works with the package 'lightning' (import lightning.pytorch as pl), but this Trainer comes "
        "from 'pytorch_lightning', whose classes are different ones. Change the import to lightning.pytorch; nothing "
        "else differs"
    )


def _refuse_in(module: ModuleType) -> None:
    registry = module.StrategyRegistry
    if "swift_ddp" not in registry:
        registry.register("swift_ddp", _refuse_package, description="refused: import lightning.pytorch instead")


class _RefusingFinder(MetaPathFinder):
    """Registers the refusal when ``pytorch_lightning`` is imported after us; it is never imported because of us."""

    _name = "pytorch_lightning.strategies"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Loader = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _refuse_in(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def refuse_pytorch_lightning() -> None:
    """Have ``strategy="swift_ddp"`` explain itself in a Trainer of the separate package."""
    known = sys.modules.get("pytorch_lightning.strategies")
    if known is not None:
        _refuse_in(known)
    elif not any(isinstance(finder, _RefusingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RefusingFinder())
