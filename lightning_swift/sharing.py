"""``on_failure="reroute"`` under ``swift_ddp``: survivors run ``training_step`` on the failed worker's batches, too.

Each worker computes its share of a step (its batches, with random numbers of their place), and those of failed ranks
that it hosts; a survivor group sums the gradients. What ``training_step`` logs is averaged over all logical ranks in
the same way, so every worker has the same values, and a replacement that copies a peer has the right ones.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader

from lightning_swift import compat
from lightning_swift.compat import ResultCollection
from shared_core import Job
from shared_core.errors import ConfigError, Unsupported
from shared_core.faults import point
from shared_core.loaders import Shards
from shared_core.reroute import Outcome, Shares, start_alike, steps_of

_WHAT = "on_failure='reroute'"
_STEP = "training_step"
#: Place of the random numbers that are drawn between loader and device.
_MOVING = 1


class SharedLoader:
    """The training loader of a rank. Which batch is next follows from where the trainer is."""

    def __init__(self, wrapped: DataLoader[Any], sharing: Sharing) -> None:
        self.wrapped = wrapped
        self.shards = Shards(wrapped, sharing.job.world_size, sharing.seed, _WHAT)
        self._sharing = sharing

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # while unpickling
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __len__(self) -> int:
        return self.shards.per_epoch

    def __iter__(self) -> Iterator[Any]:
        sharing = self._sharing
        while (number := sharing.ready) < self.shards.per_epoch:
            batch = self.shards.read(sharing.job.rank, sharing.epoch, number)
            sharing.fetched(number)
            yield batch


class _Recorder(ResultCollection):
    """Stands for the training loop's results while a share is computed, and keeps what ``training_step`` logs.

    What is logged elsewhere goes to ``results``; None for a share of another rank, of which nothing else is kept.
    """

    def __init__(self, results: ResultCollection | None, batch: Any) -> None:
        super().__init__(training=True)
        self._behind, self._of = results, batch
        #: Name, value, weight, and the options of each call.
        self.entries: list[tuple[str, float, int, dict[str, Any]]] = []

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        if fx == _STEP and isinstance(value, torch.Tensor) and not options["rank_zero_only"]:
            weight = options["batch_size"]
            if weight is None:
                weight = extract_batch_size(self._of) if options["on_epoch"] and _operation(options) == "mean" else 1
            self.entries.append((name, float(value.detach()), weight, options | {"dtype": value.dtype}))
        elif self._behind is not None:
            self._behind.log(fx, name, value, **options)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        if self._behind is not None:
            self._behind.reset(metrics, fx)


class SharedClosure(Closure):
    """Lightning's closure (``training_step`` and backward) of a batch, for the shares of all logical ranks."""

    def __init__(self, inner: Closure, sharing: Sharing) -> None:
        super().__init__(*compat.closure_parts(inner))
        self._sharing = sharing

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._sharing.batch(partial(super().closure, *args, **kwargs))


