"""All private names of Accelerate and transformers that this package uses, and all places where they are patched.

Nothing else uses them, except that subclasses override some. :data:`NAMES` says why each is needed; a test looks each
up, so that a version that has changed one is noticed before a job meets it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import InitProcessGroupKwargs

from shared_core.versions import Tested

TESTED = Tested("accelerate", "1.15", "1.15")

_ACCELERATOR, _LOADER = "accelerate:Accelerator", "accelerate.data_loader"
_TRAINER = "transformers.trainer:Trainer"

#: ``module:name``, with its parameters where it is overridden or called, and why it is needed.
NAMES: tuple[tuple[str, str], ...] = (
    (
        f"{_ACCELERATOR}._dataloaders",
        "loaders, which count epochs themselves, and are exchanged for watched ones",
    ),
    (f"{_ACCELERATOR}._models", "the engine that was prepared"),
    (f"{_ACCELERATOR}._optimizers", "what is trained"),
    (f"{_ACCELERATOR}._schedulers", "their state is published"),
    (f"{_ACCELERATOR}._custom_objects", "objects registered for checkpointing are published"),
    (f"{_ACCELERATOR}._prepare_deepspeed(self, *args)", "overridden: engines that survive"),
    (f"{_ACCELERATOR}.deepspeed_engine_wrapped", "what backward() turns to is exchanged"),
    ("accelerate.state:GradientState._set_sync_gradients(self, sync_gradients)", "a replacement continues in a window"),
    ("accelerate.state:PartialState._shared_state", "whether Accelerate has set up a process group already"),
    (f"{_LOADER}:DataLoaderDispatcher._fetch_batches(self, iterator)", "a step boundary lies before the broadcast"),
    (f"{_LOADER}:DataLoaderDispatcher._non_blocking", "as it sends batches"),
    (f"{_LOADER}:DataLoaderDispatcher._drop_last", "as it ends a pass"),
    (f"{_LOADER}:DataLoaderDispatcher._stop_iteration", "the same"),
    (f"{_ACCELERATOR}.prepare_data_loader", "sets _is_accelerate_prepared on what it has prepared"),
    ("torch.optim.lr_scheduler:LRScheduler._step_count", "OneCycleLR refuses to go further than its end"),
    (f"{_TRAINER}._build_accelerator_args(self, **kwargs)", "overridden: the plugin is one of the handlers"),
    (f"{_TRAINER}._init_training_state", "overridden: a replacement begins in the failed worker's epoch"),
    (f"{_TRAINER}._run_epoch", "overridden: and at its batch"),
    (f"{_TRAINER}._finalize_training(self, trial, num_train_samples, start_time)", "overridden: the true start"),
    (f"{_TRAINER}._load_rng_state(self, checkpoint)", "overridden: a replacement's random state is published"),
    (f"{_TRAINER}.get_batch_samples(self, epoch_iterator, num_batches, device)", "overridden: the step boundary"),
    (f"{_TRAINER}._tr_loss", "running sums of the loss are published"),
    (f"{_TRAINER}._total_loss_scalar", "the same"),
    (f"{_TRAINER}._globalstep_last_logged", "the same"),
    ("transformers.trainer:skip_first_batches", "patched: the loader that skips batches is watched, too"),
)

#: Attributes of a ``transformers.Trainer`` that are no state of its own: data, what has state itself, constants.
TRAINER_PARTS = frozenset(
    """args model model_wrapped optimizer lr_scheduler accelerator callback_handler state control data_collator
    train_dataset eval_dataset processing_class train_dataloader _eval_dataloaders _memory_tracker""".split()
)

#: Handlers are looked up by their exact class, and only that one is asked before the process group is created: the
#: plugin says that it is one.
ASKED_FIRST: type = InitProcessGroupKwargs


def accelerator_under_construction() -> Accelerator | None:
    """The ``Accelerator`` in whose constructor we are. Handlers are not told; frames are the only way to it."""
    frame = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and isinstance(candidate, Accelerator):
            return candidate
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def is_set_up() -> bool:
    return bool(PartialState._shared_state)


def uses_deepspeed() -> bool:
    """Whether the ``Accelerator`` that is built was given DeepSpeed's plugin; it notes that in the environment."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"


