"""A worker that is told to leave ends at its next step boundary, which it has published.

Where a process can be forked, it forks its replacement there. That is where the script is, with all of the state, and
need be given nothing; it forms the next generation and continues. Elsewhere a standby takes the place, as after a
failure.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

from shared_core.faults import inject
from shared_core.protocol.leaving import EXIT_LEFT, FILE
from shared_core.worker.program.joining import Joining
from shared_core.worker.program.own_standby import OwnStandby
from shared_core.worker.program.publishing import Publishing
from shared_core.worker.recovery import forked
from shared_core.worker.state.publications import SharedMemoryPublisher

#: The launcher ends a worker whose copy is ready; after so many seconds the worker leaves without one.
_COPY_S = 10.0


class LeavingPublisher:
    """Publishes step boundaries, and looks there whether the launcher wants this worker to leave. ``folder``: of the
    rank.
    """

    def __init__(
        self,
        folder: Path,
        publishing: Publishing,
        publisher: SharedMemoryPublisher,
        own_standby: OwnStandby,
        joining: Joining,
    ) -> None:
        self._file, self._publishing, self._publisher = folder / FILE, publishing, publisher
        self._own_standby, self._joining = own_standby, joining

    def at_boundary(self, kind: str, grads: dict[int, torch.Tensor] | None = None) -> None:
        """As :meth:`Publishing.at_boundary`, before anything of the batch is done. Returns where this worker stays, and
        in its copy.
        """
        self._publishing.at_boundary(kind, grads)
        if not os.path.lexists(self._file):
            return
        if self._file.read_text() != str(os.getpid()):  # for one that held the rank before
            return
        inject.point("leave")
        self._publisher.sync()
        forked.flush()
        if self._own_standby.may_leave():
            began = time.time()
            if self._own_standby.copy():
                self._joining.here(kind, began)
                return
            threading.Event().wait(_COPY_S)
        os._exit(EXIT_LEFT)
