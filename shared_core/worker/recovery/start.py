"""Where a worker's checkpoints are made, and what it begins with: both depend on options that a script may give."""

from __future__ import annotations

from collections.abc import Callable

from shared_core.events import EventLog
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.checkpoints.checkpoints import Checkpoints
from shared_core.worker.comm import Runtime
from shared_core.worker.fatal_actions import FatalActions
from shared_core.worker.job_store import JobStore
from shared_core.worker.recovery.recovery import WorkerRecovery
from shared_core.worker.recovery.spare import Spare
from shared_core.worker.recovery.start_point import StartPoint
from shared_core.worker.recovery.survivor_groups import SurvivorGroups
from shared_core.worker.state.local_state import StateParts
from shared_core.worker.state.orders import StateOrders
from shared_core.worker.state.publications import SharedMemoryPublisher
from shared_core.worker.state.updates import Updates


class WorkerStart:
    """The start of one worker; :meth:`begin` makes its attributes, before anything else is asked.

    Args:
        presses: whether the logs on disk need a checkpoint; asked in rank 0.

    Attributes:
        orders: the passes over the data whose rest may be dealt out to another number of workers; None where it is not.
    """

    checkpoints: Checkpoints
    start_point: StartPoint
    orders: StateOrders | None

    def __init__(
        self,
        runtime: Runtime,
        store: JobStore,
        fatal_actions: FatalActions,
        events: EventLog,
        updates: Updates,
        parts: StateParts,
        publisher: SharedMemoryPublisher,
        recovery: WorkerRecovery,
        survivor_groups: SurvivorGroups,
        presses: Callable[[], bool],
        spare: Spare,
    ) -> None:
        self._runtime, self._store, self._fatal_actions, self._events = runtime, store, fatal_actions, events
        self._updates, self._parts, self._publisher = updates, parts, publisher
        self._recovery, self._survivor_groups, self._presses, self._spare = recovery, survivor_groups, presses, spare

    def begin(self, env: WorkerEnv) -> None:
        """Say where checkpoints are made, and find the one from which this worker starts. ``env`` holds the final
        options of checkpoints.
        """
        config = env.config
        checkpoints = Checkpoints(
            env, self._runtime, self._store, self._fatal_actions, self._events, self._updates, self._presses
        )
        if config.reroutes:
            checkpoints.keep_number("with on_failure='reroute' each worker is to compute the share of any other")
        if (pricing := checkpoints.pricing) is not None:
            self._parts.register("swift.checkpoints", pricing.capture, pricing.restore, main=True)
        start_point = StartPoint(env, self._recovery, self._survivor_groups, checkpoints, self._updates, self._spare)
        keeps = config.checkpoint.dir is not None and not config.reroutes
        orders = None
        if config.resizes or keeps:
            orders = StateOrders(self._publisher.orders, config.resize.data == "drop", config.resizes)
        self.checkpoints, self.start_point, self.orders = checkpoints, start_point, orders
