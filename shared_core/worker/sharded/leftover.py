"""Gradients of a shard that a batch with a whole update leaves behind: state of the step boundary where the next batch
adds to them.

Most programs let go of them first. Then they are no state, and a copy at each boundary would cost time for nothing: so
those of a parameter are published until the program has let go of them in each batch so far. No other rank could tell
that one of them is missing in a replacement. So there they are not a number, until the program lets go of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from shared_core.errors import Unsupported
from shared_core.worker.sharded.local import local_part


class LeftoverShards:
    """What this rank's program does with the gradients of each parameter.

    Args:
        parameters: of the model, whole or divided.

    Attributes:
        missing: places of gradients that were not published and must not be used.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._released: dict[int, bool] = {}  # whether in each batch so far; by place
        self._held: Collection[int] = ()  # at the boundary that no reduction has come after yet
        self.missing: Collection[int] = ()

    def left(self) -> dict[int, bool]:
        """The gradients at this step boundary, by place, and whether they have to be published."""
        self._held = [place for place, parameter in enumerate(self._parameters) if parameter.grad is not None]
        return {place: place not in self.missing and not self._released.get(place, False) for place in self._held}

    def expect(self, missing: Iterable[int]) -> None:
        """Have gradients that were not published, and that the program is to let go of."""
        self.missing = [*missing]
        for place in self.missing:
            parameter = self._parameters[place]
            parameter.grad = torch.full_like(parameter.detach(), torch.nan)

    def reducing(self) -> None:
        """Gradients of this batch are about to be added to what is there, for the first time.

        Raises:
            Unsupported: to what was not published.
        """
        missing, self.missing = self.missing, ()
        for place in missing:
            grad = self._parameters[place].grad
            if grad is not None and bool(local_part(grad).isnan().any()):
                raise Unsupported(
                    f"gradients of earlier batches were not given to this replacement (parameter {place}, of shape "
                    f"{tuple(grad.shape)}): the program let go of them in each batch before and adds to them in this "
                    "one. Call zero_grad() in every batch, or in none"
                )
        held, self._held = self._held, ()
        for place in held:
            self._released[place] = self._released.get(place, True) and self._parameters[place].grad is None
