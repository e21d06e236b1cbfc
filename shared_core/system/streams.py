"""Standard output and error of a process of a job: whole lines, and what a full disk does not take is dropped."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any, TextIO

from shared_core.events import console_once
from shared_core.resources import FULL, what_to_do

_DROPPED = FULL | {errno.EIO, errno.ESTALE}
_told = False


class _Dropping(io.FileIO):
    """A descriptor for which a device that takes nothing is no error."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _DROPPED:
                raise
            _tell(self.fileno(), error)
            return memoryview(data).nbytes


def _tell(fd: int, error: OSError) -> None:
    global _told
    if not _told:
        _told = True
        name = {1: "standard output", 2: "standard error"}.get(fd, f"descriptor {fd}")
        console_once("output", f"{name} is lost from here on {what_to_do(error)}. The job continues")


def forgive() -> None:
    """Have this process' standard streams drop what their devices do not take.

    ``python -u`` writes what ``print`` is given and the end of the line one after the other, and what another worker
    prints may come between them. Here a line is written at once, when it ends. Streams that somebody has replaced are
    left alone.
    """
    if (out := _forgiving(sys.stdout, sys.__stdout__, 1)) is not None:
        sys.stdout = sys.__stdout__ = out  # type: ignore[misc, assignment]
    if (err := _forgiving(sys.stderr, sys.__stderr__, 2)) is not None:
        sys.stderr = sys.__stderr__ = err  # type: ignore[misc, assignment]


def _forgiving(stream: TextIO, original: TextIO | None, fd: int) -> TextIO | None:
    if stream is not original or not isinstance(stream, io.TextIOWrapper):
        return None
    stream.flush()
    raw = _Dropping(fd, "wb", closefd=False)
    unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=unbuffered or stream.line_buffering,
    )
