"""Epochs and batches of a training loop that the user writes: where a newcomer takes its predecessor's place.

A newcomer runs the script from its start. :meth:`TrainingLoop.epochs` begins with the predecessor's epoch, and the
first batch that the newcomer asks a training loader for is the predecessor's: there it joins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shared_core.cluster.handover import warn_plain_torchrun_once, warn_srun_once
from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError, Unsupported
from shared_core.job import Job, current_job
from shared_core.loaders import read_random, wrap_loader, write_random
from shared_core.loaders.resumable import Position, of_a_peer
from shared_core.recovery.values import NotPlain, assign, decode, encode, holds_weights
from shared_core.sharing import SharedStep, Sharing, shared_steps

_PLACE, _LOADERS, _VALUES = "loop.place", "loop.loaders", "loop.values"


class TrackedLoader:
    """A loader whose place in the data is published at batch tops.

    Attributes:
        loader: what to iterate in its stead.
    """

    def __init__(self, loader: Any, job: Job, config: SwiftConfig, ahead: int) -> None:
        self.loader = wrap_loader(
            loader,
            mode=config.data,
            seed=config.seed,
            rank=job.rank,
            ahead=ahead,
            lazy=job.joining,
            orders=job.orders,
            copied=job.reroutes,
        )
        self._pending: Mapping[str, Any] | None = None
        self._job = job

    def capture(self) -> Mapping[str, Any]:
        """Where it is, or where it will go on when it is next asked for an item, as plain data."""
        return self.loader.state() if self._pending is None else self._pending

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go there: at once, or, where an iteration was in progress, when it is asked for its first item."""
        if self._job.reroutes and self._job.added:
            state = of_a_peer(state)
        if state["live"]:
            self._pending = state
        else:
            self.loader.restore(state)

    def resume(self, position: Iterator[Any]) -> list[Any]:
        """Put ``position`` where the predecessor's iteration was, if one was in progress.

        Returns:
            The items that the predecessor had fetched ahead of their use.
        """
        if self._pending is None:
            return []
        state, self._pending = self._pending, None
        random = read_random()  # of the batch top; reading items again draws from the generators
        self.loader.restore(state, position)
        write_random(random)
        return position.last_items if isinstance(position, Position) else []


