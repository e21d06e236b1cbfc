"""Snapshots of one rank: what may change at any time is copied at once, the rest on a thread until the fence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shared_core.checkpoint.image import Changed, Image, Stager, temporary_of, write_file
from shared_core.checkpoint.spool import Sealed, Spool, Target
from shared_core.checkpoint.storage import cause_of
from shared_core.errors import StorageFull, SwiftError

if TYPE_CHECKING:
    import torch

#: Snapshots of a rank in memory, at most: the newest whole one, one being written, one being taken; one more may be
#: held because another machine has a copy of it.
MOST = 3


class Snapshots:
    """Takes the snapshots of one rank and hands them to the machine's writer. Any thread may wait at the fence.

    Attributes:
        waited_s: seconds of waits at the fence, in all.

    Args:
        target: where checkpoints are written; None keeps them in memory only.
        say: prints a line for the user; called once for each cause until a snapshot succeeds.
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
        self._spool, self._rank, self._world_size, self._local = spool, rank, world_size, tuple(local)
        self._target, self._say = target, say
        self._stager = Stager()
        self._fence_lock = threading.Lock()
        self.waited_s = 0.0
        self._newest = -1
        self._said: set[str] = set()

    def into(self, folder: str) -> None:
        """Have the next snapshots written to this folder or URL; does nothing where they stay in memory."""
        if self._target is not None and self._target.where != folder:
            self._target = replace(self._target, where=folder)

    def take(
        self,
        step: int,
        parts: Mapping[str, bytes],
        images: Mapping[str, tuple[Mapping[str, torch.Tensor], Mapping[str, str]]],
        meta: Mapping[str, Any],
    ) -> bool:
        """Take a snapshot of the present values; returns before all of them are copied, see :meth:`fence`.

        Args:
            parts: rank-local parts, by file name; no two ranks use the same.
            images: tensors and metadata, by file name (ending in ``.safetensors``, so that other tools find them).
            meta: of the checkpoint, equal on all ranks and in all generations.

        Returns:
            False if there was no room: the user is told, once for each cause.

        Raises:
            Unsupported: a tensor has no place in an image.
        """
        self._stager.fence()
        spool, made = self._spool, []
        held = spool.steps()
        if step not in held and len(held) >= MOST + bool(spool.held()):
            self._tell(
                "slow",
                f"{len(held)} snapshots wait in memory, because the writer is too slow: none is"
                f" made at step {step}. Make them less often (checkpoint.every_steps), or use faster storage",
            )
            return False
        try:
            folder = spool.folder_of(step)
            for name, (tensors, metadata) in images.items():
                image = Image(folder / name, tensors, metadata)
                made.append(image)
                again = temporary_of(image.path)
                spool.spare(name, again)
                spool.check_room(image.nbytes - (again.stat().st_size if again.exists() else 0))
                image.begin()
            for name, payload in parts.items():
                write_file(folder / name, payload)
        except OSError as error:
            self._give_up(step, made, error)
            return False
        except BaseException:
            for image in made:
                image.discard()
            raise
        files = (*parts, *images)
        part = Sealed(step, self._rank, self._world_size, self._local, files, meta, self._target)
        self._stager.begin(lambda: self._finish(part, made))
        return True

    def fence(self) -> None:
        """Wait until all is copied: call it before anything changes the tensors. Costs nothing without a snapshot."""
        with self._fence_lock:
            started = time.perf_counter()
            self._stager.fence()
            self.waited_s += time.perf_counter() - started

    def flush(self, timeout_s: float) -> bool:
        """Wait until the newest snapshot is committed; False if it failed, was never taken, or time ran out."""
        self._stager.fence()
        return self._newest >= 0 and self._spool.wait_committed(self._newest, timeout_s)

    def _finish(self, part: Sealed, images: list[Image]) -> None:
        try:
            for image in images:
                image.seal()
            self._spool.seal(part)
        except (OSError, Changed) as error:
            self._give_up(part.step, images, error)
        else:
            self._newest = part.step
            self._said.clear()

    def _give_up(self, step: int, images: list[Image], error: OSError | SwiftError) -> None:
        for image in images:
            with suppress(OSError):
                image.discard()
        if isinstance(error, StorageFull):
            message = f"{error}; training continues without it: use fewer workers on a machine, or more memory"
        else:
            message = str(error)
        self._tell(
            "changed" if isinstance(error, Changed) else cause_of(error), f"no snapshot at step {step}: {message}"
        )

    def _tell(self, cause: str, message: str) -> None:
        if cause not in self._said:
            self._said.add(cause)
            self._say(f"rank {self._rank}: {message}")