class Sharing:
    """The training steps of a fit.

    Args:
        untouched: a context after which the module's own attributes, metrics among them, are as they were.
        seed: of random numbers.
        number: of the next step; it counts over all fits, so that no two have the same random numbers.

    ``behind``: the present step boundary is behind the batch: only what follows it (validation, the end of the epoch)
    is left.

    Raises:
        ConfigError: nothing is trained.
        Unsupported: for what cannot be computed by others.
    """

    def __init__(
        self,
        job: Job,
        trainer: pl.Trainer,
        untouched: Callable[[], AbstractContextManager[None]],
        seed: int,
        number: int,
    ) -> None:
        check_sharing(trainer)
        module = trainer.lightning_module
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise ConfigError("nothing is trained: no parameter of the module requires gradients")
        self._apart = Shares(job, [module], seed, _WHAT, _STEP)
        self._trainer, self._module, self._parameters = trainer, module, parameters
        self.job, self.seed = job, seed
        self._untouched, self._known = untouched, {id(p) for p in parameters}
        self._steps = steps_of(job, parameters, self._compute)
        self.number, self.behind = number, False
        self._own: Callable[[], ClosureResult] | None = None
        self._result: ClosureResult | None = None
        #: Gradients and log entries of this rank's earlier batches of an accumulation window.
        self._kept: list[torch.Tensor | None] = []
        self._entries: list[tuple[str, float, int, dict[str, Any]]] = []
        self._called = -1
        #: Entered while this rank's batch gets from its loader to its device.
        self._moving = ExitStack()
        start_alike([module])
        job.register("lightning.sharing", lambda: (self.number, self.behind), self._restore)

    def _restore(self, place: Sequence[Any]) -> None:
        self.number, self.behind = place
        self._entries = []

    @property
    def epoch(self) -> int:
        return self._trainer.current_epoch

    @property
    def ready(self) -> int:
        """Number of the batch in its epoch that is fetched next."""
        return self._trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def fetched(self, index: int) -> None:
        """This rank's batch was read; hooks that see it before :meth:`moved` draw random numbers of its own."""
        self._moving.enter_context(self._apart.share(self.number, self.job.rank, index, _MOVING))

    def moved(self) -> None:
        """A batch is on its device; perhaps this rank's training batch."""
        self._moving.close()

    def settle(self) -> None:
        """At the end of the program: return when nobody needs this worker any more."""
        self._steps.settle(self.number)

    def wait_for_all(self) -> None:
        """Wait until replacements have taken the places of all failed workers. At a step boundary, before its step."""
        self._steps.wait_for_all(self.number)

    def begin_batch(self) -> None:
        """At the step boundary of a batch: wait for all if callbacks will talk to all before its end."""
        trainer = self._trainer
        self._shards = self._loader.shards
        self._shards.keep(self.job.survivor_groups.absent | {self.job.rank})
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise Unsupported(
                    f"parameter {name} was frozen when fit began, and is trained now: {_WHAT} sums gradients of "
                    "those that were trained then. Freeze and unfreeze between two fits, or choose on_failure='replace'"
                )
        ready, every = self.ready + 1, trainer.accumulate_grad_batches
        if ready % every and ready != trainer.num_training_batches:
            return  # no step in this batch
        for callback in getattr(trainer, "callbacks", ()):
            period = compat.period_of(callback) if isinstance(callback, ModelCheckpoint) else 0
            if period and (trainer.global_step + 1) % period == 0:
                self.wait_for_all()

    # -- a batch ------------------------------------------------------------------------------------------------------

    def batch(self, own: Callable[[], ClosureResult]) -> ClosureResult:
        """Run a batch: this rank's share ``own``, and at the end of a window all that is missing of the step."""
        loop = self._trainer.fit_loop
        index = loop.epoch_loop.batch_idx
        if self._called == loop.total_batch_idx:
            raise Unsupported(
                f"the closure of a batch was called twice: {_WHAT} computes each batch once. Call it once in "
                "the module's optimizer_step(), or choose on_failure='replace'"
            )
        self._called = loop.total_batch_idx
        if compat.accumulates(loop):
            with self._share(self.job.rank, index) as recorder:
                result = own()
            self._entries += recorder.entries
        else:
            self._own = own
            self._kept = [p.grad if self._first != index else None for p in self._parameters]
            outcomes = self._steps.run(self.number)
            self.number += 1
            assert self._result is not None
            result, self._result, self._own, self._kept = self._result, None, None, []
            self._log(outcomes)
        assert result.closure_loss is not None
        self._trainer.precision_plugin.post_backward(result.closure_loss, self._module)
        return result

    @property
    def _first(self) -> int:
        index = self._trainer.fit_loop.epoch_loop.batch_idx
        return index - index % self._trainer.accumulate_grad_batches

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._trainer.strategy.optimizers[0]

    def _compute(self, rank: int, number: int) -> Outcome:
        """A rank's share of a step; see :class:`~shared_core.reroute.data_parallel.DataParallelSteps`."""
        if rank == self.job.rank:
            assert self._own is not None
            for parameter, gradient in zip(self._parameters, self._kept, strict=True):
                parameter.grad = gradient
            with self._share(rank, self._trainer.fit_loop.epoch_loop.batch_idx) as recorder:
                self._result = self._own()
            entries = self._entries = self._entries + recorder.entries
            loss = self._result.loss
        else:
            entries, loss = [], None
            with self._untouched():
                for index in range(self._first, self._trainer.fit_loop.epoch_loop.batch_idx + 1):
                    recorder, loss = self._failed_batch(rank, index)
                    entries += recorder.entries
        assert loss is not None
        note = json.dumps([entry[:3] for entry in entries]).encode() if entries else b""
        return Outcome(float(loss), note)

    @contextmanager
    def _share(self, rank: int, index: int, batch: Any = None) -> Iterator[_Recorder]:
        """Compute a batch of a rank in here; its own if none is given."""
        results = compat.results_of(self._trainer)["train"]
        recorder = _Recorder(results, results.batch) if batch is None else _Recorder(None, batch)
        compat.set_training_results(self._trainer, recorder)
        try:
            with self._apart.share(self.number, rank, index):
                point("reroute.forward")
                yield recorder
        finally:
            compat.set_training_results(self._trainer, results)

    def _failed_batch(self, rank: int, index: int) -> tuple[_Recorder, torch.Tensor | None]:
        """Forward and backward of a failed rank's batch: ``training_step``, and no other hook of its callbacks."""
        trainer, loop, strategy = self._trainer, self._trainer.fit_loop, self._trainer.strategy
        batch = self._shards.read(rank, self.epoch, index)
        with self._apart.share(self.number, rank, index, _MOVING):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = compat.before_transfer(self._module, batch)
            batch = strategy.batch_to_device(batch, dataloader_idx=0)
        with self._share(rank, index, batch) as recorder:
            arguments = compat.step_arguments(loop.epoch_loop, OrderedDict(), batch, index)
            result = compat.run_training_step(trainer, arguments)
            assert result.closure_loss is not None
            self._backward(result.closure_loss)
        return recorder, result.loss

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Backward of this rank's batch; what follows it has to wait for the sum."""
        loss = self._trainer.precision_plugin.pre_backward(loss, self._module)
        self._backward(loss)
        return loss

    def _backward(self, loss: torch.Tensor) -> None:
        point("reroute.backward")
        self._trainer.precision_plugin.backward(loss, self._module, self._optimizer)

    @property
    def _loader(self) -> SharedLoader:
        """The training loader. Raises Unsupported if there are several."""
        combined = compat.loader_of(self._trainer.fit_loop)
        loader: Any = None if combined is None else combined.iterables
        if not isinstance(loader, SharedLoader):
            raise Unsupported(
                f"{_WHAT} needs one training loader, not a {type(loader).__name__} of several: use a data set of all, "
                "or choose on_failure='replace'"
            )
        return loader

    # -- logs ---------------------------------------------------------------------------------------------------------

    def _log(self, outcomes: Sequence[Outcome]) -> None:
        """Log what all ranks' ``training_step`` logged, reduced as ``reduce_fx`` says, the same at all workers."""
        own, self._entries = self._entries, []
        notes: list[list[tuple[str, float, int]]] = [json.loads(o.note) if o.note else [] for o in outcomes]
        names = [entry[0] for entry in own]
        for rank, note in enumerate(notes):
            if [entry[0] for entry in note] != names:
                raise Unsupported(
                    f"rank {self.job.rank} logged {names} in {_STEP}, and rank {rank} {[e[0] for e in note]}: with "
                    f"{_WHAT} all ranks must log the same; give what only rank 0 logs rank_zero_only=True"
                )
        for number, (name, _, _, given) in enumerate(own):
            options = {key: value for key, value in given.items() if key != "dtype"}
            values = torch.tensor([note[number][1] for note in notes], dtype=torch.float64)
            weights = torch.tensor([note[number][2] for note in notes], dtype=torch.float64)
            value, weight = _reduced(_operation(options), values, weights)
            # It is the value of all ranks already, so nobody has to be asked at the end of the epoch.
            options |= {"batch_size": weight, "enable_graph": False, "rank_zero_only": True}
            dtype = torch.float64 if given["dtype"] == torch.float64 else torch.get_default_dtype()
            compat.results_of(self._trainer)["train"].log(_STEP, name, value.to(dtype), **options)