class TrainingLoop:
    """A training loop that survives the loss of workers. Without ``swiftrun`` it is a plain loop.

    Made by :func:`shared_core.attach`.

    Attributes:
        job: the job of this worker; None without ``swiftrun``.
        step: batches used so far.
        epoch: number of the epoch in progress; None outside :meth:`epochs`.
    """

    def __init__(self, job: Job | None) -> None:
        self.job: Job | None = None
        self.step = 0
        self.epoch: int | None = None
        self._phase = 0
        self._round = 0
        self._active: Callable[[], Any] = lambda: None
        self._loaders: weakref.WeakValueDictionary[int, TrackedLoader] = weakref.WeakValueDictionary()
        self._by_id: dict[int, TrackedLoader] = {}
        self._unclaimed: dict[int, Mapping[str, Any]] = {}
        self._values: dict[str, Any] = {}
        self._config = SwiftConfig()
        self._modules: list[nn.Module] = []
        self._sharing: Sharing | None = None
        if job is not None:
            self.begin(job, job.config)

    # -- what the user calls ------------------------------------------------------------------------------------------

    def epochs(self, count: int, start: int = 0) -> Iterator[int]:
        """Numbers from ``start`` up to ``count``; a newcomer begins with its predecessor's.

        Code between the start of an epoch and its training loader is run by a newcomer before it has its
        predecessor's state: write no files there.

        Args:
            count: end of the range.
            start: first number.
        """
        self._phase += 1
        self.refuse_own_steps()
        target = self._target()
        if target is not None and target["phase"] > self._phase:
            return  # the predecessor had finished them
        first = target["epoch"] if target is not None and target["phase"] == self._phase else start
        for number in range(first, count):
            self.epoch, self._round = number, 0
            yield number
        self.epoch = None

    def steps(self, loader: Any) -> Iterator[tuple[int, Any]]:
        """``(step, batch)`` for each batch of ``loader``; ``step`` counts over all epochs.

        Args:
            loader: a ``DataLoader`` or any iterable. Give loaders to :func:`attach` if they are not always first used
                in the same order.

        Without :meth:`epochs`, a worker that is lost after the first pass cannot be replaced; all workers then go back
        to the newest checkpoint.
        """
        if self.job is None:
            for batch in loader:
                yield self.step, batch
                self.step += 1
            return
        self.refuse_own_steps()
        tracked = self._tracked(loader)
        if self.nested:
            position = iter(tracked.loader)
            tracked.resume(position)
            for batch in position:
                yield self.step, batch
            return
        if not self.begin_round():
            return
        position = iter(tracked.loader)
        self.activate(position)
        while True:
            self.batch_top()
            tracked.resume(position)
            try:
                batch = next(position)
            except StopIteration:
                return
            yield self.step, batch
            self.step += 1

    def shared_steps(
        self, loader: Any, epochs: int, *, accumulate: int = 1, modules: Sequence[nn.Module] | None = None
    ) -> Iterator[SharedStep]:
        """Steps of which any worker can compute any rank's share; the only loop for ``on_failure="reroute"``.

        With it the workers go on at once when one is lost: its peers compute its share of each global batch, and a
        newcomer is let in later. Without a loss, with other options and without ``swiftrun`` it is a data-parallel loop
        as well::

            job = shared_core.attach(model, optimizer)        # no DistributedDataParallel around the model
            for step in job.shared_steps(loader, epochs=3):
                losses = step.backward(lambda batch: criterion(model(batch[0]), batch[1]))
                optimizer.step()

        What the loop registers must be the same at all workers: a newcomer gets a copy of a peer's.

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
        sharing = self._sharing = Sharing(self.job, self._config, modules or self._modules, loader, accumulate)
        return shared_steps(sharing, epochs, self, self.batch_top if self.job is not None else lambda: None)

    def wait_for_all(self) -> None:
        """After :meth:`shared_steps`: wait until newcomers have taken the places of all lost workers. Call it before
        collectives of the script's own, which need all workers.
        """
        if self._sharing is not None:
            self._sharing.wait_for_all(self.step)

    def register(self, *objects: Any, **values: Any) -> SimpleNamespace:
        """Have state of the script follow a newcomer: what the loop counts, averages or remembers.

        Args:
            objects: with ``state_dict`` and ``load_state_dict``, or any object whose attributes are plain data.
            values: initial values of counters.

        Returns:
            A namespace with ``values`` as attributes, to be read and assigned: ``count = job.register(seen=0)``, then
            ``count.seen += len(batch)``.

        Raises:
            ConfigError: for values that cannot be published.
        """
        namespace = SimpleNamespace(**values)
        for each in (*objects, *([namespace] if values else [])):
            if not hasattr(each, "__dict__") and not hasattr(each, "state_dict"):
                raise ConfigError(
                    f"register() got a {type(each).__name__}, which has no state that could be put back: pass it by "
                    "name, as in counters = job.register(total=0.0)"
                )
            self._values[f"{len(self._values)} {type(each).__name__}"] = each
            if self.job is not None and holds_weights(each):
                self.job.keep_tops()
        return namespace

    # -- what adapters call -------------------------------------------------------------------------------------------

    def begin(self, job: Job, config: SwiftConfig, *, replays: bool = False) -> None:
        """Be the loop of ``job``, with options that the script may have given.

        Args:
            job: of this worker.
            config: the options.
            replays: newcomers run the whole script, and so count and draw all that their predecessors did.
        """
        self.job, self._config = job, config
        if replays:
            return
        job.register(_PLACE, self._capture_place, self._restore_place)
        job.register(_LOADERS, self._capture_loaders, self._restore_loaders)
        job.register(_VALUES, self._capture_values, self._restore_values)

    @property
    def joining(self) -> bool:
        """Whether this is a newcomer that has not reached its predecessor's place yet."""
        return self.job is not None and self.job.joining

    @property
    def nested(self) -> bool:
        """Whether a training loader is being iterated: others inside it are no batch tops."""
        return self._active() is not None

    def track(self, loader: Any, number: int, ahead: int = 0) -> TrackedLoader:
        """A tracked loader around ``loader``; it is published for as long as the caller keeps it.

        Args:
            loader: any iterable.
            number: identifies the loader; equal in a worker and its newcomer.
            ahead: items that are fetched before they are used.
        """
        assert self.job is not None
        tracked = self._loaders[number] = TrackedLoader(loader, self.job, self._config, ahead)
        if number in self._unclaimed:
            tracked.restore(self._unclaimed.pop(number))
        return tracked

    def refuse_own_steps(self) -> None:
        """A loop is entered in which each worker computes its own share.

        Raises:
            Unsupported: with ``on_failure="reroute"``.
        """
        if self.job is not None and self.job.reroutes:
            raise Unsupported(
                "on_failure='reroute' needs a loop in which any worker can compute the share of a lost one: write 'for "
                "step in job.shared_steps(loader, epochs)' (with Accelerate: plugin.shared_steps(model, loader, "
                "epochs)), or choose on_failure='replace'"
            )

    def begin_round(self) -> bool:
        """A training loader is about to be iterated. False in a newcomer whose predecessor had finished with it."""
        assert self.job is not None
        self._round += 1
        self.job.reachable = self.epoch is not None or self._round == 1
        target = self._target()
        if target is None:
            return True
        if target["epoch"] is None and target["round"] > 1:
            self.job.fall_back(
                f"rank {self.job.rank}: the lost worker was in its {target['round']}. pass over the data, and the "
                "script's own epoch loop cannot be entered in the middle: write 'for epoch in job.epochs(n)' (with "
                "Accelerate: plugin.epochs(n))"
            )
        return bool((target["phase"], target["round"]) <= (self._phase, self._round))

    def activate(self, position: Any) -> None:
        """``position`` iterates a training loader; it counts as active for as long as it lives."""
        self._active = weakref.ref(position)

    def batch_top(self) -> bool:
        """A batch begins; True if this newcomer has just joined."""
        assert self.job is not None
        return self.job.batch_top()

    # -- state --------------------------------------------------------------------------------------------------------

    def _target(self) -> dict[str, Any] | None:
        """The predecessor's place, in a newcomer that has not joined."""
        if self.job is None or not self.joining:
            return None
        found: dict[str, Any] | None = self.job.peek(_PLACE)
        return found

    def _capture_place(self) -> dict[str, Any]:
        return {"phase": self._phase, "epoch": self.epoch, "round": self._round, "step": self.step}

    def _restore_place(self, place: Mapping[str, Any]) -> None:
        self.step = place["step"]

    def _tracked(self, loader: Any) -> TrackedLoader:
        """The tracked loader of a loader that the script itself iterates, the same each time."""
        found = self._by_id.get(id(loader))
        if found is None:
            found = self._by_id[id(loader)] = self.track(loader, len(self._by_id))
        return found

    def _capture_loaders(self) -> dict[int, Mapping[str, Any]]:
        return {number: tracked.capture() for number, tracked in self._loaders.items()}

    def _restore_loaders(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        self._unclaimed = {}
        for number, state in states.items():
            tracked = self._loaders.get(number)
            if tracked is not None:
                tracked.restore(state)
            else:
                self._unclaimed[number] = state

    def _capture_values(self) -> dict[str, Any]:
        return {name: _capture(name, each) for name, each in self._values.items()}

    def _restore_values(self, values: Mapping[str, Any]) -> None:
        for name, each in self._values.items():
            if name in values:
                _restore(each, values[name])


def _capture(name: str, each: Any) -> Any:
    try:
        return encode(each.state_dict() if hasattr(each, "state_dict") else vars(each))
    except NotPlain as error:
        raise ConfigError(
            f"the registered object {name.split()[1]!r} holds a {error}, which cannot be published for a newcomer: "
            "register plain data, or give it state_dict() and load_state_dict()"
        ) from error


def _restore(each: Any, data: Any) -> None:
    if hasattr(each, "load_state_dict"):
        each.load_state_dict(decode(data))
        return
    for name, value in decode(data).items():
        setattr(each, name, assign(getattr(each, name, None), encode(value)))


def attach(*objects: Any) -> TrainingLoop:
    """Say what a script trains, and get the loop that survives the loss of workers.

    Call :func:`shared_core.install` before the process group is created, and this after ``DistributedDataParallel``
    was put around the models.

    Args:
        objects: models, averages of them and target networks, optimizers, loaders, and whatever else has
            ``state_dict`` (schedulers, scalers).

    Raises:
        ConfigError: under ``swiftrun``, if the process group was created without :func:`shared_core.install`; if an
            object has no state.
    """
    job = current_job()
    if job is None:
        warn_plain_torchrun_once()
        warn_srun_once()
    elif dist.is_initialized() and not job.in_charge:
        raise ConfigError(
            "the process group was created before shared_core.install() was called, so it cannot survive a failure: "
            "call shared_core.install() first"
        )
    loop = TrainingLoop(job)
    models = [each for each in objects if isinstance(each, nn.Module)]
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    loop._modules = models
    if job is not None:
        job.attach(models, optimizers)
    for each in objects:
        if isinstance(each, (nn.Module, Optimizer)):
            continue
        if isinstance(each, torch.utils.data.DataLoader):
            if job is not None:
                loop._tracked(each)
        else:
            loop.register(each)
    return loop
