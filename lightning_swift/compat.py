"""All private names of Lightning, of its loggers and of what these write with, and all places where they are patched.

Nothing else uses them, except that subclasses override some. :data:`NAMES` says why each is needed; a test looks each
up, so that a version that has changed one is noticed before a job meets it.
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

from shared_core.versions import Tested

TESTED = Tested("lightning", "2.6", "2.6")

_LOOPS, _TRAINER = "lightning.pytorch.loops", "lightning.pytorch.trainer"
_RESULT = f"{_TRAINER}.connectors.logger_connector.result"
_FIT, _EPOCH = f"{_LOOPS}.fit_loop:_FitLoop", f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop"
_EVALUATION = f"{_LOOPS}.evaluation_loop:_EvaluationLoop"
_FETCHERS, _COMBINED = f"{_LOOPS}.fetchers", "lightning.pytorch.utilities.combined_loader"
_LOGGERS = "lightning.pytorch.loggers"
_EVENTS = "tensorboard.summary.writer.event_file_writer"
_CALLBACKS = "lightning.pytorch.callbacks"
_FABRIC_LOADER = "lightning.fabric.wrappers:_FabricDataLoader"

#: ``module:name``, with its parameters where it is overridden or called, and why it is needed.
NAMES: tuple[tuple[str, str], ...] = (
    # -- loops that get step boundaries
    (f"{_EPOCH}.advance(self, data_fetcher)", "the step boundary lies before it; there is no hook before the fetch"),
    (f"{_EPOCH}._broadcast_sigterm_tensor(self)", "a collective for a flag that is never set; it drops errors"),
    (f"{_EPOCH}._should_check_val_fx(self, data_fetcher)", "what follows a batch talks to all workers"),
    (f"{_EPOCH}._should_accumulate(self)", "whether a batch ends with a step"),
    (f"{_EPOCH}._batches_that_stepped", "step number of rows in the logs"),
    (f"{_EPOCH}._results", "what training_step logs is replaced while a share is computed, and published"),
    (f"{_EPOCH}._build_kwargs(self, kwargs, batch, batch_idx)", "arguments of training_step for a failed rank's batch"),
    (f"{_FIT}._should_accumulate(self)", "whether a batch ends with a step"),
    (f"{_FIT}._skip_backward", "a pass that only makes statistics of batch normalisation has no gradients"),
    (f"{_FIT}._combined_loader", "position in the data"),
    (f"{_FIT}._data_fetcher", "what was fetched ahead"),
    (f"{_FIT}._should_reload_train_dl", "whether the user's hooks make loaders now"),
    (f"{_FIT}._last_train_dl_reload_epoch", "when they did"),
    (f"{_FIT}.setup_data(self)", "the random state before it is noted"),
    (f"{_EVALUATION}.run", "a stand-alone evaluation starts at a recovery point"),
    (f"{_EVALUATION}.setup_data(self)", "the random state before it is noted"),
    (f"{_EVALUATION}._evaluation_step(self, batch, batch_idx, dataloader_idx, dataloader_iter)", "a point for faults"),
    (f"{_EVALUATION}._trainer_fn", "whether it is part of a fit"),
    (f"{_EVALUATION}._combined_loader", "position in the data"),
    (f"{_EVALUATION}._should_reload_val_dl", "whether the user's hooks make loaders now"),
    (f"{_EVALUATION}._last_val_dl_reload_epoch", "when they did"),
    (f"{_EVALUATION}._max_batches", "depends on the number of workers"),
    (f"{_EVALUATION}._data_source", "whether a validation loader was given"),
    (f"{_EVALUATION}._results", "what is logged is published"),
    (f"{_LOOPS}.prediction_loop:_PredictionLoop.run", "a prediction starts at a recovery point"),
    (f"{_LOOPS}.loop:_Loop", "the loops of a trainer are found by it"),
    (
        f"{_LOOPS}.optimization.automatic:_AutomaticOptimization._make_closure(self, kwargs, optimizer, batch_idx)",
        "under reroute a batch is that of all ranks",
    ),
    (
        f"{_LOOPS}.optimization.automatic:_AutomaticOptimization._training_step(self, kwargs)",
        "computes a failed rank's batch",
    ),
    (f"{_LOOPS}.optimization.automatic:Closure._step_fn", "a closure is made of another's parts"),
    (f"{_LOOPS}.optimization.automatic:Closure._backward_fn", "the same"),
    (f"{_LOOPS}.optimization.automatic:Closure._zero_grad_fn", "the same"),
    (f"{_LOOPS}.progress:_BaseProgress", "counters are found by it"),
    (f"{_LOOPS}.progress:_BatchProgress.is_last_batch", "published"),
    (f"{_LOOPS}.progress:_ReadyCompletedTracker", "counters are found by it"),
    (
        f"{_TRAINER}.connectors.signal_connector:_SignalConnector.register_signal_handlers(self)",
        "Lightning's handler of SIGTERM issues a collective from within whatever the process is doing",
    ),
    ("lightning.pytorch:Trainer._signal_connector", "the object that is given another class"),
    # -- loaders
    (f"{_FETCHERS}:_DataFetcher", "type of what fetches batches"),
    (f"{_FETCHERS}:_PrefetchDataFetcher.batches", "a batch that was fetched ahead"),
    (f"{_FETCHERS}:_DataLoaderIterDataFetcher._batch", "the batch that training_step(dataloader_iter) has fetched"),
    (f"{_FETCHERS}:_DataLoaderIterDataFetcher._batch_idx", "its number"),
    (f"{_FETCHERS}:_DataLoaderIterDataFetcher._dataloader_idx", "its loader"),
    (f"{_COMBINED}:CombinedLoader._iterator", "the iterators of several loaders"),
    (f"{_COMBINED}:CombinedLoader._spec", "their structure"),
    (f"{_COMBINED}:_MinSize", "a pass ends with the shortest loader"),
    (f"{_COMBINED}:_MaxSize", "a pass ends with the longest, and others give None"),
    (f"{_COMBINED}:_ModeIterator._idx", "number of the next batch"),
    (f"{_COMBINED}:_MaxSizeCycle._consumed", "which loaders have begun again"),
    # -- entry calls
    ("lightning.pytorch.strategies.launchers.launcher:_Launcher", "entry calls run through the strategy's launcher"),
    ("lightning.pytorch.strategies:DDPStrategy._configure_launcher(self)", "where the launcher is chosen"),
    ("lightning.pytorch.strategies:DDPStrategy._launcher", "the launcher"),
    ("lightning.pytorch.strategies:DDPStrategy._ddp_comm_state", "refused options"),
    ("lightning.pytorch.strategies:DDPStrategy._ddp_comm_hook", "the same"),
    ("lightning.pytorch.strategies:DDPStrategy._ddp_comm_wrapper", "the same"),
    ("lightning.pytorch.strategies:DDPStrategy._model_averaging_period", "the same"),
    ("lightning.pytorch.strategies:DDPStrategy._ddp_kwargs", "options that nobody knows are refused"),
    ("lightning.pytorch.strategies:DDPStrategy._start_method", "spawned and forked workers are refused"),
    ("lightning.pytorch.strategies:DDPStrategy._layer_sync", "sync_batchnorm is refused in a pipeline"),
    ("lightning.pytorch.strategies:ModelParallelStrategy._configure_launcher(self)", "where the launcher is chosen"),
    ("lightning.pytorch.strategies:ModelParallelStrategy._data_parallel_size", "chosen: all workers"),
    ("lightning.pytorch.strategies:ModelParallelStrategy._tensor_parallel_size", "refused where there is any"),
    ("lightning.fabric.utilities.load:_METADATA_FILENAME", "a replacement reads no shard of a checkpoint, only this"),
    ("lightning.pytorch:Trainer._accelerator_connector", "a trainer under construction has it when it has a strategy"),
    ("lightning.pytorch:Trainer._data_connector", "an entry call that is skipped attaches its data, for the next ones"),
    (f"{_TRAINER}.connectors.data_connector:_DataConnector.attach_data", "the same"),
    ("lightning.pytorch:Trainer._callback_connector", "and its callbacks"),
    (f"{_TRAINER}.connectors.callback_connector:_CallbackConnector._attach_model_callbacks(self)", "the same"),
    (f"{_TRAINER}.connectors.callback_connector:_CallbackConnector._attach_model_logging_functions(self)", "the same"),
    (
        f"{_TRAINER}.connectors.data_connector:_DataConnector.prepare_data(self)",
        "makes a group, and the names of groups are numbers",
    ),
    (f"{_TRAINER}.call:_call_setup_hook(trainer)", "and calls the hooks that build the model"),
    (f"{_TRAINER}.call:_call_configure_model(trainer)", "the same"),
    (f"{_TRAINER}.call:_call_callback_hooks", "hooks between a pipeline's backward and step"),
    (f"{_TRAINER}.call:_call_lightning_module_hook", "the same"),
    (
        "lightning.pytorch:LightningModule._on_before_batch_transfer(self, batch, dataloader_idx)",
        "a failed rank's batch",
    ),
    ("lightning.pytorch:Trainer._logger_connector", "its plain attributes are published"),
    (f"{_TRAINER}.setup:_init_debugging_flags", "sets _val_check_time_interval, which is refused under reroute"),
    # -- what self.log gathers
    (f"{_RESULT}:_Metadata.sync", "entries that a replacement has not logged yet are created again"),
    (f"{_RESULT}:_ResultCollection.log", "a collection stands for another while a share is computed"),
    (f"{_RESULT}:_ResultMetric.has_reset", "values are published"),
    (f"{_RESULT}:_ResultMetric._forward_cache", "the same"),
    (f"{_RESULT}:_ResultMetric._computed", "the same"),
    (f"{_RESULT}:_ResultMetric._update_count", "the same"),
    (f"{_RESULT}:_Sync.should", "made again"),
    (f"{_RESULT}:_Sync._should", "the same"),
    (f"{_RESULT}:_Sync._op", "the same"),
    (f"{_RESULT}:_Sync._group", "the same"),
    # -- callbacks
    (f"{_CALLBACKS}:WeightAveraging._average_model", "the average is attached beside the module"),
    (f"{_CALLBACKS}:StochasticWeightAveraging._average_model", "the same"),
    (f"{_CALLBACKS}:StochasticWeightAveraging._swa_scheduler", "how far stochastic averaging has got"),
    (f"{_CALLBACKS}:ModelCheckpoint._every_n_train_steps", "it talks to all workers then"),
    (f"{_CALLBACKS}:ModelCheckpoint._train_time_interval", "it asks rank 0 in every batch; refused"),
    # -- loggers
    (f"{_LOGGERS}:CSVLogger._experiment", "the writer, without making one"),
    (f"{_LOGGERS}:CSVLogger._version", "a run that was started before continues in its folder"),
    (f"{_LOGGERS}:TensorBoardLogger._experiment", "as for CSV"),
    (f"{_LOGGERS}:TensorBoardLogger._version", "as for CSV"),
    (f"{_LOGGERS}:WandbLogger._wandb_init", "which run to write to is known only when the logger has been made"),
    (f"{_LOGGERS}:MLFlowLogger._initialized", "the same"),
    (f"{_LOGGERS}:MLFlowLogger._run_id", "the same"),
    (f"{_LOGGERS}:MLFlowLogger._prefix", "what it puts before the names of metrics"),
    ("torch.utils.tensorboard:SummaryWriter._get_file_writer(self)", "opens the files of a replacement"),
    (f"{_EVENTS}:EventFileWriter._file_name", "files are cut to what the failed worker had published"),
    (f"{_EVENTS}:EventFileWriter._general_file_writer", "and continued"),
    (f"{_LOGGERS}.csv_logs:ExperimentWriter._check_log_dir_exists(self)", "the folder is the failed worker's"),
    ("lightning.fabric.loggers.csv_logs:_ExperimentWriter._rewrite_with_new_header(self, fieldnames)", "made atomic"),
    # -- patches: a replacement must reuse what the failed worker chose, in loggers that the script has made itself
    (f"{_LOGGERS}.csv_logs:ExperimentWriter", "replaced: CSVLogger makes its writer by this name; no hook"),
    ("lightning.fabric.loggers.csv_logs:CSVLogger._get_next_version(self)", "wrapped: the failed worker's version"),
    ("lightning.fabric.loggers.tensorboard:TensorBoardLogger._get_next_version(self)", "the same"),
    (f"{_LOGGERS}.tensorboard:TensorBoardLogger._get_next_version(self)", "the same"),
    # -- Fabric
    ("lightning.fabric.wrappers:_unwrap_objects(collection)", "the DistributedDataParallel that Fabric has made"),
    (f"{_FABRIC_LOADER}.__init__(self, dataloader, device)", "wrapped: the loaders of a script; no hook gets them"),
    (f"{_FABRIC_LOADER}._dataloader", "what is read"),
    (f"{_FABRIC_LOADER}._num_iter_calls", "the number of a pass, by which it is shuffled"),
    ("lightning.fabric.utilities.data:_set_sampler_epoch(dataloader, epoch)", "shuffles by the number of the pass"),
    ("lightning.fabric.strategies:DDPStrategy._configure_launcher(self)", "before there is a process group"),
    ("lightning.fabric.strategies:ModelParallelStrategy._configure_launcher(self)", "the same"),
    ("lightning.fabric.strategies:ModelParallelStrategy._data_parallel_size", "chosen: all workers"),
)


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


def read_by(loader: _FabricDataLoader) -> Any:
    """The ``DataLoader`` that it reads."""
    return loader._dataloader


def begin_pass(loader: _FabricDataLoader) -> Any:
    """What Fabric does when a pass begins: shuffle by its number. Returns the ``DataLoader`` to be read."""
    _set_sampler_epoch(loader._dataloader, loader._num_iter_calls)
    loader._num_iter_calls += 1
    return read_by(loader)
