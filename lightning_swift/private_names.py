"""Private names of Lightning, of its loggers and of what these write with, each with the reason why it is needed.

:mod:`lightning_swift.compat` uses them, or subclasses override them. A test looks each up, so that a version that has
changed one is noticed before a job meets it.
"""

from __future__ import annotations

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
