"""The output of a hot standby: held until it takes a worker's place, and dropped if it never does."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import suppress
from typing import BinaryIO


class HeldOutput:
    """Holds what this process and its children write to file descriptors 1 and 2, from now on."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int, BinaryIO]] = []
        for fd in (1, 2):
            with suppress(OSError):  # closed, or there is no room for a file: then it is not held
                file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (closed in show)
                self._held.append((fd, os.dup(fd), file))
                os.dup2(file.fileno(), fd)

    def write(self, fd: int, data: bytes) -> None:
        """Write to the real standard output (1) or error (2), past what is held."""
        real = next((real for held, real, _ in self._held if held == fd), fd)
        with suppress(OSError):
            os.write(real, data)

    def show(self) -> None:
        """Write out what was held, and hold nothing from now on."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or none
                stream.flush()
        for fd, real, file in self._held:
            os.dup2(real, fd)
            os.close(real)
            file.seek(0)
            with suppress(OSError), open(fd, "wb", closefd=False) as out:
                shutil.copyfileobj(file, out)
            file.close()
        self._held.clear()
