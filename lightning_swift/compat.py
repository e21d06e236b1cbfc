"""All private names of Lightning that this package uses, and all places where it is patched.

Nothing else uses them, except that subclasses override some. :data:`lightning_swift.private_names.NAMES` says why each
is needed, and with which version it was checked.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import lightning.fabric.loggers.csv_logs as fabric_csv_logs
import lightning.fabric.loggers.tensorboard as fabric_tensorboard
import lightning.pytorch as pl
import lightning.pytorch.loggers.csv_logs as csv_logs
import lightning.pytorch.loggers.tensorboard as tensorboard
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.fabric.wrappers import _FabricDataLoader, _unwrap_objects, is_wrapped
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.loops.progress import _BaseProgress, _BatchProgress, _ReadyCompletedTracker
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSize, _MinSize
from torch import nn

# -- classes ----------------------------------------------------------------------------------------------------------

Loop = _Loop
FitLoop = _FitLoop
TrainingEpochLoop = _TrainingEpochLoop
EvaluationLoop = _EvaluationLoop
PredictionLoop = _PredictionLoop
AutomaticOptimization = _AutomaticOptimization
SignalConnector = _SignalConnector
Launcher = _Launcher
DataFetcher = _DataFetcher
IterFetcher = _DataLoaderIterDataFetcher
PrefetchFetcher = _PrefetchDataFetcher
Progress = _BaseProgress
BatchProgress = _BatchProgress
Counter = _ReadyCompletedTracker
Metadata = _Metadata
FabricLoader = _FabricDataLoader
ResultCollection = _ResultCollection
ResultMetric = _ResultMetric

#: File in the folder of a sharded checkpoint with what is no part of a shard.
METADATA_FILE = _METADATA_FILENAME
#: Attributes of torchmetrics' metrics that are no state.
METRIC_INTERNALS = frozenset(
    {"_defaults", "_persistent", "_reductions", "_cache", "_signature", "_dtype_convert", "_device"}
)
#: Attributes of loops that are objects, or None before they exist: every process has its own.
LOOP_OBJECTS = frozenset({"trainer", "datamodule", "_combined_loader", "_data_fetcher", "_data_source", "_results"})
#: Attributes that hold readings of the monotonic clock, which another machine counts from another moment.
CLOCKS = ("_start_time", "_end_time", "_last_time_checked", "_last_val_time", "_train_start_time")

# -- a trainer under construction -------------------------------------------------------------------------------------
# Lightning tells neither strategies nor factories of callbacks what else a Trainer was given, and what must happen
# before any process group exists happens in its constructor. Frames are the only way to it.


def trainer_under_construction() -> pl.Trainer | None:
    """The trainer that is being built, if its strategy exists already."""
    frame = _constructor()
    trainer: pl.Trainer | None = frame.f_locals["self"] if frame is not None else None
    return trainer if hasattr(trainer, "_accelerator_connector") else None


def callbacks_under_construction() -> list[pl.Callback]:
    """What the trainer that is being built was given as ``callbacks``; empty where none is being built."""
    frame = _constructor()
    given = frame.f_locals.get("callbacks") if frame is not None else None
    if isinstance(given, pl.Callback):
        return [given]
    return [each for each in given if isinstance(each, pl.Callback)] if isinstance(given, Iterable) else []


def _constructor() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_code.co_filename == pl.trainer.trainer.__file__:
            if isinstance(frame.f_locals.get("self"), pl.Trainer):
                return frame
        frame = frame.f_back
    return None


# -- the strategy and entry calls -------------------------------------------------------------------------------------


def ddp_options(strategy: DDPStrategy) -> tuple[object | None, Any, Any, int | None, dict[str, Any]]:
    """State, hook and wrapper of communication, period of model averaging, options of ``DistributedDataParallel``."""
    return (
        strategy._ddp_comm_state,
        strategy._ddp_comm_hook,
        strategy._ddp_comm_wrapper,
        strategy._model_averaging_period,
        strategy._ddp_kwargs,
    )


def start_method(strategy: DDPStrategy) -> str:
    return str(strategy._start_method)


def syncs_layers(strategy: DDPStrategy) -> bool:
    return strategy._layer_sync is not None


def tensor_parallel_size(strategy: ModelParallelStrategy) -> int | str:
    """Workers that tensors are divided over; ``auto``: as Lightning chooses."""
    return strategy._tensor_parallel_size


def set_data_parallel_size(strategy: ModelParallelStrategy | FabricModelParallelStrategy, workers: int) -> None:
    """Divide data, and parameters with it, over so many workers."""
    strategy._data_parallel_size = workers


def attach(trainer: pl.Trainer, model: pl.LightningModule, loaders: Mapping[str, Any], datamodule: Any) -> None:
    """What an entry call does first: attach model and data."""
    trainer._data_connector.attach_data(model, datamodule=datamodule, **loaders)


def set_up(trainer: pl.Trainer) -> None:
    """What an entry call does next: attach callbacks, prepare data, and call the hooks that build the model."""
    trainer._callback_connector._attach_model_callbacks()
    trainer._callback_connector._attach_model_logging_functions()
    trainer._data_connector.prepare_data()  # in a group of its own, which counts in the names of those that follow
    call._call_setup_hook(trainer)
    call._call_configure_model(trainer)


def call_hook(trainer: pl.Trainer, name: str, *arguments: Any) -> None:
    """Call a hook of all callbacks, then of the module."""
    call._call_callback_hooks(trainer, name, *arguments)
    call._call_lightning_module_hook(trainer, name, *arguments)


# -- loops ------------------------------------------------------------------------------------------------------------


def replaceable_parts(trainer: pl.Trainer) -> list[Any]:
    fit = trainer.fit_loop
    parts: list[Any] = [fit, fit.epoch_loop, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]
    return [*parts, fit.epoch_loop.automatic_optimization, trainer.predict_loop, trainer._signal_connector]


def logger_connector(trainer: pl.Trainer) -> object:
    """What holds the metrics that were logged last."""
    return trainer._logger_connector


def only_measures(loop: _FitLoop) -> bool:
    """Whether this pass makes statistics of batch normalization, without gradients."""
    return bool(loop._skip_backward)


def accumulates(loop: _FitLoop | _TrainingEpochLoop) -> bool:
    """Whether no step follows the batch in progress."""
    return loop._should_accumulate()


def validates_next(loop: _TrainingEpochLoop, fetcher: _DataFetcher) -> bool:
    return loop._should_check_val_fx(fetcher)


def remakes_training_loaders(loop: _FitLoop) -> bool:
    """Whether ``setup_data`` calls the user's hooks."""
    return loop._combined_loader is None or loop._should_reload_train_dl