def become(target: Any, mixin: type) -> None:
    """Patch: give an object, which others hold already, a class with ``mixin`` before its own."""
    target.__class__ = mixed(mixin, type(target))


def without_mixin(target: Any) -> type:
    found: type = type(target).__bases__[1]
    return found


def mixed(mixin: type, kind: type) -> type:
    """``kind`` with ``mixin`` before it, under the same name."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


# -- what an Accelerator has prepared ---------------------------------------------------------------------------------


def loaders_of(accelerator: Accelerator) -> list[Any]:
    """Loaders, in the order of their preparation."""
    found: list[Any] = accelerator._dataloaders
    return found


def exchange_loader(accelerator: Accelerator, old: Any, new: Any) -> None:
    accelerator._dataloaders = [new if each is old else each for each in accelerator._dataloaders]


def models_of(accelerator: Accelerator) -> list[Any]:
    found: list[Any] = accelerator._models
    return found


def optimizers_of(accelerator: Accelerator) -> list[Any]:
    """Optimizers, in Accelerate's wrappers."""
    found: list[Any] = accelerator._optimizers
    return found


@contextlib.contextmanager
def without_optimizers(accelerator: Accelerator) -> Iterator[None]:
    """``save_state`` writes none in here."""
    kept, accelerator._optimizers = accelerator._optimizers, []
    try:
        yield
    finally:
        accelerator._optimizers = kept


def schedulers_of(accelerator: Accelerator) -> list[Any]:
    """Schedulers, in Accelerate's wrappers."""
    found: list[Any] = accelerator._schedulers
    return found


def registered(accelerator: Accelerator) -> list[Any]:
    found: list[Any] = accelerator._custom_objects
    return found


def set_sync(accelerator: Accelerator, sync: bool) -> None:
    """Whether gradients are summed after the next backward."""
    accelerator.gradient_state._set_sync_gradients(sync)


def is_prepared(loader: Any) -> bool:
    return bool(getattr(loader, "_is_accelerate_prepared", False))


def persists(loader: Any) -> bool:
    return bool(getattr(loader, "persistent_workers", False))


def may_step(scheduler: AcceleratedScheduler) -> bool:
    """Whether a scheduler is not at its end; OneCycleLR refuses to go further."""
    total = getattr(scheduler.scheduler, "total_steps", None)
    return total is None or bool(scheduler.scheduler._step_count <= total)


# -- dispatch_batches -------------------------------------------------------------------------------------------------


def fetch(dispatcher: DataLoaderDispatcher, iterator: Any) -> Any:
    """The next batch for all, on rank 0, and what is announced of it."""
    return dispatcher._fetch_batches(iterator)


def is_at_end(dispatcher: DataLoaderDispatcher) -> bool:
    return bool(getattr(dispatcher, "_stop_iteration", False))


def set_at_end(dispatcher: DataLoaderDispatcher, ended: bool) -> None:
    dispatcher._stop_iteration = ended


def drops_last(dispatcher: DataLoaderDispatcher) -> bool:
    return bool(dispatcher._drop_last)


def sends_at_once(dispatcher: DataLoaderDispatcher) -> bool:
    return bool(dispatcher._non_blocking)


# -- transformers -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def skipping(rest: Callable[[Any], Any], inside: Any = None) -> Iterator[None]:
    """Patch: where the Trainer skips batches by making a new loader, it gets ``rest(loader)``.

    That is at the start of an epoch. ``Trainer`` calls the function by its global name, once; there is no other way
    between. ``inside``: arguments of a Trainer that begins inside an epoch also if they say ``ignore_data_skip``.
    """
    import transformers.trainer

    module: Any = transformers.trainer
    kept = module.skip_first_batches, getattr(inside, "ignore_data_skip", False)

    def skip(loader: Any, count: int) -> Any:
        if inside is not None:
            inside.ignore_data_skip = kept[1]
        return rest(loader)

    module.skip_first_batches = skip
    if inside is not None:
        inside.ignore_data_skip = False
    try:
        yield
    finally:
        module.skip_first_batches = kept[0]
