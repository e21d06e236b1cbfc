"""A snapshot of named tensors in host memory, which is a safetensors file.

Eight bytes give the length of a JSON header, the header says where each tensor lies, and the bytes follow. The file is
made in the job's folder in memory by writing, not through a mapping: a full device is then an error and no signal, and a
page is filled without being cleared first. It has its name only once it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Image:
    """A file that is being filled with the values that tensors have when they are copied.

    Tensors that are one and the same (shared parameters) are stored once; the header's metadata names the others.

    Attributes:
        path: where the file will be.
        nbytes: its size.

    Args:
        path: where to put it; its folder exists.
        tensors: by name; any device, not changed.
        metadata: text that goes with them.
        reuse: a file that nobody needs, whose memory is taken over; see :meth:`Spool.spare`.

    Raises:
        Unsupported: a tensor has no counterpart in the format (sparse, quantised, complex128, without data).
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, torch.Tensor],
        metadata: Mapping[str, str] | None = None,
        reuse: Path | None = None,
    ) -> None:
        raise NotImplementedError

    def copy(self, names: Iterable[str] | None = None) -> None:
        """Copy the present values of ``names``, or of all that were not copied yet. Without the GIL for the most part.

        Raises:
            StorageFull: the memory file system is full; :meth:`discard` the image.
        """
        raise NotImplementedError

    def seal(self) -> None:
        """Copy what is missing and give the file its name."""
        raise NotImplementedError

    def discard(self) -> None:
        """Remove what was written. Does nothing to a sealed image."""
        raise NotImplementedError


def load(source: str | os.PathLike[str] | bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors by name and metadata of an image, given as a file or as its bytes.

    The tensors of a file are views of a private mapping: pages are read when they are used, and may be written to.
    Shared parameters are one tensor under each of their names.

    Raises:
        CorruptFile: it is no image, or a part of one.
    """
    raise NotImplementedError


class Stager:
    """One thread that copies while forward and backward run. Created and used by one thread."""

    def begin(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the thread; waits for the one before."""
        raise NotImplementedError

    def fence(self) -> None:
        """Wait until the work is done: what it reads may be changed afterwards. Costs nothing when there is none.

        Raises:
            BaseException: whatever ``work`` raised, once.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Wait, and end the thread."""
        raise NotImplementedError