def remakes_validation_loaders(loop: _EvaluationLoop) -> bool:
    """Whether ``setup_data`` calls the user's hooks."""
    return loop._combined_loader is None or loop._should_reload_val_dl


def purpose(loop: _EvaluationLoop) -> Any:
    """The entry call whose part a loop is."""
    return loop._trainer_fn


def has_source(loop: _EvaluationLoop) -> bool:
    """Whether somebody gives the loop a loader."""
    return loop._data_source.is_defined()


def steps_made(loop: _TrainingEpochLoop) -> int:
    return loop._batches_that_stepped


def validates_by_time(trainer: pl.Trainer) -> bool:
    return getattr(trainer, "_val_check_time_interval", None) is not None


def closure_parts(closure: Closure) -> tuple[Any, Any, Any]:
    """Functions for step, backward and zero_grad."""
    return closure._step_fn, closure._backward_fn, closure._zero_grad_fn


def run_training_step(trainer: pl.Trainer, arguments: Any) -> ClosureResult:
    return trainer.fit_loop.epoch_loop.automatic_optimization._training_step(arguments)


def step_arguments(loop: _TrainingEpochLoop, start: Any, batch: Any, index: int) -> Any:
    return loop._build_kwargs(start, batch, index)


def before_transfer(module: pl.LightningModule, batch: Any) -> Any:
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


# -- data -------------------------------------------------------------------------------------------------------------


def loader_of(loop: _FitLoop | _EvaluationLoop) -> CombinedLoader | None:
    return loop._combined_loader


def drop_loader(loop: _FitLoop | _EvaluationLoop) -> None:
    """Have ``setup_data`` call the user's hooks."""
    loop._combined_loader = None


