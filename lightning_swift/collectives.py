"""Lightning's collectives, as a replacement can take part in them again."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy

from shared_core import Job

#: Bytes of an object broadcast: 8 for the length, the rest for the object; longer ones need a second operation.
_BROADCAST_BYTES = 1024


class CollectiveStrategy(ParallelStrategy):
    """A strategy whose collectives can be left out, and whose sources continue with what was delivered.

    It stands before the strategy of Lightning's whose collectives these are.

    Attributes:
        job: of this worker; None where nobody recovers it.
        quiet: leave out collectives: code of Lightning is called again whose peers are elsewhere.
    """

    job: Job | None
    quiet: bool

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self.quiet:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]  # that of the strategy behind this

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return tensor if self.quiet else super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As Lightning's, except that the source, too, continues with what was delivered.

        Decisions that depend on the clock or on files (a time limit, the name of a checkpoint) may come out differently
        when a replacement on the source rank takes them again; its peers already act on the first one.
        """
        if self.job is None or not self.job.runtime.operates or not dist.is_initialized():
            return super().broadcast(obj, src)  # type: ignore[safe-super]
        if self.quiet:
            return obj
        with self.job.runtime.unchecked():
            return _broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """As Lightning's; a replacement may contribute something else (whether a file exists by now)."""
        if self.job is None:
            return super().reduce_boolean_decision(decision, all)
        with self.job.runtime.unchecked():
            return super().reduce_boolean_decision(decision, all)


def _broadcast(obj: Any, src: int) -> Any:
    sent = pickle.dumps(obj) if dist.get_rank() == src else b""
    head = torch.zeros(_BROADCAST_BYTES, dtype=torch.uint8)
    start = _BROADCAST_BYTES - 8
    if sent:
        first = len(sent).to_bytes(8, "little") + sent[:start]
        head[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
    dist.broadcast(head, src)
    data = head.numpy().tobytes()
    length = int.from_bytes(data[:8], "little")
    received = data[8 : 8 + length]
    if length > start:
        rest = torch.zeros(length - start, dtype=torch.uint8)
        own = sent[start:length]
        if own:
            rest[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        dist.broadcast(rest, src)
        received += rest.numpy().tobytes()
    # The source keeps its own object where it is what was delivered.
    return obj if received == sent else pickle.loads(received)
