"""The rendezvous of a job on one machine: there is nobody to meet.

torchelastic's own opens a port on all addresses and unpickles what it finds there.
"""

from __future__ import annotations

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from shared_core.launcher.attempt import LOOPBACK


class KeptRendezvous(RendezvousHandler):
    """One that torchelastic does not ask to begin again: machines that come and go are answered by the agent."""

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        return 0


class LocalRendezvous(KeptRendezvous):
    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        """The first of one place. The store is empty and unused: the agent hosts one for each attempt."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, 0))

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
