"""Operations of a start-up: recorded for later newcomers, and answered in one from what its predecessor recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from shared_core.errors import Unsupported
from shared_core.worker.comm.listener import RecordKey
from shared_core.worker.comm.op import Op
from shared_core.worker.comm.state import SharedState

#: Results up to so many bytes are recorded, whoever asks for them.
_SMALL_BYTES = 64 * 1024
#: What the script itself asks for is recorded up to so many bytes.
_MOST_BYTES = 256 << 20
#: Of what newcomers may never ask for, so many bytes are held.
_MOST_HELD_BYTES = 64 << 20
#: Modules that hand out parameters, which a newcomer gets at its join.
_HAND_OUT = (
    "deepspeed.",
    "torch.distributed._state_dict_utils",
    "torch.distributed.checkpoint.",
    "torch.distributed.fsdp.",
    "torch.distributed.utils",
    "torch.nn.parallel.",
)


class StartUp:
    """Counts the operations of a start-up by entry call, group, name and part of the program."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._ordinals: dict[tuple[int, str, str], int] = {}

    def answer(self, group: str, op: Op, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """What a newcomer's operation gives before its join: what the predecessor got, else something neutral, because
        real state is loaded at the join. None where the operation is to run. Callers hold the lock.

        Raises:
            Unsupported: in a newcomer, if the result was too large to be recorded.
        """
        state = self._state
        recorded = None
        if state.in_startup:
            place = (state.entry, group, f"{op.signature[0]}{state.part and ' in '}{state.part}")
            ordinal = self._ordinals.get(place, 0)
            self._ordinals[place] = ordinal + 1
            key = (*place, ordinal)
            if state.starting:
                recorded = state.records.get(key)
            else:
                self._record(key, op)
        if not state.starting:
            return None
        if recorded == [] and op.results:
            raise Unsupported(
                f"rank {state.rank}: a newcomer needs the result of {op.signature[0]} that its predecessor got "
                f"({_size(op.results)} bytes), which was too large to be kept. Outside the training passes exchange "
                f"at most {_MOST_BYTES >> 20} MiB at once, or have each rank read or compute the data itself"
            )
        if recorded is not None and [t.shape for t in recorded] == [t.shape for t in op.results]:
            return recorded
        return neutral(op, inputs)

    def _record(self, key: RecordKey, op: Op) -> None:
        """Have the result kept, unless it may be parameters."""
        state, size = self._state, _size(op.results)
        parameters = all(each.is_floating_point() for each in op.results)
        if size > _SMALL_BYTES and (state.keeps_small or (parameters and _hands_out())):
            return
        held = state.held
        if held is None:
            keep = size <= _MOST_BYTES
            op.future.add_done_callback(lambda _: state.listener.record(key, op.results if keep else []))
            return
        keep = size + sum(_size(each) for _, each in held) <= _MOST_HELD_BYTES
        op.future.add_done_callback(lambda _: held.append((key, [t.clone() for t in op.results if keep])))


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _hands_out() -> bool:
    """Whether a framework that hands out parameters has called."""
    frame = sys._getframe(2)
    while frame is not None:
        if f"{frame.f_globals.get('__name__', '')}.".startswith(_HAND_OUT):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def neutral(op: Op, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What an operation gives if all members give what this one does; where that is not known, what lies there."""
    name = op.signature[0]
    if name.startswith("all_reduce"):
        return [tensor.detach() for tensor in inputs]
    if name.startswith("all_gather") and inputs and inputs[0].numel():
        mine = inputs[0].detach().reshape(1, -1)
        return [mine.expand(out.numel() // mine.numel(), -1).reshape(out.shape) for out in op.results]
    return op.results
