"""Parameters that no attached optimizer steps: averages of weights, target networks, codebooks, frozen layers.

No update counts their versions, and each rank may have its own. Where the script changes something outside updates they
are rank-local state: published at each step boundary in which they have changed, in a file of their own, to which later
boundaries refer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from shared_core.worker.state.checksums import checksum
from shared_core.worker.state.publications import SharedMemoryPublisher
from shared_core.worker.state.replicated import Replicated

#: Parameters up to this size are copied in case the script turns out to change them, in bytes.
SMALL = 16 << 20


class UnoptimizedParameters:
    """The parameters of ``replicated`` that none of its optimizers has in a group. ``shared`` are identities (``id``)
    of parameters that ``DistributedDataParallel`` has made alike on all ranks.
    """

    def __init__(self, replicated: Replicated, shared: Collection[int]) -> None:
        self._replicated = replicated
        self._shared = shared
        self._known: dict[int, tuple[int, int]] = {}
        self._files: dict[int, int] = {}

    @property
    def places(self) -> list[int]:
        """Their places in the shared order; empty where nothing is optimized."""
        if not self._replicated.optimizers:
            return []
        stepped = self._replicated.stepped()
        return [i for i, p in enumerate(self._replicated.parameters) if id(p) not in stepped]

    @property
    def own(self) -> bool:
        """Whether some were not made alike, as those of an average or a target network beside the model."""
        return any(id(self._replicated.parameters[place]) not in self._shared for place in self.places)

    @property
    def small(self) -> bool:
        """Whether all parameters together have at most :data:`SMALL` bytes."""
        return sum(p.nbytes for p in self._replicated.parameters) <= SMALL

    def capture(self) -> dict[int, torch.Tensor]:
        """Values by place; the tensors are live."""
        return {place: self._replicated.parameters[place].detach() for place in self.places}

    def restore(self, values: Mapping[int, torch.Tensor]) -> None:
        """Copy values back; between two entry calls, when nothing is optimized, nothing."""
        for place, value in values.items() if self._replicated.optimizers else ():
            self._replicated.parameters[place].data.copy_(value)
        self._known.clear()

    def publish(self, publisher: SharedMemoryPublisher, boundary: int, values: Mapping[int, Any]) -> dict[int, int]:
        """Write those that have changed since the last time. ``values`` come from :meth:`capture`. Returns for each
        place the step boundary with whose file it was written.
        """
        changed = {}
        for place, value in values.items():
            known = self._known.get(place)
            # A change through .data is not counted, so equal counts say nothing.
            if known is None or known[0] != value._version or known[1] != checksum(value):
                changed[place] = value
        if changed:
            publisher.write_unoptimized(boundary, changed)
        for place, value in changed.items():
            known = self._known.get(place)
            counted = known is not None and known[0] != value._version
            # What counts its changes is not looked at again before it counts none.
            self._known[place] = (value._version, -1 if counted else checksum(value))
            self._files[place] = boundary
        return {place: self._files[place] for place in values}
