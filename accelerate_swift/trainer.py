"""``SwiftTrainer``: ``transformers.Trainer`` that loses workers and goes on.

``transformers`` creates the process group with ``TrainingArguments``, before there is a Trainer. So importing this
module in a worker of ``swiftrun`` is what makes the group one that survives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from transformers.trainer_utils import TrainOutput

from accelerate_swift import compat
from accelerate_swift.plugin import SwiftPlugin, enabled
from accelerate_swift.reports import Reports
from shared_core import install, launched_by_swiftrun
from shared_core.encoding import assign, decode, encode_state
from shared_core.errors import Unsupported
from shared_core.trackers import prepare

if launched_by_swiftrun() and enabled():
    install()
    prepare()

_NAME = "transformers.state"
#: In the place of a checkpoint's folder: go on in the middle of an epoch, but load nothing.
_PLACE = "the predecessor's place"


class SwiftTrainer(transformers.Trainer):
    """A ``Trainer`` whose workers may be lost; see :class:`accelerate_swift.SwiftPlugin`.

    Import it before ``TrainingArguments`` are made. A batch top is the start of an update step: with gradient
    accumulation, a newcomer runs all micro-batches of its step again.

    Args:
        args: as ``Trainer``.
        swift: the plugin; one with the options of the environment by default.
        kwargs: as ``Trainer``.
    """

    def __init__(self, *args: Any, swift: SwiftPlugin | None = None, **kwargs: Any) -> None:
        self._swift = swift or SwiftPlugin()
        self._swift.watch.marks_tops = False  # a Trainer fetches all micro-batches of a step before it uses the first
        self._swift_phase = 0
        self._swift_epoch = 0
        self._swift_batches = 0
        self._swift_target: Mapping[str, Any] | None = None
        #: When this call of train() began, by the wall clock; lost workers included.
        self._swift_began: float | None = None
        self._swift_reports: Reports | None = None
        super().__init__(*args, **kwargs)
        if self._swift.loop.job is not None:
            self._swift_reports = Reports(self, self._swift.loop.job)
            self._swift.loop.job.register(_NAME, self._swift_capture, self._swift_restore)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        built["kwargs_handlers"] = [*built.get("kwargs_handlers", ()), self._swift]
        return built

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As ``Trainer.train``. A worker that is lost in a second call cannot be replaced: all workers then go back to
        the newest checkpoint, or to the start.
        """
        self._swift_phase += 1
        self._swift_began = None
        job = self._swift.loop.job
        if job is not None:
            if job.config.resizes:
                raise Unsupported(
                    "transformers.Trainer counts the steps of an epoch in advance, so the number of workers cannot "
                    "change in the middle of one: leave on_failure='replace' and resize.replace_timeout_s=0"
                )
            job.checkpoints.keep_number("transformers.Trainer counts the steps of an epoch in advance")
            job.checkpoints.note_reachable(self._swift_phase == 1)
            if self._swift.loop.joining:
                target = self._swift_target = job.peek(_NAME)
                if target is not None and target["phase"] > self._swift_phase:
                    job.fall_back(
                        f"rank {job.rank}: the lost worker was in call {target['phase']} of Trainer.train(), which "
                        "a newcomer cannot enter: use one Trainer for each call, in scripts of their own"
                    )
                if target is not None and self._swift_reports is not None:
                    self._swift_began = target["began"]
                    self._swift_reports.take_up(target["reports"])
        return super().train(*args, **kwargs)

    # -- where a newcomer begins --------------------------------------------------------------------------------------

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epoch, batches = super()._init_training_state(*args, **kwargs)
        return (epoch if self._swift_target is None else self._swift_target["epoch"]), batches

    def _run_epoch(self, **kwargs: Any) -> None:  # type: ignore[override]  # called with names only
        self._swift.loop.epoch = self._swift_epoch = kwargs["epoch"]
        self._swift_batches = 0
        if self._swift_began is None:
            self._swift_began = kwargs["start_time"]
        kwargs["start_time"] = self._swift_began
        if self._swift_reports is not None:
            self._swift_reports.watch()
        if self._swift_target is None:
            self._swift_run(kwargs)
            return
        self._swift_batches, self._swift_target = self._swift_target["batches"], None
        kwargs |= {
            "resume_from_checkpoint": _PLACE,
            "epochs_trained": kwargs["epoch"],
            "steps_trained_in_current_epoch": self._swift_batches,
        }
        with compat.loader_kept():
            self._swift_run(kwargs)

    def _swift_run(self, kwargs: dict[str, Any]) -> None:
        run: Any = super()._run_epoch
        run(**kwargs)

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        began = start_time if self._swift_began is None else self._swift_began
        finalize: Any = super()._finalize_training
        output: TrainOutput = finalize(trial, num_train_samples, began)
        return output

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != _PLACE:
            super()._load_rng_state(checkpoint)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """As in ``Trainer``; the batch top lies before it."""
        if self._swift.loop.job is not None:
            self._swift.watch.begin_training()
            self._swift.loop.batch_top()
        samples: tuple[list[Any], Any] = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._swift_batches += len(samples[0])
        return samples

    # -- state --------------------------------------------------------------------------------------------------------

    def _swift_callbacks(self) -> dict[str, Any]:
        """Callbacks with state that counts; those of services hold connections instead."""
        return {
            f"{number} {type(each).__name__}": each
            for number, each in enumerate(self.callback_handler.callbacks)
            if not type(each).__module__.startswith("transformers.integrations")
        }

    def _swift_capture(self) -> dict[str, Any]:
        scheduler: Any = self.lr_scheduler  # a Trainer does not have it prepared
        attributes = {name: getattr(self, name) for name in compat.TRAINER_STATE if hasattr(self, name)}
        return {
            "phase": self._swift_phase,
            "epoch": self._swift_epoch,
            "batches": self._swift_batches,
            "began": self._swift_began,
            "reports": None if self._swift_reports is None else self._swift_reports.capture(),
            "attributes": encode_state(attributes),
            "scheduler": encode_state(scheduler.state_dict()),
            "state": encode_state(vars(self.state)),
            "control": encode_state(vars(self.control)),
            "callbacks": {name: encode_state(vars(each)) for name, each in self._swift_callbacks().items()},
        }

    def _swift_restore(self, data: Mapping[str, Any]) -> None:
        _set(self, data["attributes"])
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(decode(data["scheduler"]))
        _set(self.state, data["state"])
        _set(self.control, data["control"])
        for name, each in self._swift_callbacks().items():
            if name in data["callbacks"]:
                _set(each, data["callbacks"][name])
        if self._swift_reports is not None:
            self._swift_reports.restore(data["reports"])


def _set(target: Any, data: Any) -> None:
    """Put encoded attributes back, in place where others may hold the value too."""
    for name, value in data[1]:
        setattr(target, name, assign(getattr(target, name, None), value))


__all__ = ["SwiftTrainer"]
