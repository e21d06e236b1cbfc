"""What the groups of a process tell, and ask, the rest of the worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from shared_core.protocol.frontier import StepBoundary
from shared_core.worker.comm.op import Op
from shared_core.worker.messages.group_log import Logged


class KeptBucketInput(Protocol):
    """Recomputes the content of a gradient bucket while its reduction is under way."""

    def write(self, bucket: torch.Tensor, checksum: int) -> None:
        """Overwrite ``bucket``, flat and on the CPU, with what was there before its reduction. Raises RecoveryFailed if
        that does not have this checksum, of :func:`input_checksum`.
        """


class OperationListener(Protocol):
    """Given to :class:`~shared_core.worker.comm.runtime.Runtime`. Called on any thread, some with the runtime's
    lock held.
    """

    def first_group(self) -> None:
        """The default process group is made: form the first generation, or see that a replacement joins later."""

    def made_again(self, group: str) -> tuple[StepBoundary | None, Mapping[int, Logged]]:
        """For a group that the program makes: the step boundary where a replacement begins in it (None in all others),
        and what was logged for it, by sequence number.
        """

    def exact(self) -> bool:
        """False while a replacement computes with newer parameters than the failed worker: inputs differ."""

    def before_bucket(self) -> None:
        """DDP hands over a gradient bucket, or a collective is called in a backward pass."""

    def bucket_input(self, bucket: torch.Tensor) -> KeptBucketInput | None:
        """Recomputes the bucket that DDP hands over; None if that cannot be done."""

    def bucket_handed_over(self, op: Op) -> None:
        """DDP has handed over a bucket, which this operation reduces."""

    def bucket_order(self, ddp: DistributedDataParallel, op: Op) -> None:
        """DDP agrees on the order of its buckets by this operation."""

    def waiting_changed(self, waiting: bool) -> None:
        """Operations are in flight, or none any more: while there are, the progress time-out does not run."""

    def whereabouts(self) -> str:
        """Where the ranks are that are waited for, in a sentence and a space; empty if it is not known."""

    def await_absent(self) -> bool:
        """A collective of all ranks is called on the program's thread while some are absent. Blocks. True when they are
        in again, False if nobody admits them.
        """