def _operation(options: Mapping[str, Any]) -> str:
    """``mean``, ``sum``, ``max`` or ``min``; what else there is, Lightning refuses."""
    given = options["reduce_fx"]
    name = given.lower() if isinstance(given, str) else getattr(given, "__name__", "")
    return "mean" if name == "avg" else str(name)


def _reduced(operation: str, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(value, weight) of all ranks."""
    if operation == "mean":
        return (values * weights).sum() / weights.sum(), int(weights.sum())
    reduce: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, operation)
    return reduce(values), 1


def check_sharing(trainer: pl.Trainer) -> None:
    """Raise Unsupported for what a worker cannot compute for another, or what talks to all in every batch."""
    module = trainer.lightning_module
    refused: list[tuple[bool, str]] = [
        (
            not module.automatic_optimization,
            "manual optimization: what training_step updates cannot be computed for another worker. Use automatic "
            "optimization",
        ),
        (
            is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True),
            "training_step(dataloader_iter): nobody else can read its data. Use training_step(batch, batch_idx)",
        ),
        (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            "fp16, whose scaler counts steps. Use bf16-mixed or 32-true",
        ),
        (
            bool(getattr(trainer, "reload_dataloaders_every_n_epochs", 0)),
            "reload_dataloaders_every_n_epochs: a replacement could not read what the others have read. Leave it out",
        ),
        (
            compat.validates_by_time(trainer),
            "a val_check_interval in time: workers have different clocks. Give a number of batches",
        ),
    ]
    for callback in getattr(trainer, "callbacks", ()):
        refused += [
            (isinstance(callback, Timer), "Timer and max_time, which ask rank 0 in every batch. Use max_steps"),
            (
                isinstance(callback, ModelCheckpoint) and compat.saves_by_time(callback),
                "ModelCheckpoint(train_time_interval), which asks rank 0 in every batch. Use every_n_train_steps",
            ),
        ]
    for is_refused, reason in refused:
        if is_refused:
            raise Unsupported(f"{_WHAT} does not support {reason}, or choose on_failure='replace'")