def fetcher_of(loop: _FitLoop) -> _DataFetcher | None:
    return loop._data_fetcher


def keep_fetcher(loop: _FitLoop, fetcher: _DataFetcher) -> None:
    """Make ``fetcher`` what the loop's new one is, in its place: the epoch loop continues with the object it has."""
    assert loop._data_fetcher is not None
    fetcher.__dict__.update(loop._data_fetcher.__dict__)
    loop._data_fetcher = fetcher


def most_batches(loop: _EvaluationLoop) -> list[Any]:
    return list(loop._max_batches)


def set_most_batches(loop: _EvaluationLoop, batches: list[Any]) -> None:
    loop._max_batches = batches


def reload_epochs(trainer: pl.Trainer) -> dict[str, Any]:
    """Epochs in which the user's hooks were called for loaders of training and validation."""
    fit = trainer.fit_loop
    return {"train": fit._last_train_dl_reload_epoch, "val": fit.epoch_loop.val_loop._last_val_dl_reload_epoch}


def iterators_of(combined: CombinedLoader) -> Sequence[Iterator[Any]]:
    """Those of its loaders; empty where nothing is iterated."""
    return combined._iterator.iterators if combined._iterator is not None else []


def ends_with_shortest(combined: CombinedLoader) -> bool:
    return isinstance(combined._iterator, _MinSize)


def ends_with_longest(combined: CombinedLoader) -> bool:
    """Whether a pass ends with the longest loader, and others give None from their end on."""
    return isinstance(combined._iterator, _MaxSize)


def place_of(combined: CombinedLoader) -> tuple[int | None, list[bool]]:
    """Number of the next batch, None where nothing is iterated; which loaders have begun again."""
    iterator = combined._iterator
    return (None if iterator is None else iterator._idx), list(getattr(iterator, "_consumed", ()))


def set_place(combined: CombinedLoader, index: int | None, consumed: Sequence[bool]) -> None:
    iterator = combined._iterator
    if iterator is not None and index is not None:
        iterator._idx = index
        if hasattr(iterator, "_consumed"):
            iterator._consumed = list(consumed)


def structure_of(combined: CombinedLoader) -> Any:
    return combined._spec


def fetched_last(fetcher: _DataLoaderIterDataFetcher) -> tuple[int, int]:
    """Numbers of the batch that was fetched last, and of its loader."""
    return fetcher._batch_idx, fetcher._dataloader_idx


def set_fetched_last(fetcher: _DataLoaderIterDataFetcher, last: tuple[int, int], batch: Any) -> None:
    fetcher._batch_idx, fetcher._dataloader_idx = last
    fetcher._batch = batch


# -- what self.log gathers --------------------------------------------------------------------------------------------


def results_of(trainer: pl.Trainer) -> dict[str, _ResultCollection]:
    return {
        "train": trainer.fit_loop.epoch_loop._results,
        "val": trainer.fit_loop.epoch_loop.val_loop._results,
        "validate": trainer.validate_loop._results,
        "test": trainer.test_loop._results,
    }


def set_training_results(trainer: pl.Trainer, results: _ResultCollection) -> None:
    trainer.fit_loop.epoch_loop._results = results


def metric_state(metric: _ResultMetric) -> tuple[Any, Any, int]:
    """What forward gave last, what was computed, and how often it was updated."""
    return metric._forward_cache, metric._computed, metric._update_count


def set_metric_state(metric: _ResultMetric, forward: Any, computed: Any, updates: int) -> None:
    metric._forward_cache, metric._computed, metric._update_count = forward, computed, updates


def make_sync(fn: Any, should: bool, rank_zero_only: bool, op: str | None, group: Any) -> _Sync:
    return _Sync(fn=fn, _should=should, rank_zero_only=rank_zero_only, _op=op, _group=group)


# -- callbacks --------------------------------------------------------------------------------------------------------


def average_of(callback: WeightAveraging | StochasticWeightAveraging) -> nn.Module | None:
    """The averaged model; None before there is one."""
    average: nn.Module | None = callback._average_model
    return average


def has_average_scheduler(callback: StochasticWeightAveraging) -> bool:
    return callback._swa_scheduler is not None


