"""What Lightning says at the start of a run: a replacement, which starts in the middle of one, does not repeat it."""

from __future__ import annotations

import logging

from shared_core import Job

#: Loggers of Lightning whose messages these are, and those that have handlers for them (the empty name: the root).
_SOURCES = ("lightning.pytorch", "lightning.fabric")
_HANDLED = ("", "lightning", *_SOURCES)


class _Quiet(logging.Filter):
    """Drops what Lightning says below a warning, until a replacement has the failed worker's place."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def filter(self, record: logging.LogRecord) -> bool:
        banner = record.levelno < logging.WARNING and record.name.startswith(_SOURCES)
        return not (banner and self._job.joining)


_quiet: _Quiet | None = None


def leave_out(job: Job | None) -> None:
    """Leave out the start banner if this is a replacement. Further calls do nothing."""
    global _quiet
    if job is None or job.env.incarnation == 0 or _quiet is not None:
        return
    _quiet = _Quiet(job)
    for name in _HANDLED:
        for handler in logging.getLogger(name or None).handlers:
            handler.addFilter(_quiet)
