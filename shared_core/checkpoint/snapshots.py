"""Snapshots of one rank: what is small or changes at any time at once, the rest on a thread until the fence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shared_core.checkpoint.spool import Spool, Target

if TYPE_CHECKING:
    import torch


class Snapshots:
    """Takes the snapshots of one rank and hands them to the machine's writer. Used by one thread.

    Args:
        spool: of the job on this machine.
        rank: logical rank.
        world_size: ranks of the job.
        local: ranks of this machine.
        target: where checkpoints are written; None keeps them in memory only.
        say: prints a line for the user; once for each cause.
    """

    def __init__(
        self,
        spool: Spool,
        rank: int,
        world_size: int,
        local: Sequence[int],
        target: Target | None,
        say: Callable[[str], None],
    ) -> None:
        raise NotImplementedError

    def take(
        self,
        step: int,
        parts: Mapping[str, bytes],
        images: Mapping[str, tuple[Mapping[str, torch.Tensor], Mapping[str, str]]],
        meta: Mapping[str, Any],
        at_once: Collection[str] = (),
    ) -> bool:
        """Take a snapshot of the present values; the caller goes on before all of them are copied.

        Args:
            step: batch tops passed.
            parts: rank-local parts, by file name.
            images: tensors and metadata, by file name (ending in ``.safetensors``, so that other tools find them).
            meta: of the checkpoint, equal on all ranks.
            at_once: names of tensors to copy before this returns: whatever changes before the fence. Tensors of less
                than 64 KiB are copied at once anyway.

        Returns:
            Whether it was taken; otherwise (no memory) the user was told, once for each cause.
        """
        raise NotImplementedError

    def fence(self) -> None:
        """Wait until all is copied: call it before anything changes the tensors. Costs nothing without a snapshot."""
        raise NotImplementedError

    def flush(self, timeout_s: float) -> bool:
        """Wait until the newest snapshot is committed; False if it failed, was never taken, or time ran out."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for the copying and end the thread. The writer goes on."""
        raise NotImplementedError
