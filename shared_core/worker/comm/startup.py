"""Operations and messages of a start-up: recorded for later replacements, which are given what the
failed worker got.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from shared_core.errors import Unsupported
from shared_core.worker.comm import compat
from shared_core.worker.comm.op import Op
from shared_core.worker.comm.state import SharedState
from shared_core.worker.state.publications import Part, RecordKey

#: Results up to so many bytes are recorded, whoever asks for them.
_SMALL_BYTES = 64 * 1024
#: What the script itself asks for is recorded up to so many bytes.
_MOST_BYTES = 256 << 20
#: Of what replacements may never ask for, so many bytes are held.
_MOST_HELD_BYTES = 64 << 20
#: Modules that hand out parameters, which a replacement gets at its join.
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
        self._ordinals: dict[tuple[int, str, str, Part], int] = {}

    def answer(self, group: str, op: Op, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """What a replacement's operation gives before its join: what the failed worker got, else something neutral,
        because real state is loaded at the join. None if the operation is to run. Callers hold the lock. Tensors may
        alias ``inputs``, the records or ``op.results``. Raises Unsupported in a replacement, if the result was too
        large to be recorded.
        """
        state = self._state
        key = self.place(group, op.signature[0])
        if not state.starting:
            # Not in the backward of a batch whose boundary was no recovery point.
            if key is not None and not (state.part and compat.in_backward()):
                op.record = self.keeper(key, op.results)
            return None
        recorded = self.recorded(key, op.results)
        return neutral(op, inputs) if recorded is None else recorded

    def recorded(self, key: RecordKey | None, results: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """What the failed worker got, if of these shapes; else None. Raises Unsupported if it was too large."""
        found = self._state.records.get(key) if key is not None else None
        if found == [] and results:
            assert key is not None
            raise Unsupported(
                f"rank {self._state.rank}: a replacement needs the result of {key.name} that the failed worker got "
                f"({sum(each.nbytes for each in results)} bytes), which was too large to be kept. Outside the "
                f"training passes exchange at most {_MOST_BYTES >> 20} MiB at once, or have each rank read or compute "
                "the data itself"
            )
        return found if found is not None and [t.shape for t in found] == [t.shape for t in results] else None

    def place(self, group: str, name: str) -> RecordKey | None:
        """The key of the next operation of this name; None outside a start-up. Counts it. Callers hold the lock."""
        state = self._state
        if not state.in_startup:
            return None
        place = (state.entry, group, name, state.part)
        ordinal = self._ordinals.get(place, 0)
        self._ordinals[place] = ordinal + 1
        return RecordKey(state.entry, group, name, ordinal, state.part)

    def keeper(self, key: RecordKey, into: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        """A function that records the result, to be called when it is in the tensors ``into`` and before the caller can
        change them. None if it may be parameters or gradients, which are not recorded. Callers hold the lock.
        """
        state, size = self._state, sum(each.nbytes for each in into)
        parameters = all(each.is_floating_point() or _is_bytes_of_a_tensor(each) for each in into)
        if size > _SMALL_BYTES and (state.keeps_small or (parameters and _hands_out())):
            return None
        held, fits = state.held, size <= _MOST_BYTES
        if held is not None:
            fits = held.nbytes + size <= _MOST_HELD_BYTES
            held.nbytes += size if fits else 0

        def put() -> None:
            results = list(into) if fits else []
            with state.lock:
                if held is not None and state.held is held:
                    held.entries.append((key, [each.clone() for each in results]))
                    return
            state.publisher.records.add(key, results)

        return put


def _is_bytes_of_a_tensor(result: torch.Tensor) -> bool:
    """DeepSpeed hands out parameters as bytes, in their shape; a pickled object has one dimension."""
    return result.dtype == torch.uint8 and result.dim() > 1


def _hands_out() -> bool:
    """Whether a framework that hands out parameters is among the callers."""
    frame = sys._getframe(2)
    while frame is not None:
        if f"{frame.f_globals.get('__name__', '')}.".startswith(_HAND_OUT):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def neutral(op: Op, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What it gives if all members give what this one does; outputs as they are where that is unknown."""
    name = op.signature[0]
    if name.startswith("all_reduce"):
        return [tensor.detach() for tensor in inputs]
    if name.startswith("all_gather") and inputs and inputs[0].numel():
        mine = inputs[0].detach().reshape(1, -1)
        return [mine.expand(out.numel() // mine.numel(), -1).reshape(out.shape) for out in op.results]
    return op.results
