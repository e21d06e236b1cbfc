"""The job's store as this worker uses it: keys of the present attempt, and words to the launcher."""

from __future__ import annotations

import threading
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.link import connect_store, report, tell


class JobStore:
    """One connection, which all threads of the process share: torch looks up the peer's name whenever it makes one,
    which can take seconds. Nobody blocks in it.
    """

    def __init__(self, env: WorkerEnv) -> None:
        self._env = env
        self._client: Any = None
        self._lock = threading.Lock()

    def below(self, prefix: str = "") -> Store:
        """The keys of this attempt that begin with ``prefix``.

        Raises:
            WaitTimeout: if the launcher cannot be reached.
        """
        return PrefixStore((self._env.prefix + prefix).rstrip("/"), self._connected())

    def tell(self, name: str, value: Any) -> None:
        """Set a key that the launcher acts on."""
        tell(self._connected(), name, value, prefix=self._env.prefix)

    def report(self, value: dict[str, Any]) -> None:
        """Tell the launcher something that it shows to the user."""
        report(self._connected(), value, prefix=self._env.prefix)

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = connect_store(self._env.config.detection.wait_timeout_s, self._env)
            return self._client
