"""Where a worker's checkpoints are made, and what it begins with: both depend on options that a script may give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.checkpoints.checkpoints import Checkpoints
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.recovery import WorkerRecovery
from shared_core.worker.recovery.spare import Spare
from shared_core.worker.recovery.start_point import Arrival
from shared_core.worker.recovery.survivor_groups import SurvivorGroups
from shared_core.worker.state.local_state import BoundaryPosition, StateParts
from shared_core.worker.state.orders import StateOrders
from shared_core.worker.state.updates import Updates


class WorkerStart:
    """The start of one worker.

    Args:
        presses: whether the logs on disk need a checkpoint; asked in rank 0.

    Attributes:
        orders: the passes over the data whose rest may be dealt out to another number of workers; None where it is not.
    """

    def __init__(
        self,
        context: Context,
        recovery: WorkerRecovery,
        survivor_groups: SurvivorGroups,
        updates: Updates,
        parts: StateParts,
        spare: Spare,
        position: BoundaryPosition,
        presses: Callable[[], bool],
    ) -> None:
        self._recovery, self._survivor_groups = recovery, survivor_groups
        self._updates, self._parts, self._spare, self._position = updates, parts, spare, position
        self._presses = presses
        self.begin(context)

    def begin(self, context: Context) -> None:
        """Say where the checkpoints of the worker of ``context`` are made, and find the one from which it starts; again
        in a forked copy of the process, and with options of checkpoints that the script has given.
        """
        self._context = context
        self.checkpoints, self.start_point, self.orders = self._found(context)

    def use(self, env: WorkerEnv) -> None:
        """The script has given options of checkpoints, which are in ``env``, before anything has begun."""
        self.begin(replace(self._context, env=env))

    def _found(self, context: Context) -> tuple[Checkpoints, Arrival, StateOrders | None]:
        env, config, recovery = context.env, context.env.config, self._recovery
        checkpoints = Checkpoints(context, self._updates, self._presses)
        if config.reroutes:
            checkpoints.keep_number("with on_failure='reroute' each worker is to compute the share of any other")
        if (pricing := checkpoints.pricing) is not None:
            self._parts.register("swift.checkpoints", pricing.capture, pricing.restore, main=True)
        arrival = Arrival(env, recovery, self._survivor_groups, checkpoints, self._updates, self._spare, self._position)
        keeps = config.checkpoint.dir is not None and not config.reroutes
        orders = None
        if config.resizes or keeps:
            orders = StateOrders(recovery.publisher.orders, config.resize.data == "drop", config.resizes)
        return checkpoints, arrival, orders
