"""A logical rank's share of a step, computed so that the outcome does not depend on who computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from shared_core.errors import Unsupported
from shared_core.loaders.randomness import RawRandom, restore_raw, seed_random
from shared_core.loaders.seeded import place_seed

if TYPE_CHECKING:
    from shared_core.job import Job

#: What a step's random numbers are seeded with besides its place; data have other places.
_STEP = -2


class Shares:
    """The surroundings in which shares are computed.

    Args:
        job: of this worker, where others may have to compute its shares; else None.
        what: what asks for shares that any worker can compute, for messages.
        code: the user's code that computes them, for messages.

    Raises Unsupported for batch normalisation.
    """

    def __init__(self, job: Job | None, modules: Sequence[nn.Module], seed: int, what: str, code: str) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._job, self._seed, self._what, self._code = job, seed, what, code
        self._buffers = [each for module in modules for each in module.named_buffers()]
        for module in (m for each in modules for m in each.modules()):
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise Unsupported(
                    f"{what} cannot be used with batch normalisation, whose running statistics belong to one worker: "
                    "use GroupNorm or LayerNorm, or choose on_failure='replace' and a loop of its own"
                )

    @contextmanager
    def share(self, *place: int) -> Iterator[None]:
        """Compute a share in here. Afterwards the random generators are as before, unless an error comes out.

        The random numbers depend on ``place``. Raises Unsupported if a buffer was changed, or collectives were issued.
        """
        before, versions, issued = RawRandom(), [buffer._version for _, buffer in self._buffers], self._issued()
        seed_random(place_seed(self._seed, _STEP, *place))
        yield
        restore_raw(before)
        changed = [
            name for (name, buffer), version in zip(self._buffers, versions, strict=True) if buffer._version != version
        ]
        if changed:
            raise Unsupported(
                f"the forward pass changes the buffer {changed[0]!r}, which would then depend on who computes whose "
                f"share: {self._what} cannot be used with this model; choose on_failure='replace' and a loop of its own"
            )
        if self._issued() != issued:
            raise Unsupported(
                f"rank {self._rank}: {self._code} talks to other workers, but after a failure some call it more often "
                "than others: move collectives (gathered metrics, synchronised logs) out of it"
            )

    def _issued(self) -> int:
        if self._job is None:
            return 0
        runtime = self._job.runtime
        with runtime.lock:
            return sum(group.next for group in runtime.groups.values())


def start_alike(modules: Sequence[nn.Module]) -> None:
    """Broadcast rank 0's parameters and buffers in place, as ``DistributedDataParallel`` does. A collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in (t for module in modules for t in (*module.parameters(), *module.buffers())):
            dist.broadcast(tensor.data, 0)
