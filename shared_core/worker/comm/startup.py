"""Operations of a start-up: recorded for later newcomers, and answered in one from what its predecessor recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared_core.worker.comm.op import Op
from shared_core.worker.comm.state import SharedState

#: Results up to so many bytes are recorded.
_MOST_BYTES = 64 * 1024


class StartUp:
    """Counts the operations of a start-up by entry call, group and name."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._ordinals: dict[tuple[int, str, str], int] = {}

    def answer(self, group: str, op: Op, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """What a newcomer's operation gives before its join: what the predecessor got, else something neutral, because
        real state is loaded at the join. None where the operation is to run. Callers hold the lock.
        """
        state = self._state
        recorded = None
        if state.in_startup:
            place = (state.entry, group, op.signature[0])
            ordinal = self._ordinals.get(place, 0)
            self._ordinals[place] = ordinal + 1
            key = (*place, ordinal)
            if state.starting:
                recorded = state.records.get(key)
            elif sum(t.numel() * t.element_size() for t in op.results) <= _MOST_BYTES:
                op.future.add_done_callback(lambda _: state.listener.record(key, op.results))
        if not state.starting:
            return None
        if recorded is not None and [t.shape for t in recorded] == [t.shape for t in op.results]:
            return recorded
        return neutral(op, inputs)


def neutral(op: Op, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What an operation gives if all members give what this one does; where that is not known, what lies there."""
    name = op.signature[0]
    if name.startswith("all_reduce"):
        return [tensor.detach() for tensor in inputs]
    if name.startswith("all_gather") and inputs and inputs[0].numel():
        mine = inputs[0].detach().reshape(1, -1)
        return [mine.expand(out.numel() // mine.numel(), -1).reshape(out.shape) for out in op.results]
    return op.results
