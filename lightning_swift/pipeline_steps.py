"""The steps of a pipeline under Lightning: training, validation and test steps, and the hooks around an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_swift import compat
from lightning_swift.pipeline_parts import most_pieces, rows_of, shapes_of, split
from lightning_swift.strategy import SwiftDDPStrategy
from shared_core.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from shared_core.pipeline import SwiftPipelineEngine


class PipelineSteps(SwiftDDPStrategy):
    """What :class:`~lightning_swift.pipeline.SwiftPipelineStrategy` does with each batch."""

    _engine: SwiftPipelineEngine | None
    #: Micro-batches of a batch, and batches of a step.
    _pieces: int
    _per_step: int
    #: Micro-batches of this step from batches that were read already (accumulate_grad_batches).
    _waiting: list[tuple[Any, Any]]
    #: Shapes in the last micro-batch that passed the pipeline; None before one.
    _shapes: list[list[int]] | None

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
