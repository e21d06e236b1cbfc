"""A worker that is told to leave ends at its next step boundary, which it has published."""

from __future__ import annotations

import os
from pathlib import Path

from shared_core.faults import inject
from shared_core.protocol.leaving import EXIT_LEFT, FILE
from shared_core.worker.recovery import forked
from shared_core.worker.state.publications import SharedMemoryPublisher


class PlannedLeave:
    """Looks whether the launcher wants this worker to leave. ``folder``: of the rank."""

    def __init__(self, folder: Path, publisher: SharedMemoryPublisher) -> None:
        self._file, self._publisher = folder / FILE, publisher

    def at_boundary(self) -> None:
        """A step boundary has just been published, and nothing of its batch was done. May not return."""
        try:
            told = self._file.read_text()
        except OSError:
            return
        if told != str(os.getpid()):  # for one that held the rank before
            return
        inject.point("leave")
        self._publisher.sync()
        forked.flush()
        os._exit(EXIT_LEFT)
