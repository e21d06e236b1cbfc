"""What a forward pass changed and returned, for a replacement whose parameters are already newer than that pass.

The output of a DDP module is all that flows from the parameters to the user's code. It is published, with what forward
changed, before the first gradient bucket of each backward; a replacement that is behind continues with what its failed
worker saw. Where outputs are larger than the parameters, parameters before each update are kept instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shared_core.faults import inject
from shared_core.worker.comm import Runtime
from shared_core.worker.comm.compat import out_of_graphs
from shared_core.worker.state.local_state import BoundaryPosition, StateParts
from shared_core.worker.state.publications import SharedMemoryPublisher
from shared_core.worker.state.updates import Updates

_OUTPUTS = "swift.outputs"


class ForwardRecorder:
    """Forward passes of the present batch."""

    def __init__(
        self,
        runtime: Runtime,
        publisher: SharedMemoryPublisher,
        updates: Updates,
        parts: StateParts,
        position: BoundaryPosition,
    ) -> None:
        self._runtime, self._publisher, self._updates = runtime, publisher, updates
        self._parts, self._position = parts, position
        self._buffers: Callable[[], Mapping[str, torch.Tensor]] = dict
        self._backwards = 0
        self._graph = self._mutations = -1
        self._outputs: list[list[Any]] = []
        self._room: list[list[torch.Tensor | None]] = []  # for copies of outputs, by forward pass and place

    def attach(self, buffers: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """``buffers`` gives what forward may change, by name."""
        self._buffers = buffers

    def at_boundary(self) -> None:
        self._backwards, self._graph, self._outputs = 0, -1, []

    def before_bucket(self) -> None:
        """DDP hands over a gradient bucket: forward is done. Publishes what it changed, or puts back what the failed
        worker had. Called on the thread of backward.
        """
        inject.point("bucket")
        if self._position.joining:
            return
        if self._updates.computes_again:
            self._updates.share_images()
            return
        graph = torch._C._current_graph_task_id()
        mutations = hash(tuple((id(b), b._version) for b in self._buffers().values()))
        if graph == self._graph and mutations == self._mutations:
            return
        if graph != self._graph:
            self._backwards += 1
        self._graph, self._mutations = graph, mutations
        number = self._backwards - 1
        if self._updates.exact:
            changed = self._parts.capture(forward_mutated=True)
            self._publisher.publish_mid(self._runtime.boundary, number, changed | {_OUTPUTS: self._outputs})
        else:
            recorded = self._publisher.read_mid(self._runtime.boundary, number)
            if recorded is not None:
                self._parts.restore(recorded)
        self._outputs = []

    @out_of_graphs
    def after_forward(self, ddp: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook of DDP modules. Keeps copies of the output; in a replacement that is behind it writes the failed
        worker's output over this one's, in place, or returns it where values are no tensors.
        """
        if not torch.is_grad_enabled() or self._position.joining or self._updates.computes_again:
            return None
        if self._updates.exact:
            self._keep([output] if isinstance(output, torch.Tensor) else tree_flatten(output)[0])
            return None
        leaves, layout = tree_flatten(output)
        recorded = self._publisher.read_mid(self._runtime.boundary, self._backwards)
        outputs = recorded[_OUTPUTS] if recorded is not None else []
        place = len(self._outputs)
        self._outputs.append([])
        if place >= len(outputs):
            return None
        for index, (leaf, value) in enumerate(zip(leaves, outputs[place], strict=True)):
            if isinstance(leaf, torch.Tensor):
                leaf.data.copy_(value)
            elif value is not None:
                leaves[index] = value
        return tree_unflatten(leaves, layout)

    def _keep(self, leaves: Sequence[Any]) -> None:
        # Copies: the user's code may scale a loss in place before the first bucket is there.
        place = len(self._outputs)
        if place == len(self._room):
            self._room.append([])
        room, kept = self._room[place], [leaf if _plain(leaf) else None for leaf in leaves]
        room += [None] * (len(leaves) - len(room))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                room[index] = kept[index] = _copied(leaf.detach(), room[index])
        self._outputs.append(kept)
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
        replicated = self._updates.replicated
        # Judged by the first batch only, because all ranks must come to the same answer.
        if self._position.boundaries <= 1 and replicated is not None and 2 * size > max(replicated.nbytes, 1 << 20):
            self._updates.keep_images()  # outputs are larger than the parameters: keep those instead


def _copied(tensor: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
    """A copy, in the memory of an earlier one if shape and dtype fit: new memory costs more than the copy."""
    if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
        return tensor.clone()
    return room.copy_(tensor)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
