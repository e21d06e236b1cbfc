"""Where a worker's checkpoints are made, and what it begins with: both depend on options that a script may give."""

from __future__ import annotations

from collections.abc import Callable

from shared_core.events import EventLog
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.checkpoints.checkpoints import Checkpoints
from shared_core.worker.comm import Runtime
from shared_core.worker.endings import Endings
from shared_core.worker.job_store import JobStore
from shared_core.worker.recovery.lanes import Lanes
from shared_core.worker.recovery.recovery import Recovery
from shared_core.worker.recovery.spare import Spare
from shared_core.worker.recovery.starting_place import Beginning
from shared_core.worker.state.local_state import Parts
from shared_core.worker.state.orders import Orders
from shared_core.worker.state.publications import Board
from shared_core.worker.state.updates import Updates


class Start:
    """The start of one worker; :meth:`begin` makes it, before anything else is asked.

    Args:
        endings: where a checkpoint cannot be used.
        lanes: by which a replacement is admitted.
        presses: whether the logs on disk need a checkpoint; asked in rank 0.
        spare: what this worker is until it has a place.

    Attributes:
        checkpoints: of this rank.
        beginning: what it begins with.
        orders: the passes over the data whose rest may be dealt out to another number of workers; None where it is
            not.
    """

    checkpoints: Checkpoints
    beginning: Beginning
    orders: Orders | None

    def __init__(
        self,
        runtime: Runtime,
        store: JobStore,
        endings: Endings,
        events: EventLog,
        updates: Updates,
        parts: Parts,
        board: Board,
        recovery: Recovery,
        lanes: Lanes,
        presses: Callable[[], bool],
        spare: Spare,
    ) -> None:
        self._runtime, self._store, self._endings, self._events = runtime, store, endings, events
        self._updates, self._parts, self._board = updates, parts, board
        self._recovery, self._lanes, self._presses, self._spare = recovery, lanes, presses, spare

    def begin(self, env: WorkerEnv) -> None:
        """Say where checkpoints are made, and find the one from which this worker starts.

        Args:
            env: what the launcher told this worker, with the options of checkpoints that hold.
        """
        config = env.config
        checkpoints = Checkpoints(
            env, self._runtime, self._store, self._endings, self._events, self._updates, self._presses
        )
        if config.on_failure == "reroute":
            checkpoints.keep_number("with on_failure='reroute' each worker is to compute the share of any other")
        if (pricing := checkpoints.pricing) is not None:
            self._parts.register("swift.checkpoints", pricing.capture, pricing.restore, main=True)
        beginning = Beginning(env, self._recovery, self._lanes, checkpoints, self._updates, self._spare)
        keeps = config.checkpoint.dir is not None and config.on_failure != "reroute"
        orders = None
        if config.resizes or keeps:
            orders = Orders(self._board.orders, config.resize.data == "drop", config.resizes)
        self.checkpoints, self.beginning, self.orders = checkpoints, beginning, orders
