"""Where checkpoints lie: a local folder, or anything that fsspec reaches by a URL. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class Storage(Protocol):
    """Names are relative and have at most one slash: ``step-0000000040/rank0``.

    Attributes:
        root: the folder or URL, for messages.
    """

    root: str

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> str:
        """Make a file: whole and durable when this returns, or absent. Returns its SHA-256.

        Raises:
            StorageFull: no room.
            OSError: anything else.
        """

    def read(self, name: str) -> bytes:
        """All of a file."""

    def chunks(self, name: str) -> AbstractContextManager[Iterator[bytes]]:
        """A file piece by piece."""

    def names(self, folder: str = "") -> list[str]:
        """What is in a folder, without temporary files; nothing where it is absent."""

    def size(self, name: str) -> int:
        """Of a file, in bytes.

        Raises:
            FileNotFoundError: it is not there.
        """

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens where there is none."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it."""

    def local(self, name: str) -> Path | None:
        """The path of a file where it is a local one."""


def open_storage(where: str | os.PathLike[str]) -> Storage:
    """Storage for a local folder or a URL such as ``s3://bucket/run`` (``file://`` is local).

    Raises:
        MissingExtra: a URL, and fsspec or what it needs for it is not installed.
        ConfigError: fsspec knows no such kind of URL.
    """
    raise NotImplementedError