def period_of(callback: ModelCheckpoint) -> int:
    """Steps between two of its checkpoints; 0: it does not count them."""
    return callback._every_n_train_steps


def saves_by_time(callback: ModelCheckpoint) -> bool:
    return callback._train_time_interval is not None


# -- loggers ----------------------------------------------------------------------------------------------------------


def opened(logger: Logger) -> Any:
    """What the logger writes with; None before it is first used."""
    return getattr(logger, "_experiment", None)


def set_version(logger: Logger, version: Any) -> None:
    """Have a logger that has opened nothing yet continue in the folder of this version."""
    if opened(logger) is None and hasattr(logger, "_version"):
        logger._version = version


def take_up_run(logger: Logger, run: str) -> None:
    """Have a logger that has not opened its run yet write to this one."""
    if isinstance(logger, WandbLogger):
        logger._wandb_init.update(id=run, resume="allow")
    elif isinstance(logger, MLFlowLogger) and not logger._initialized:
        logger._run_id = run


def metric_prefix(logger: MLFlowLogger) -> str:
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""


def event_writers(logger: TensorBoardLogger) -> list[Any]:
    """What writes the event files of a logger; empty before it is first used."""
    writers = getattr(opened(logger), "all_writers", None) or {}
    found = [getattr(writer, "event_writer", None) for writer in writers.values()]
    return [writer for writer in found if hasattr(writer, "_file_name")]


def file_of(writer: Any) -> str:
    return str(writer._file_name)


def continue_files(logger: TensorBoardLogger, name: str) -> None:
    """Have event writers append to an existing file and remove their new ones; those that cannot keep theirs."""
    opened(logger)._get_file_writer()
    for writer in event_writers(logger):
        file = getattr(writer, "_general_file_writer", None)
        if getattr(file, "fs_supports_append", False) and getattr(file, "write_started", False):
            assert file is not None
            new, writer._file_name = writer._file_name, name
            file.filename = os.fsencode(name)
            os.unlink(new)


def replace_csv_writer(kind: type[csv_logs.ExperimentWriter]) -> None:
    """Patch: have every ``CSVLogger`` write with this."""
    csv_logs.ExperimentWriter = kind  # type: ignore[misc]


def choose_versions(wrap: Callable[[type, Callable[[Any], int]], Callable[[Any], int]]) -> None:
    """Patch: have loggers of files choose their versions through ``wrap(kind, Lightning's own choice)``."""
    for kind in (fabric_csv_logs.CSVLogger, fabric_tensorboard.TensorBoardLogger, tensorboard.TensorBoardLogger):
        of_kind: Any = kind
        of_kind._get_next_version = wrap(kind, of_kind._get_next_version)


# -- Fabric -----------------------------------------------------------------------------------------------------------

_made: list[weakref.ref[_FabricDataLoader]] = []


def without_fabric(item: Any) -> Any:
    """What Fabric has wrapped, with its ``DistributedDataParallel``; anything else as it is."""
    return _unwrap_objects(item) if is_wrapped(item) else item


def note_fabric_loaders() -> None:
    """Patch: loaders that Fabric makes are noted. It numbers their passes inside, and tells nobody of them."""
    init = _FabricDataLoader.__init__
    if getattr(init, "notes", False):
        return

    def noting(self: _FabricDataLoader, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _made.append(weakref.ref(self))

    noting.notes = True  # type: ignore[attr-defined]
    _FabricDataLoader.__init__ = noting  # type: ignore[method-assign]


def fabric_loaders() -> list[_FabricDataLoader]:
    """Loaders that Fabric has made since :func:`note_fabric_loaders`, in their order, if they are still there."""
    return [loader for each in _made if (loader := each()) is not None]


def passes_of(loader: _FabricDataLoader) -> int:
    return loader._num_iter_calls


def set_passes(loader: _FabricDataLoader, count: int) -> None:
    loader._num_iter_calls = count


def begin_pass(loader: _FabricDataLoader) -> Any:
    """What Fabric does when a pass begins: shuffle by its number. Returns the ``DataLoader`` to be read."""
    _set_sampler_epoch(loader._dataloader, loader._num_iter_calls)
    loader._num_iter_calls += 1
    return loader._dataloader
