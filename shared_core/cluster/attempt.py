"""The store of one attempt at the job, and the keys that the agent writes there for its workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shared_core.cluster.losses import Death
from shared_core.cluster.watch import KeyWatcher


class Attempt:
    """Hosts a fresh store, so that nothing of the attempt before (gloo's addresses, say) can be read by mistake.

    Attributes:
        number: whole-job restarts before this attempt.
        generation: number of the newest generation.
        incarnations: for each rank, how many workers held it before the present one.
        host: of the store.
        port: of the store.

    Args:
        number: see above; part of every key.
        host: the store's host, this machine.
        port: the store's port, 0 for a free one.
        world_size: number of logical ranks.
        wake: called on a thread when a worker has something to say.
    """

    def __init__(self, number: int, host: str, port: int, world_size: int, wake: Callable[[], None]) -> None:
        self.number = number
        self.generation = 0
        self.incarnations = [0] * world_size
        self._server = TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)
        self.host, self.port = host, int(self._server.port)
        self._client = self._connect()
        self._watcher = KeyWatcher(self._connect, self.key(""), world_size, wake)

    def _connect(self) -> Any:
        return TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)

    def key(self, name: str) -> str:
        """Full name of a key of this attempt."""
        return f"swift/{self.number}/{name}"

    def next_generation(self, deaths: Sequence[Death], detected: float) -> dict[str, Any]:
        """Write the generation that follows these losses, and return what was written."""
        self.generation += 1
        for death in deaths:
            self.incarnations[death.rank] += 1
        entry = {
            "generation": self.generation,
            "lost": [death.rank for death in deaths],
            "incarnations": self.incarnations,
            "cause": {str(death.rank): death.cause for death in deaths},
            "detected": detected,
        }
        self._client.set(self.key(f"gen/{self.generation}"), json.dumps(entry))
        for death in deaths:
            # one that had said goodbye comes back, and says it again
            if self._client.delete_key(self.key(f"done/{death.rank}")):
                self._watcher.forget_done()
        return entry

    def look(self) -> list[tuple[str, Any]]:
        """What workers said since the last look; see :meth:`KeyWatcher.look`."""
        return self._watcher.look()

    def release(self) -> None:
        """All ranks said goodbye: their workers may exit."""
        self._client.set(self.key("release"), "1")

    def stop(self) -> None:
        """The job failed: workers exit at once."""
        self._client.set(self.key("stop"), "1")
        self._client.set(self.key("release"), "1")  # wakes those that said goodbye; they look for stop

    def close(self) -> None:
        """Stop watching. The server goes with this object."""
        self._watcher.close()
