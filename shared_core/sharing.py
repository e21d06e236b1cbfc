"""Steps whose shares any worker can compute: the loop of data-parallel training with ``on_failure="reroute"``.

Each logical rank's share of a step is a function of the parameters, the step and the rank: its data come from
:class:`~shared_core.loaders.shards.Shards`, its random numbers from a seed. So no state of a loader is published, and a
replacement that is admitted has only to know the number of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError
from shared_core.faults import inject
from shared_core.job import Job
from shared_core.loaders.shards import Shards
from shared_core.reroute.data_parallel import DataParallelSteps, Outcome, Shares, start_alike, steps_of
from shared_core.reroute.summing import flat_gradients, set_mean_gradients

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class SharedStep:
    """One step of all workers.

    Attributes:
        number: counts from 0 over all epochs.

    Example::

        job = shared_core.attach(model, optimizer)
        for step in job.shared_steps(loader, epochs=1):
            step.backward(lambda batch: model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    """

    number: int
    epoch: int
    first: bool
    _sharing: StepSharing

    def backward(self, loss: Loss) -> Tensor:
        """Leave the gradient of the global batch in ``.grad``: the mean over all logical ranks.

        Args:
            loss: takes a batch of the loader and returns its mean loss. It is called for this rank's batches and for
                those of failed ranks, in any order: what it does otherwise must not depend on how often it is called,
                and it must not talk to other workers.

        Returns:
            The mean loss of each logical rank, float64 of shape (ranks,) on the CPU; the same at all workers.

        Raises:
            Unsupported: if ``loss`` changes a buffer of the model, or talks to other workers.
            ConfigError: for a second call in one step, with ``on_failure="reroute"``.
        """
        return self._sharing.backward(self.number, loss)

    def wait_for_all(self) -> None:
        """Wait until replacements have taken the places of all failed workers.

        Call it before collectives of the script's own, which need all workers (an evaluation), and
        before :meth:`backward`.

        Raises:
            ConfigError: after :meth:`backward`.
        """
        self._sharing.wait_for_all(self.number)


class StepSharing:
    """The steps of one loop.

    Args:
        job: of this worker; None without ``swiftrun``.
        accumulate: batches of a step at each rank.

    Raises:
        ConfigError: nothing is trained, or ``accumulate`` is less than 1.
        Unsupported: for models whose shares are not independent.
    """

    def __init__(
        self,
        job: Job | None,
        config: SwiftConfig,
        modules: Sequence[nn.Module],
        loader: DataLoader[Any],
        accumulate: int,
    ) -> None:
        if accumulate < 1:
            raise ConfigError(f"accumulate must be at least 1, got {accumulate}")
        self._rank, self._world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._accumulate = accumulate
        rerouted = job if job is not None and job.reroutes and self._world > 1 else None
        self._apart = Shares(rerouted, modules, config.seed, "shared_steps()", "the loss function")
        self._modules = modules
        self._shards = Shards(loader, self._world, config.seed)
        self._loss: Loss | None = None
        self._job = job
        self._parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        if not self._parameters:
            raise ConfigError("nothing is trained: pass the model, with parameters that require gradients")
        self._steps: DataParallelSteps | None = None
        self._next = 0
        if job is not None:
            job.trained.alike()
        if rerouted is not None:
            self._steps = steps = steps_of(rerouted, self._parameters, self._compute)
            rerouted.survivor_groups.at_end(lambda: steps.settle(self._next))
            rerouted.survivor_groups.while_completed(steps.come)
        start_alike(modules)

    @property
    def per_epoch(self) -> int:
        """Steps in an epoch; the last of one may have fewer batches."""
        return -(-self._shards.per_epoch // self._accumulate)

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def step(self, number: int) -> SharedStep:
        self._next = number
        epoch, index = divmod(number, self.per_epoch)
        return SharedStep(number, epoch, index == 0, self)

    def wait_for_all(self, number: int) -> None:
        if self._steps is None:
            return
        if self._next != number:
            raise ConfigError(
                f"wait_for_all() was called after backward() of step {number}: replacements are admitted between "
                "steps, so call it before"
            )
        self._steps.wait_for_all(number)

    def backward(self, number: int, loss: Loss) -> Tensor:
        losses = self._backward(number, loss)
        if self._job is not None:
            self._job.note_loss(losses.mean())
        return losses

    def _backward(self, number: int, loss: Loss) -> Tensor:
        self._loss = loss
        if self._steps is not None:
            if self._next != number:
                raise ConfigError(f"backward() was called twice in step {number}: add the losses up, and call it once")
            outcomes = self._steps.run(number)
            self._next += 1
            return torch.tensor([outcome.loss for outcome in outcomes], dtype=torch.float64)
        losses = torch.zeros(self._world, dtype=torch.float64)
        self.clear()
        losses[self._rank] = self._compute(self._rank, number).loss
        if self._world > 1:
            flat = flat_gradients(self._parameters)
            dist.all_reduce(flat)
            set_mean_gradients(flat, self._parameters, self._world)
            dist.all_reduce(losses)
        return losses

    def _compute(self, rank: int, number: int) -> Outcome:
        """Gradients and loss of a rank's share of a step; the random generators are as before afterwards."""
        assert self._loss is not None
        epoch, index = divmod(number, self.per_epoch)
        first = index * self._accumulate
        numbers = range(first, min(first + self._accumulate, self._shards.per_epoch))
        batches = [self._shards.read(rank, epoch, each) for each in numbers]
        total = 0.0
        with ExitStack() as apart:
            for module in self._modules:
                if isinstance(module, DistributedDataParallel):
                    apart.enter_context(module.no_sync())
            apart.enter_context(self._apart.share(number, rank))
            for batch in batches:
                inject.point("reroute.forward")
                loss = self._loss(batch) / len(batches)
                inject.point("reroute.backward")
                loss.backward()
                total += float(loss.detach())
        return Outcome(total)


def shared_steps(sharing: StepSharing, epochs: int, position: Any, boundary: Callable[[], Any]) -> Iterator[SharedStep]:
    """The steps of some epochs.

    Args:
        position: its attribute ``total_steps`` is the number of the next step, which ``used()`` counts on; it is
            restored in a replacement.
        boundary: marks the step boundaries; a replacement takes the failed worker's place in one.
    """
    while True:
        sharing.clear()
        boundary()
        step = sharing.step(position.total_steps)
        if position.total_steps >= epochs * sharing.per_epoch:
            return
        yield step
        position.used()
