"""Training loops that the user writes, and what a script says of them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shared_core.errors import ConfigError
from shared_core.handover import warn_plain_torchrun_once, warn_srun_once
from shared_core.job import Job, current_job, install
from shared_core.loop_progress import LoopProgress
from shared_core.sharing import SharedStep, StepSharing, shared_steps
from shared_core.worker.sharded.own import Owner
from shared_core.worker.variables.around import Place, is_bare, places

_INSIDE = (
    "attach() was called inside a loop over job.epochs(): a replacement enters that loop at another epoch, without it. "
    "Make all models and optimizers before the loop, and attach them together; those that are not used yet may wait. "
    "Or end the loop, and begin another with attach()"
)


class TrainingLoop:
    """A training loop that survives the failure of workers. Without ``swiftrun`` it is a plain loop.

    Made by :func:`shared_core.attach`.

    Example::

        job = shared_core.attach(model, optimizer)
        counts = job.register(loss=0.0)
        for epoch in job.epochs(2):
            for step, batch in job.steps(loader):
                loss = model(batch).square().mean()
                job.note_loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                counts.loss += loss.item()
        print(f"{job.total_steps} steps, mean loss {counts.loss / job.total_steps:.3f}")
    """

    def __init__(self, progress: LoopProgress, models: Sequence[nn.Module] = ()) -> None:
        self._progress, self._models = progress, models
        self._sharing: StepSharing | None = None

    @property
    def job(self) -> Job | None:
        """The job of this worker; None without ``swiftrun``."""
        return self._progress.job

    @property
    def total_steps(self) -> int:
        """Batches used so far, of all epochs and loops."""
        return self._progress.total_steps

    @property
    def epoch(self) -> int | None:
        """Number of the epoch in progress; None outside :meth:`epochs`."""
        return self._progress.epoch

    def epochs(self, count: int, start: int = 0) -> Iterator[int]:
        """Numbers from ``start`` up to ``count``; a replacement begins with the failed worker's.

        Between the start of an epoch and its training loader, a replacement runs the script's code with the random
        generators and registered values that the failed worker had there, but before it has the model's state: write no
        files there.

        Args:
            count: end of the range.
            start: first number.
        """
        return self._progress.epochs(count, start, sys._getframe(1))

    def steps(self, loader: Any) -> Iterator[tuple[int, Any]]:
        """``(index, batch)`` for each batch of ``loader``, as ``enumerate(loader)``; see :attr:`total_steps`.

        A loader is known by its place (the n-th ``steps`` of the epoch), so it may be a new object each time. Inside
        another ``steps`` it is a part of that one's batch. Without :meth:`epochs`, all workers start again when one
        fails after the first pass.

        Args:
            loader: a ``DataLoader``, a progress bar around one, a generator, any iterable.

        Raises:
            Unsupported: for an iterable whose items cannot be found again, and under ``torch.inference_mode()``.
        """
        own: list[Callable[[], Any]] = []
        progress = self._progress
        progress.hear(sys._getframe(1))
        bare = is_bare(sys._getframe(1))
        made = () if bare or progress.job is None else places(sys._getframe(1))
        steps = self._steps(loader, own, bare, made)
        own.append(weakref.ref(steps))
        return steps

    def _steps(
        self, loader: Any, own: Sequence[Callable[[], Any]], bare: bool, made: Sequence[Place]
    ) -> Iterator[tuple[int, Any]]:
        progress = self._progress
        if progress.job is None:
            for index, batch in enumerate(loader):
                yield index, batch
                progress.used()
            return
        progress.refuse_own_steps()
        progress.look_around_once(sys._getframe())
        outer = not progress.nested
        if outer and not progress.begin_round():
            return
        begun = progress.loaders.begin(loader, progress.epoch or 0)
        if outer:
            progress.activate(begun.position)
        entered = expected = False
        progress.walk(own[0](), bare=bare, made=made)
        try:
            while True:
                if not entered and not progress.joining:
                    progress.loaders.enter(begun)
                    entered = True
                with progress.variables_held():
                    if outer and progress.step_boundary() and not entered:
                        progress.loaders.enter(begun)
                        entered = True
                if outer and not expected and not progress.joining:
                    expected = True
                    progress.expect(loader, begun.index)
                try:
                    batch = begun.next()
                except StopIteration:
                    return
                begun.index += 1
                progress.gave(own[0]())
                yield begun.index - 1, batch
                progress.used()
        finally:
            progress.walked(own[0]())
            progress.loaders.leave(begun)
            if outer:
                progress.end_round()

    def shared_steps(
        self, loader: Any, epochs: int, *, accumulate: int = 1, modules: Sequence[nn.Module] | None = None
    ) -> Iterator[SharedStep]:
        """Steps of which any worker can compute any rank's share; the only loop for ``on_failure="reroute"``.

        With it the workers continue at once when one fails: its peers compute its share of each global batch, and a
        replacement is admitted later. Without a failure, with other options and without ``swiftrun`` it is a
        data-parallel loop as well::

            job = shared_core.attach(model, optimizer)        # no DistributedDataParallel around the model
            for step in job.shared_steps(loader, epochs=3):
                losses = step.backward(lambda batch: criterion(model(batch[0]), batch[1]))
                optimizer.step()

        What the loop registers must be the same at all workers: a replacement gets a copy of a peer's.

        Args:
            loader: a ``DataLoader`` over a map-style data set, with a ``DistributedSampler`` if there are several
                workers. Order and randomness of its data are functions of the option ``seed``, rank, epoch and batch.
            epochs: passes over the data.
            accumulate: batches of a step at each rank; the gradient is that of their mean loss.
            modules: what is trained, if not the models given to :func:`attach`.

        Raises:
            ConfigError: for a second loop.
            Unsupported: for models with batch normalisation, and for data that only one rank can read.
        """
        if self._sharing is not None:
            raise ConfigError("shared_steps() was called before: make all steps in one loop, with as many epochs")
        progress = self._progress
        sharing = self._sharing = StepSharing(self.job, progress.config, modules or self._models, loader, accumulate)
        return shared_steps(sharing, epochs, progress, progress.step_boundary if self.job is not None else lambda: None)

    def wait_for_all(self) -> None:
        """After :meth:`shared_steps`: wait until replacements have taken the places of all failed workers.

        Call it before collectives of the script's own, which need all workers.
        """
        if self._sharing is not None:
            self._sharing.wait_for_all(self.total_steps)

    def register(self, *objects: Any, **values: Any) -> SimpleNamespace:
        """Have state of the script follow a replacement: what the loop counts, averages or remembers.

        Args:
            objects: with ``state_dict`` and ``load_state_dict``, or any object whose attributes are plain data.
            values: initial values of counters.

        Returns:
            A namespace with ``values`` as attributes, to be read and assigned: ``count = job.register(seen=0)``, then
            ``count.seen += len(batch)``.

        Raises:
            ConfigError: for values that cannot be published.
        """
        counters, weigh = self._progress.registered.add(objects, values)
        if self.job is not None:
            self.job.variables.registered(objects)
            if weigh:
                self.job.keep_boundaries()
        return counters

    def ignore(self, *names: str) -> None:
        """Variables and attributes of the script with these names may be others in a replacement: nothing depends
        on them.

        All others are put back, or compared (docs/will_my_script_work.md).
        """
        if self.job is not None:
            self.job.variables.ignore(*names)

    def note_loss(self, loss: torch.Tensor | float) -> None:
        """Tell the training loss of this batch: the policies ``value`` and ``coci`` decide by it, and the dashboard
        draws it. A tensor is not read at once.
        """
        if self.job is not None:
            self.job.note_loss(loss)


#: Of the newest loop of this process.
_newest: LoopProgress | None = None


def attach(*objects: Any) -> TrainingLoop:
    """Say what a script trains, and get the loop that survives the failure of workers.

    Call this after ``DistributedDataParallel`` was put around the models. A script that trains one model after the
    other, or the same in another way, calls it for each; what was attached before no longer is.

    Args:
        objects: models, averages of them and target networks, optimizers, loaders, and whatever else has
            ``state_dict`` (schedulers, scalers).

    Raises:
        ConfigError: if an object has no state; inside :meth:`TrainingLoop.epochs`; under ``swiftrun``, if the process
            group is none that can survive.
        Unsupported: under ``swiftrun``, if a process group works on another device than the CPU; see
            :func:`shared_core.install`.

    Example::

        job = shared_core.attach(model, optimizer, scheduler)
        for step, batch in job.steps(loader):
            ...
    """
    global _newest
    job = current_job()
    if job is None:
        warn_plain_torchrun_once()
        warn_srun_once()
    else:
        install()
    if job is not None and dist.is_initialized() and job.runtime.world is None:
        raise ConfigError(
            "the process group was created before shared_core.install() was called, so it cannot survive a failure: "
            "call shared_core.install() first"
        )
    if job is not None and _newest is not None and _newest.epoch is not None:
        raise ConfigError(_INSIDE)
    progress = _newest = LoopProgress(job, after=_newest)
    engines = [each for each in objects if isinstance(each, Owner)]
    objects = tuple(each for each in objects if not any(engine.holds(each) for engine in engines))
    models = [each for each in objects if isinstance(each, nn.Module)]
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    loop = TrainingLoop(progress, models)
    if job is not None:
        job.attach(models, optimizers)
        job.keep_images()
        if not engines:
            job.variables.look_at_optimizers()
        if models and not optimizers:  # then the script changes the parameters itself
            job.keep_boundaries()
    for each in objects:
        if isinstance(each, (nn.Module, Optimizer)):
            continue
        if isinstance(each, torch.utils.data.DataLoader):
            if job is not None:
                progress.loaders.attach(each)
        else:
            loop.register(each)
    return loop
