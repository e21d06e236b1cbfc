"""Steps whose shares any worker can compute: the loop of data-parallel training with ``on_failure="reroute"``.

Each logical rank's share of a step is a function of the parameters, the step and the rank: its data come from
:class:`~shared_core.loaders.shards.Shards`, its random numbers from a seed. So no state of a loader is published, and
a newcomer that is let in has only to know the number of the step.
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
from shared_core.errors import ConfigError, Unsupported
from shared_core.job import Job
from shared_core.loaders.randomness import RawRandom, restore_raw, seed_random
from shared_core.loaders.seeded import place_seed
from shared_core.loaders.shards import Shards
from shared_core.reroute.data_parallel import DataParallelSteps
from shared_core.testing import inject

#: What a step's random numbers are seeded with besides its number and rank; data have other places.
_STEP = -2
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class SharedStep:
    """One step of all workers.

    Attributes:
        number: counts from 0 over all epochs.
        epoch: number of the epoch.
        first: it is the first of its epoch.
    """

    number: int
    epoch: int
    first: bool
    _sharing: Sharing

    def backward(self, loss: Loss) -> Tensor:
        """Leave the gradient of the global batch in ``.grad``: the mean over all logical ranks.

        Args:
            loss: takes a batch of the loader and returns its mean loss. It is called for this rank's batches and for
                those of lost ranks, in any order: what it does otherwise must not depend on how often it is called,
                and it must not talk to other workers.

        Returns:
            The mean loss of each logical rank, float64 of shape (ranks,); the same at all workers.

        Raises:
            Unsupported: if ``loss`` changes a buffer of the model, or talks to other workers.
        """
        return self._sharing.backward(self.number, loss)

    def wait_for_all(self) -> None:
        """Wait until newcomers have taken the places of all lost workers. Call it before collectives of the script's
        own, which need all workers (an evaluation), and before :meth:`backward`.

        Raises:
            ConfigError: after :meth:`backward`.
        """
        self._sharing.wait_for_all(self.number)


class Sharing:
    """The steps of one loop.

    Args:
        job: of this worker; None without ``swiftrun``.
        config: options.
        modules: what is trained.
        loader: see :class:`Shards`.
        accumulate: batches of a step at each rank.

    Raises:
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
        self._job, self._seed, self._accumulate = job, config.seed, accumulate
        _refuse(modules)
        self._modules = modules
        self._shards = Shards(loader, self._world, config.seed)
        self._loss: Loss | None = None
        self._parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self._buffers = [each for module in modules for each in module.named_buffers()]
        if not self._parameters:
            raise ConfigError("nothing is trained: pass the model, with parameters that require gradients")
        self._steps: DataParallelSteps | None = None
        if job is not None:
            job.alike = True
        if job is not None and job.reroutes and self._world > 1:
            self._steps = DataParallelSteps(
                self._rank,
                self._world,
                self._parameters,
                self._compute,
                job.lane,
                lambda wait: job.knocking(wait=wait),
                job.let_in,
                ordered=job.config.reduction == "ordered",
                noted=lambda lost, step: job.event("rerouted", lost=lost, step=step),
            )
            job.at_end(self._steps.settle)
        self._start_alike()

    @property
    def per_epoch(self) -> int:
        """Steps in an epoch; the last of one may have fewer batches."""
        return -(-self._shards.per_epoch // self._accumulate)

    def clear(self) -> None:
        """Forget gradients: those of a step are its own."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self, number: int) -> SharedStep:
        """The step with this number, which is the next."""
        if self._steps is not None:
            self._steps.step = number
        epoch, index = divmod(number, self.per_epoch)
        return SharedStep(number, epoch, index == 0, self)

    def wait_for_all(self, number: int) -> None:
        """See :meth:`SharedStep.wait_for_all`."""
        if self._steps is None:
            return
        if self._steps.step != number:
            raise ConfigError(
                f"wait_for_all() was called after backward() of step {number}: newcomers are let in between steps, so "
                "call it before"
            )
        self._steps.wait_for_all()

    def backward(self, number: int, loss: Loss) -> Tensor:
        """See :meth:`SharedStep.backward`."""
        self._loss = loss
        if self._steps is not None:
            if self._steps.step != number:
                raise ConfigError(f"backward() was called twice in step {number}: add the losses up, and call it once")
            return torch.tensor(self._steps.run(), dtype=torch.float64)
        losses = torch.zeros(self._world, dtype=torch.float64)
        self.clear()
        losses[self._rank] = self._compute(self._rank, number)
        if self._world > 1:
            self._average()
            dist.all_reduce(losses)
        return losses

    def _average(self) -> None:
        """The mean of all ranks' gradients, where all are there; none where no rank has one."""
        used = torch.tensor([float(p.grad is not None) for p in self._parameters])
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        flat = torch.cat([*(part.flatten() for part in parts), used.to(parts[0].dtype)])
        dist.all_reduce(flat)
        *sums, used = flat.split([*(p.numel() for p in self._parameters), len(self._parameters)])
        for parameter, total, ranks in zip(self._parameters, sums, used.tolist(), strict=True):
            parameter.grad = (total.view_as(parameter) / self._world).to(parameter.dtype) if ranks else None

    def _compute(self, rank: int, number: int) -> float:
        """Gradients and loss of a rank's share of a step; the random generators are left as they were."""
        assert self._loss is not None
        epoch, index = divmod(number, self.per_epoch)
        first = index * self._accumulate
        numbers = range(first, min(first + self._accumulate, self._shards.per_epoch))
        batches = [self._shards.read(rank, epoch, each) for each in numbers]
        before, versions, issued = RawRandom(), [buffer._version for _, buffer in self._buffers], self._issued()
        seed_random(place_seed(self._seed, _STEP, number, rank))
        total = 0.0
        with ExitStack() as apart:
            for module in self._modules:
                if isinstance(module, DistributedDataParallel):
                    apart.enter_context(module.no_sync())
            for batch in batches:
                inject.point("reroute.forward")
                loss = self._loss(batch) / len(batches)
                inject.point("reroute.backward")
                loss.backward()
                total += float(loss.detach())
        restore_raw(before)
        changed = [
            name for (name, buffer), version in zip(self._buffers, versions, strict=True) if buffer._version != version
        ]
        if changed:
            raise Unsupported(
                f"the forward pass changes the buffer {changed[0]!r}, which would then depend on who computes whose "
                "share: shared_steps() cannot be used with this model; choose on_failure='replace' and your own loop"
            )
        if self._issued() != issued:
            raise Unsupported(
                f"rank {self._rank}: the loss function talks to other workers, but after a loss some call it more "
                "often than others: move collectives (gathered metrics, synchronised logs) out of what is given to "
                "backward()"
            )
        return total

    def _issued(self) -> int:
        return self._job.issued() if self._job is not None and self._steps is not None else 0

    def _start_alike(self) -> None:
        """All ranks train what rank 0 has built, as with ``DistributedDataParallel``."""
        if self._world > 1:
            for tensor in (t for module in self._modules for t in (*module.parameters(), *module.buffers())):
                dist.broadcast(tensor.data, 0)


def shared_steps(sharing: Sharing, epochs: int, position: Any, top: Callable[[], Any]) -> Iterator[SharedStep]:
    """The steps of some epochs.

    Args:
        sharing: computes them.
        epochs: how many.
        position: its attribute ``step`` is the number of the next step; it is restored in a newcomer.
        top: marks the batch tops; a newcomer takes its predecessor's place in one.
    """
    while True:
        sharing.clear()
        top()
        step = sharing.step(position.step)
        if position.step >= epochs * sharing.per_epoch:
            return
        yield step
        position.step += 1


def _refuse(modules: Sequence[nn.Module]) -> None:
    for module in (m for each in modules for m in each.modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise Unsupported(
                "shared_steps() cannot be used with batch normalisation, whose running statistics belong to one worker:"
                " use GroupNorm or LayerNorm, or choose on_failure='replace' and a loop of its own"
            )
