"""``SwiftTrainer``: a ``transformers.Trainer`` whose workers may fail.

``transformers`` creates the process group with ``TrainingArguments``, before there is a Trainer. So importing this
module in a worker of ``swiftrun`` is what makes the group one that survives.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import transformers
from accelerate import skip_first_batches
from transformers.integrations.integration_utils import MLflowCallback, TensorBoardCallback, WandbCallback
from transformers.trainer_utils import TrainOutput

from accelerate_swift import compat
from accelerate_swift.data import gate_any
from accelerate_swift.plugin import SwiftPlugin, enabled
from shared_core import Job, install
from shared_core.adapters import launched_by_swiftrun
from shared_core.encoding import Holders, assign, decode, encode_state, holds_more
from shared_core.errors import Unsupported
from shared_core.trackers import Mlflow, Rows, Service, note_runs, of_wandb, prepare, take_up

# -- TrainingArguments(report_to=...): one run for each service, each row once, also across the failure of rank 0 -----


class AccelerateReports:
    """The callbacks of a ``Trainer`` that report to services, in rank 0."""

    def __init__(self, trainer: transformers.Trainer, job: Job) -> None:
        self._trainer, self._job = trainer, job
        self._rows: dict[str, Rows] = {}
        self._names: dict[str, str] = {}

    def take_up(self, published: Mapping[str, Any] | None) -> None:
        """In a replacement, before its services are set up: use the failed worker's runs."""
        if self._job.rank == 0 and published is not None:
            take_up(published["names"])

    def watch(self) -> None:
        """The services are set up: note their runs, and write what a failed worker did not."""
        if self._job.rank != 0:
            return
        folders = [each.logging_dir for each in self._callbacks().values() if isinstance(each, TensorBoardCallback)]
        folder = next(filter(None, folders), None)
        self._names = note_runs(self._job, **({"TENSORBOARD_LOGGING_DIR": folder} if folder else {}))
        for name, each in self._callbacks().items():
            if name not in self._rows:
                self._watch(name, each)

    def capture(self) -> Any:
        return {"names": self._names, "rows": {name: rows.state() for name, rows in self._rows.items()}}

    def restore(self, data: Any) -> None:
        for name, state in (data or {"rows": {}})["rows"].items():
            if name in self._rows:
                self._rows[name].restore(state)

    def _callbacks(self) -> dict[str, Any]:
        return {
            f"{number} {type(each).__name__}": each
            for number, each in enumerate(self._trainer.callback_handler.callbacks)
            if type(each).__module__.startswith("transformers.integrations") or isinstance(each, _SERVICES)
        }

    def _watch(self, name: str, callback: Any) -> None:
        trainer, on_log = self._trainer, callback.on_log

        def write(logs: Any, step: Any, more: dict[str, Any]) -> None:
            state = trainer.state
            if state.global_step != step:  # a row that the service has lost
                state = copy.copy(state)
                state.global_step = step
            on_log(trainer.args, state, trainer.control, logs=dict(logs), model=trainer.callback_handler.model)

        rows = self._rows[name] = Rows(self._job, f"transformers.{name}", _service(self._job, callback), write)

        def give(args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            rows.give(logs, state.global_step)

        callback.on_log = give


_SERVICES = (MLflowCallback, TensorBoardCallback, WandbCallback)


def _service(job: Job, callback: Any) -> Service:
    if isinstance(callback, WandbCallback):
        import wandb

        return of_wandb(job, lambda: wandb.run, numbered=False) if wandb.run is not None else Service()
    if isinstance(callback, MLflowCallback):
        import mlflow

        return Mlflow(lambda: (mlflow.MlflowClient(), _active(mlflow)))
    return Service()


def _active(mlflow: Any) -> str:
    run = mlflow.active_run() or mlflow.last_active_run()
    return str(run.info.run_id)


# -- the trainer ------------------------------------------------------------------------------------------------------


if launched_by_swiftrun() and enabled():
    install()
    prepare()

_NAME = "transformers.state"
#: Steps before the end of training in which a Trainer prepares for loading its best model.
_LAST = 3
#: Numbers of the calls of train() in this process, of all Trainers.
_CALLS = count(1)
#: In the place of a checkpoint's folder: continue in the middle of an epoch, but load nothing.
_PLACE = "the failed worker's place"


class SwiftTrainer(transformers.Trainer):
    """A ``Trainer`` whose workers may fail; see :class:`accelerate_swift.SwiftPlugin`.

    Import it before ``TrainingArguments`` are made. A step boundary is the start of an update step: with gradient
    accumulation, a replacement runs all micro-batches of its step again.

    Args:
        args: as ``Trainer``.
        swift: the plugin; one with the options of the environment by default.
        kwargs: as ``Trainer``.
    """

    def __init__(self, *args: Any, swift: SwiftPlugin | None = None, **kwargs: Any) -> None:
        self._swift = swift or SwiftPlugin()
        self._swift.watch.fetching = False  # a Trainer fetches all micro-batches of a step before it uses the first
        self._swift_phase = 0
        self._swift_epoch = 0
        self._swift_batches = 0
        #: Batches of the epoch in progress that were skipped in the call, and the checkpoint that asked for it.
        self._swift_skipped: tuple[int, str | None] = (0, None)
        self._swift_loaders: dict[str, Any] = {}
        self._swift_ended = False
        self._swift_target: Mapping[str, Any] | None = None
        #: Start of this call of train(), by the wall clock; that of the failed worker in a replacement.
        self._swift_began: float | None = None
        self._swift_reports: AccelerateReports | None = None
        self._swift_holders: Holders | None = None
        self._swift_names: frozenset[str] = frozenset()
        super().__init__(*args, **kwargs)
        if self._swift.loop.job is not None:
            self._swift_reports = AccelerateReports(self, self._swift.loop.job)
            self._swift.loop.job.register(_NAME, self._swift_capture, self._swift_restore)
            self._swift_names = frozenset(vars(self))

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        built["kwargs_handlers"] = [*built.get("kwargs_handlers", ()), self._swift]
        return built

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As ``Trainer.train``.

        A worker that fails in a second call, of this Trainer or of another one, cannot be replaced: all workers then go
        back to the newest checkpoint, or to the start.
        """
        self._swift_phase = next(_CALLS)
        self._swift_began = None
        job = self._swift.loop.job
        if job is not None:
            if job.config.resizes:
                raise Unsupported(
                    "transformers.Trainer counts the steps of an epoch in advance, so the number of workers cannot "
                    "change in the middle of one: leave on_failure='replace' and resize.replace_timeout_s=0"
                )
            self._swift_tell(job)
            job.variables.data_sets.watch(
                lambda: {f"{k} data": loader for k, (loader, _) in self._swift_loaders.items()}
            )
            job.checkpoints.keep_number("transformers.Trainer counts the steps of an epoch in advance")
            job.checkpoints.note_reachable(self._swift_phase == 1)
            if self._swift.watch.progress.joining:
                target = self._swift_target = job.peek(_NAME)
                if target is not None and target["phase"] > self._swift_phase:
                    job.fall_back(
                        f"rank {job.rank}: the failed worker was in call {target['phase']} of Trainer.train(), and a "
                        "replacement can only start in the first: call train() once in each script"
                    )
                if target is not None:
                    resume_from_checkpoint = None  # all that it holds comes from the others, and it may be gone
                if target is not None and self._swift_reports is not None:
                    self._swift_began = target["began"]
                    self._swift_reports.take_up(target["reports"])
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # -- where a replacement begins -----------------------------------------------------------------------------------

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epoch, batches = super()._init_training_state(*args, **kwargs)
        return (epoch if self._swift_target is None else self._swift_target["epoch"]), batches

    def _run_epoch(self, **kwargs: Any) -> None:  # type: ignore[override]  # called with names only
        run: Any = super()._run_epoch
        if self._swift.loop.job is None:
            run(**kwargs)
            return
        kwargs["train_dataloader"] = self._swift_watched("training", kwargs["train_dataloader"])
        self._swift_epoch = kwargs["epoch"]
        self._swift.watch.progress.note_epoch(self._swift_epoch)
        self._swift_ended = False
        if holds_more(self.lr_scheduler):
            self._swift.loop.job.variables.tell("scheduler", self.lr_scheduler)
        if self._swift_began is None:
            self._swift_began = kwargs["start_time"]
        kwargs["start_time"] = self._swift_began
        if self._swift_reports is not None:
            self._swift_reports.watch()
        target, self._swift_target = self._swift_target, None
        if target is None:
            resumed = kwargs["resume_from_checkpoint"] if kwargs["epoch"] == kwargs["epochs_trained"] else None
            batches = 0 if resumed is None else kwargs["steps_trained_in_current_epoch"]
            self._swift_batches, self._swift_skipped = batches, (batches, resumed if batches else None)
        else:
            self._swift_batches, self._swift_skipped = target["batches"], tuple(target["skipped"])
            kwargs |= {
                "resume_from_checkpoint": _PLACE,
                "epochs_trained": kwargs["epoch"],
                "steps_trained_in_current_epoch": self._swift_batches,
            }
        inside = target is not None and self._swift_batches > 0
        with compat.skipping(self._swift_rest, self.args if inside else None):
            run(**kwargs)

    def _swift_watched(self, name: str, loader: Any) -> Any:
        """The same loader with its place published. It has a new object in each call of train() only."""
        kept = self._swift_loaders.get(name)
        if kept is None or kept[0] is not loader:
            kept = self._swift_loaders[name] = (loader, gate_any(self._swift.watch, loader, name))
        return kept[1]

    def _swift_rest(self, loader: Any) -> Any:
        """What is left of the first epoch after the checkpoint that this call began with."""
        skipped = self._swift_skipped[0]
        return self._swift_watched("rest", skip_first_batches(loader, skipped)) if skipped else loader

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        began = start_time if self._swift_began is None else self._swift_began
        finalize: Any = super()._finalize_training
        output: TrainOutput = finalize(trial, num_train_samples, began)
        return output

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint == _PLACE:
            batches, checkpoint = self._swift_skipped  # the generators are set after the first step's batches are read
            if self._swift_batches > batches + self.args.gradient_accumulation_steps:
                return
        super()._load_rng_state(checkpoint)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """As in ``Trainer``; the step boundary lies before it, where there may be a batch."""
        watch = self._swift.watch
        job = self._swift.loop.job
        if job is None:
            samples: tuple[list[Any], Any] = super().get_batch_samples(epoch_iterator, num_batches, device)
            return samples
        with job.variables.held(at_once=True):
            if not self._swift_ended:
                watch.begin_training()
                if self.args.load_best_model_at_end and self.state.global_step + _LAST >= self.state.max_steps:
                    job.keep_boundaries()  # the best model takes the place of the last one
                job.step_boundary()
            watch.fetching = True
            try:
                samples = super().get_batch_samples(epoch_iterator, num_batches, device)
            finally:
                watch.fetching = False
        job.variables.check_data()
        self._swift_batches += len(samples[0])
        at_end = self.accelerator.gradient_state.end_of_dataloader
        self._swift_ended = at_end or len(samples[0]) < num_batches
        return samples

    # -- state --------------------------------------------------------------------------------------------------------

    def _swift_attributes(self) -> Holders:
        """Plain attributes that every Trainer has, and those of its own callbacks."""
        if self._swift_holders is None:
            callbacks = {
                f"{number} {type(each).__name__}": each
                for number, each in enumerate(self.callback_handler.callbacks)
                if type(each).__module__.startswith("transformers.") and not _of_a_service(each)
            }
            self._swift_holders = Holders({"": self} | callbacks, compat.TRAINER_PARTS | _own_names(self))
        return self._swift_holders

    def _swift_tell(self, job: Job) -> None:
        """Other attributes of a Trainer of the user's own, its arguments, and callbacks of the user's, count as
        variables.
        """
        job.variables.tell("trainer", self, self._swift_names | compat.TRAINER_PARTS | _own_names(self))
        job.variables.tell("arguments", self.args)
        for number, each in enumerate(self.callback_handler.callbacks):
            if not type(each).__module__.startswith("transformers."):
                job.variables.tell(f"callback {number} {type(each).__name__}", each)

    def _swift_capture(self) -> dict[str, Any]:
        scheduler: Any = self.lr_scheduler  # a Trainer does not have it prepared
        return {
            "phase": self._swift_phase,
            "epoch": self._swift_epoch,
            "batches": self._swift_batches,
            "skipped": list(self._swift_skipped),
            "began": self._swift_began,
            "reports": None if self._swift_reports is None else self._swift_reports.capture(),
            "scheduler": encode_state(scheduler.state_dict()),
            "state": encode_state(vars(self.state)),
            "control": encode_state(vars(self.control)),
            "attributes": self._swift_attributes().capture(),
        }

    def _swift_restore(self, data: Mapping[str, Any]) -> None:
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(decode(data["scheduler"]))
        _set(self.state, data["state"])
        _set(self.control, data["control"])
        self._swift_attributes().restore(data["attributes"])
        if self._swift_reports is not None:
            self._swift_reports.restore(data["reports"])


def _of_a_service(callback: Any) -> bool:
    return type(callback).__module__.startswith("transformers.integrations")


def _own_names(trainer: SwiftTrainer) -> frozenset[str]:
    return frozenset(name for name in vars(trainer) if name.startswith("_swift"))


def _set(target: Any, data: Any) -> None:
    """Put encoded attributes back, in place where others may hold the value, too."""
    for name, value in data[1]:
        setattr(target, name, assign(getattr(target, name, None), value))


__all__ = ["SwiftTrainer"]
