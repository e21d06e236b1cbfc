"""What many parts of a worker need: those that recover, and those that report or make checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from shared_core.events import EventLog
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.comm.runtime import Runtime
from shared_core.worker.fatal_actions import FatalActions
from shared_core.worker.job_store import JobStore
from shared_core.worker.recovery.lifecycle import Lifecycle


@dataclass(frozen=True, eq=False)
class Context:
    """Made once, at the start of a worker."""

    env: WorkerEnv
    runtime: Runtime
    lifecycle: Lifecycle
    store: JobStore
    events: EventLog
    fatal_actions: FatalActions
