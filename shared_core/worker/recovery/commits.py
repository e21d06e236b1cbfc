"""The ranks agree on the newest checkpoint that all know to be committed, by a collective that each batch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shared_core.worker.comm import Runtime
from shared_core.worker.messages.disk_log import DiskLog


class Commits:
    """Cuts the log on disk back.

    Args:
        runtime: the groups.
        log: on disk.
        newest_top: batch top of the newest checkpoint that this rank knows to be committed; 0 for none.
    """

    def __init__(self, runtime: Runtime, log: DiskLog, newest_top: Callable[[], int]) -> None:
        self._runtime, self._log, self._newest_top = runtime, log, newest_top
        self._mark: tuple[Any, torch.Tensor] | None = None

    def mark(self) -> None:
        """Tell all ranks that this one has published a batch top, and which checkpoint it knows to be committed; call
        right after the top. Nobody waits for it before the next one.

        What the ranks have all left behind is dropped from the logs.
        """
        if self._mark is not None:
            work, newest = self._mark
            work.wait()
            self._log.committed(int(newest))
        newest = torch.tensor(self._newest_top())
        with self._runtime.unchecked():  # a newcomer may know of a newer one
            self._mark = dist.all_reduce(newest, op=dist.ReduceOp.MAX, async_op=True), newest
