"""Training without a step boundary, or of a model that is not attached: what the user is told of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from shared_core.errors import Unsupported
from shared_core.events import console_once
from shared_core.worker.comm import Runtime
from shared_core.worker.state.local_state import BoundaryPosition

#: Updates without a boundary after which the user is told: before the first boundary, and between two.
_FIRST, _LATER = 3, 100
#: So many updates more, and the size of the log is limited: a script may make some before its loop.
_GRACE = 7
#: Limit for the log of one rank where ``log.budget_bytes`` sets none, in bytes.
_LOG_BYTES = 1 << 30

NOTHING_ATTACHED = (
    "nothing is attached: the job trains as without swift-recovery, and a failed worker is not replaced: all workers "
    "start again. To have it replaced, call shared_core.attach(model, optimizer) before training (docs/loops.md)"
)

_TOO_MUCH = (
    "rank {}: {} updates without a step boundary, and the log that a replacement would need takes {} bytes: write 'for "
    "step, batch in job.steps(loader):', or in a loop without a loader 'for step, _ in job.steps(range(n)):' "
    "(docs/loops.md). log.budget_bytes sets how much the log may take, now {}"
)


class Unmarked:
    """Counts updates between step boundaries. ``irreplaceable``: why no worker can be replaced; else empty."""

    def __init__(self, position: BoundaryPosition, runtime: Runtime, budget_bytes: int) -> None:
        self._position, self._runtime = position, runtime
        self._limit = budget_bytes or _LOG_BYTES
        self._tell: Callable[[], None] = lambda: None
        self._boundaries = self._updates = self._spilled = self._unattached = 0
        self._counted = False
        self.irreplaceable = ""

    def listen(self, tell: Callable[[], None]) -> None:
        """``tell`` is called once for each stretch of too many updates without a step boundary."""
        self._tell = tell

    def await_attach(self) -> None:
        """The program may never ask to survive failures: count its updates until it attaches."""
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        # A hook cannot be taken away while hooks are called, so it stays.
        if self._counted or self._position.boundaries or self._unattached >= _LATER:
            return
        self._unattached += 1
        if self._unattached == _LATER:
            self.trains_unattached()

    def updated(self) -> None:
        """Call after each update; raises Unsupported if the log has outgrown its limit without a step boundary."""
        if self._position.boundaries != self._boundaries:
            self._boundaries, self._updates, self._spilled = (
                self._position.boundaries,
                0,
                self._runtime.results.spilled_bytes,
            )
        self._counted = True
        self._updates += 1
        most = _LATER if self._boundaries else _FIRST
        if self._updates < most:
            return
        if self._updates == most:
            self._tell()
        log_bytes = self._runtime.groups.log_bytes() + self._runtime.results.spilled_bytes - self._spilled
        if log_bytes > self._limit and self._updates >= most + _GRACE:
            raise Unsupported(_TOO_MUCH.format(self._runtime.rank, self._updates, log_bytes, self._limit))

    def trains_unattached(self) -> None:
        """The program trains, and nothing is attached: drop the logs, keep none from now on."""
        if self.irreplaceable:
            return
        self.irreplaceable = NOTHING_ATTACHED
        self._runtime.results.forget_all()
        if self._runtime.rank == 0:
            console_once("nothing attached", NOTHING_ATTACHED)
