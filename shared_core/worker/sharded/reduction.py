"""How FSDP's gradients are reduced, so that the log needs no copy of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shared_core.worker.comm.compat import reduce_scatter_single
from shared_core.worker.comm.results import CollectiveResults


class ReduceFromOwnMemory:
    """What FSDP does by itself, as its ``set_custom_reduce_scatter`` hook: each reduction has an input of its own.
    Nobody writes to that memory again, so the log keeps the input itself and no copy. ``before`` is called before each
    reduction, which adds to the gradients of the shard.
    """

    def __init__(self, results: CollectiveResults, before: Callable[[], None]) -> None:
        self._results, self._before = results, before

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self._before()
        with self._results.lending():
            return reduce_scatter_single(
                output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
            )
