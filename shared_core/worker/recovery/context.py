"""What all parts of a recovery need."""

from __future__ import annotations

from dataclasses import dataclass

from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.comm.runtime import Runtime
from shared_core.worker.job_store import JobStore
from shared_core.worker.recovery.lifecycle import Lifecycle


@dataclass(frozen=True, eq=False)
class Context:
    env: WorkerEnv
    runtime: Runtime
    lifecycle: Lifecycle
    store: JobStore
