"""The update overlapped with communication: each gradient bucket's parameters are updated once it is reduced, while
others are still being reduced (Swift's wait-free update, TPDS 2024).

All of it happens on the program's own thread: as DDP hands over the next bucket, and at the end of backward, before DDP
itself waits for its buckets. What is not known by then to be right early is left to ``optimizer.step()``, which makes
the rest of the update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shared_core.errors import Unsupported
from shared_core.worker.comm.op import Op
from shared_core.worker.state.ddp_buckets import BucketInput
from shared_core.worker.state.local_state import BoundaryPosition
from shared_core.worker.state.updates import Updates

_OPTION = "state.overlapped_update"


def check(modules: Sequence[DistributedDataParallel], optimizers: Sequence[Optimizer]) -> None:
    """Raises Unsupported, saying why, where updates cannot be overlapped."""
    if len(modules) != 1 or len(optimizers) != 1:
        raise Unsupported(
            f"{_OPTION} needs one model in DistributedDataParallel and one optimizer; there are {len(modules)} and "
            f"{len(optimizers)}: leave the option off"
        )
    for option in ("find_unused_parameters", "mixed_precision"):
        if getattr(modules[0], option):
            raise Unsupported(
                f"{_OPTION} does not work with DistributedDataParallel({option}=...): which gradients are final is "
                "known only after backward. Leave one of them off"
            )


class Overlapped:
    """Makes the updates of a DDP module. ``layout``: which are in which bucket; empty before it is settled."""

    def __init__(
        self, updates: Updates, layout: Callable[[], Sequence[BucketInput]], position: BoundaryPosition
    ) -> None:
        self._updates, self._layout, self._position = updates, layout, position
        self._graph = -1
        self._handed = 0
        self._waiting: deque[tuple[Op, BucketInput]] = deque()

    def bucket(self, op: Op) -> None:
        """DDP has handed over a bucket, which ``op`` reduces; called in backward, in the order of the buckets. Raises
        Unsupported in a second backward before the step.
        """
        if self._position.joining or not self._updates.may_begin:
            return
        graph = torch._C._current_graph_task_id()
        if graph != self._graph:
            self._graph, self._handed = graph, 0
            self._waiting.clear()
            if self._updates.torn:
                raise Unsupported(
                    f"a second backward before optimizer.step(), but with {_OPTION} the update of the first has been "
                    "made: accumulate gradients under no_sync(), or leave the option off"
                )
        layout, number = self._layout(), self._handed
        self._handed += 1
        if number >= len(layout) or not layout[number].fits(op.results[0]):
            return
        while self._waiting and self._waiting[0][0].future.done():
            self._update()
        self._waiting.append((op, layout[number]))
        if self._handed == len(layout):
            # DDP queues its own callback, which waits for all buckets, right after this.
            Variable._execution_engine.queue_callback(self._rest)

    def _rest(self) -> None:
        while self._waiting:
            self._waiting[0][0].future.wait()
            self._update()

    def _update(self) -> None:
        op, bucket = self._waiting.popleft()
        op.future.value()  # raises what made the reduction fail
        parts = bucket.parts(op.results[0])
        self._updates.make_part([p for p, _ in parts], [g for _, g in parts])
