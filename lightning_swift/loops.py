"""Lightning's loops with step boundaries in them.

Lightning has no hook before a batch is fetched, and none around a stand-alone evaluation, so the loops of a trainer get
these classes. They add no state of their own: the objects that Lightning and the user hold stay the same.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_swift import compat
from lightning_swift.recovering import RecoveringStrategy
from lightning_swift.sharing import SharedClosure
from shared_core.errors import Unsupported
from shared_core.faults import point


def _strategy(trainer: pl.Trainer) -> RecoveringStrategy:
    strategy: Any = trainer.strategy
    found: RecoveringStrategy = strategy
    return found


class SwiftTrainingEpochLoop(compat.TrainingEpochLoop):
    """Marks the step boundary of each batch, before the fetch."""

    def advance(self, data_fetcher: compat.DataFetcher) -> None:
        # In the middle of an accumulation window gradients are pending, which are nobody's published state. The last
        # window of an epoch may be short, but then the next batch is the first of its epoch: nothing is pending at
        # `ready == 0`. A pass that only makes statistics of batch normalization has no gradients.
        automatic = self.trainer.lightning_module.automatic_optimization and not compat.only_measures(
            self.trainer.fit_loop
        )
        pending = automatic and self.batch_progress.current.ready % self.trainer.accumulate_grad_batches != 0
        strategy = _strategy(self.trainer)
        strategy.step_boundary(accumulating=pending)
        if self.batch_progress.current.ready == 0:
            self._expect(strategy)
        sharing = strategy.sharing
        if sharing is None:
            super().advance(data_fetcher)
            return
        if not sharing.behind:
            sharing.begin_batch()
            try:
                super().advance(data_fetcher)
            except StopIteration as stop:
                raise Unsupported(
                    "on_failure='reroute' does not support on_train_batch_start() that returns -1: use "
                    "limit_train_batches, or choose on_failure='replace'"
                ) from stop
            if not self.done and not compat.validates_next(self, data_fetcher):
                return
            # What follows talks to all workers. A replacement is admitted at a step boundary, so this is one.
            sharing.behind = True
            strategy.step_boundary(accumulating=compat.accumulates(self))
        sharing.wait_for_all()
        sharing.behind = False

    def _expect(self, strategy: Any) -> None:
        """Tell those who watch the job how many batches are still to come, where that is known."""
        trainer, left = self.trainer, float("inf")
        if trainer.max_epochs not in (None, -1):
            left = (trainer.max_epochs - trainer.current_epoch) * trainer.num_training_batches
        if trainer.max_steps != -1:
            left = min(left, (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        if strategy.job is not None and math.isfinite(left):
            strategy.job.expect_steps(int(left))

    def _broadcast_sigterm_tensor(self) -> None:
        """Nothing: nobody sets this flag, and Lightning drops whatever error its collective meets."""


class SwiftAutomaticOptimization(compat.AutomaticOptimization):
    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        closure = super()._make_closure(kwargs, optimizer, batch_idx)
        sharing = _strategy(self.trainer).sharing
        return closure if sharing is None else SharedClosure(closure, sharing)


class SwiftFitLoop(compat.FitLoop):
    """Notes the random state before the user's hooks make loaders, which a replacement may have to repeat later."""

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        # A replacement gets the failed worker's place at the step boundary. The file may be newer than that
        # (ckpt_path="last"), even of the end, and then no step boundary would follow.
        if not _strategy(self.trainer).joining:
            super().load_state_dict(state_dict, prefix)

    def setup_data(self) -> None:
        data = _strategy(self.trainer).run_state.data
        data.begin_pass()
        if not compat.remakes_training_loaders(self):
            return
        data.before_request("train")
        super().setup_data()
        data.tell_fetch_ahead()


class SwiftEvaluationLoop(compat.EvaluationLoop):
    """A stand-alone evaluation starts at a recovery point; a replacement does not repeat the sanity check."""

    def run(self) -> Any:
        strategy = _strategy(self.trainer)
        if compat.purpose(self) != TrainerFn.FITTING:
            strategy.eval_boundary()
        elif self.trainer.sanity_checking and strategy.joining:
            # Its results are thrown away; but the loaders are made here, in their place in the random numbers.
            self.setup_data()
            return []
        return super().run()

    def setup_data(self) -> None:
        if compat.purpose(self) == TrainerFn.FITTING and compat.remakes_validation_loaders(self):
            _strategy(self.trainer).run_state.data.before_request("val")
        super().setup_data()

    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        if not self.trainer.sanity_checking:
            point("validation", batch=batch_idx)
        super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)


class SwiftPredictionLoop(compat.PredictionLoop):
    def run(self) -> Any:
        _strategy(self.trainer).eval_boundary()
        return super().run()


class SwiftSignalConnector(compat.SignalConnector):
    """Leaves SIGTERM alone: it ends the process. Lightning's handler would issue a collective anywhere."""

    def register_signal_handlers(self) -> None:
        self.received_sigterm = False


_CLASSES: tuple[tuple[type, type], ...] = (
    (compat.TrainingEpochLoop, SwiftTrainingEpochLoop),
    (compat.AutomaticOptimization, SwiftAutomaticOptimization),
    (compat.FitLoop, SwiftFitLoop),
    (compat.EvaluationLoop, SwiftEvaluationLoop),
    (compat.PredictionLoop, SwiftPredictionLoop),
    (compat.SignalConnector, SwiftSignalConnector),
)


def adopt_loops(trainer: pl.Trainer) -> None:
    """Give the trainer's loops the classes above. Raises Unsupported for a loop class of the user's own."""
    for part in compat.replaceable_parts(trainer):
        ours = dict(_CLASSES).get(type(part))
        if ours is not None:
            part.__class__ = ours
        elif type(part) not in dict(_CLASSES).values():
            raise Unsupported(
                f"the trainer uses {type(part).__name__} in place of one of Lightning's loops, where recovery has no "
                "step boundaries; use Lightning's own loops, or train without lightning_swift"
            )
