"""The rendezvous of a job on one machine: there is nobody to meet.

torchelastic's own opens a port to all the world and unpickles what it finds behind it.
"""

from __future__ import annotations

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from shared_core.launcher.attempt import LOOPBACK


class Alone(RendezvousHandler):
    """One machine, which has the first place.

    Args:
        run_id: name of the job.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        """See base class."""
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        """The first of one place. The store is empty and nobody else's: the agent hosts one for each attempt."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, 0))

    def is_closed(self) -> bool:
        """See base class."""
        return False

    def set_closed(self) -> None:
        """See base class."""

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return 0

    def get_run_id(self) -> str:
        """See base class."""
        return self._run_id

    def shutdown(self) -> bool:
        """See base class."""
        return True
