"""What the program trains without a step boundary, or without having attached it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from shared_core.errors import Unsupported
from shared_core.events import console_once
from shared_core.worker.comm import Runtime
from shared_core.worker.state.local_state import Position

#: Updates without a boundary after which the user is told: before the first boundary, and between two.
_FIRST, _LATER = 3, 100
#: Updates more than these before the log has an end: a script may make some before its loop.
_GRACE = 7
#: What the log of one rank may take then, where ``log.budget_bytes`` says nothing.
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
    """Counts updates between step boundaries, and says what is not recovered.

    Args:
        position: of the program.
        runtime: the groups, and their logs.
        budget_bytes: ``log.budget_bytes``; 0 where it is not set.
    """

    def __init__(self, position: Position, runtime: Runtime, budget_bytes: int) -> None:
        self._position, self._runtime = position, runtime
        self._limit = budget_bytes or _LOG_BYTES
        self._tell: Callable[[], None] = lambda: None
        self._boundaries = self._updates = self._spilled = self._unattached = 0
        self._counted = False
        self.irreplaceable = ""

    def listen(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called where updates are made without a step boundary between them."""
        self._tell = tell

    def await_attach(self) -> None:
        """The program has not asked to survive failures, and may never: count its updates until it attaches what it
        trains.
        """
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        # A hook cannot be taken away while hooks are called, so it stays.
        if self._counted or self._position.boundaries or self._unattached >= _LATER:
            return
        self._unattached += 1
        if self._unattached == _LATER:
            self.trains_unattached()

    def updated(self) -> None:
        """An update of what is attached was made.

        Raises:
            Unsupported: there was no step boundary for so long that the log has no room.
        """
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
        """The program trains, and nothing is attached: nothing is kept from now on."""
        if self.irreplaceable:
            return
        self.irreplaceable = NOTHING_ATTACHED
        self._runtime.results.forget_all()
        if self._runtime.rank == 0:
            console_once("nothing attached", NOTHING_ATTACHED)
