"""The job's store as this worker uses it: keys of the present attempt, and messages to the launcher."""

from __future__ import annotations

import threading
from typing import Any

from shared_core.protocol.worker_env import WorkerEnv
from shared_core.protocol.worker_messages import DAMAGED, PREPARED
from shared_core.transport.remote_store import RemoteStore
from shared_core.worker.link import connect_store, report, tell


class JobStore:
    """One connection, made at the first use and shared by all threads. No call on it blocks for a key."""

    def __init__(self, env: WorkerEnv) -> None:
        self.begin(env)

    def begin(self, env: WorkerEnv) -> None:
        """Be that of the worker that ``env`` describes; again in a forked copy of the process."""
        self._env = env
        self._client: RemoteStore | None = None
        self._lock = threading.Lock()

    def below(self, prefix: str = "") -> RemoteStore:
        """Keys of this attempt that begin with ``prefix``: empty, or ends with a slash. May raise WaitTimeout."""
        return self._connected().below(self._env.prefix + prefix)

    def tell(self, name: str, value: Any) -> None:
        """Set a key that the launcher acts on."""
        tell(self._connected(), name, value, prefix=self._env.prefix)

    def report(self, value: dict[str, Any]) -> None:
        """Tell the launcher something that it shows to the user."""
        report(self._connected(), value, prefix=self._env.prefix)

    def tell_damage(self, value: dict[str, Any]) -> None:
        """Tell the launcher that this worker's state is damaged."""
        report(self._connected(), value, prefix=self._env.prefix, queue=DAMAGED)

    def prepared(self, value: dict[str, Any]) -> None:
        """Tell the launcher that this hot standby waits for its rank's place."""
        report(self._connected(), value, prefix=self._env.prefix, queue=PREPARED)

    def _connected(self) -> RemoteStore:
        with self._lock:
            if self._client is None:
                self._client = connect_store(self._env.config.detection.wait_timeout_s, self._env)
            return self._client
