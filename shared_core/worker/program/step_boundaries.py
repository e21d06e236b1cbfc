"""The step boundaries of the program, and which of them are recovery points."""

from __future__ import annotations

import torch

from shared_core.faults import inject
from shared_core.worker.comm import Runtime
from shared_core.worker.integrity.state_check import StateCheck
from shared_core.worker.program.joining import Joining
from shared_core.worker.program.leaving import LeavingPublisher
from shared_core.worker.program.step_clock import StepClock
from shared_core.worker.program.trained import Trained
from shared_core.worker.recovery.reporting import RecoveryReporter
from shared_core.worker.state.local_state import BoundaryPosition

#: So many boundaries in a row are no recovery points for pending gradients; then these are published, too.
_MAX_DEFERRED = 16


class StepBoundaries:
    """Counts step boundaries, and publishes those that are recovery points."""

    def __init__(
        self,
        position: BoundaryPosition,
        trained: Trained,
        runtime: Runtime,
        reporter: RecoveryReporter,
        publishing: LeavingPublisher,
        joining: Joining,
        clock: StepClock,
        state_check: StateCheck,
        resizes: bool,
    ) -> None:
        self._position, self._trained, self._runtime, self._resizes = position, trained, runtime, resizes
        self._progress, self._reporter, self._publishing, self._joining = clock.progress, reporter, publishing, joining
        self._clock, self._state_check = clock, state_check
        self._deferred = 0
        self._loss: torch.Tensor | float | None = None

    def note_loss(self, loss: torch.Tensor | float) -> None:
        """The training loss of this batch, for those who watch the job: told at the next step boundary, where a tensor
        of the host has its value. One of another device is not waited for.
        """
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss

    def expect(self, left: int) -> None:
        """So many step boundaries are still to come, if nothing changes."""
        self._progress.expect(left)

    def batch(self, accumulating: bool, epoch: int | None) -> bool:
        """See :meth:`Job.step_boundary`."""
        inject.point("step_boundary")
        self._reporter.deliver()
        if self._joining.at("batch"):
            return True
        self._pass(epoch)
        updated = self._trained.updates.steps.in_batch > 0
        self._trained.updates.next_batch()
        shard = self._trained.shard
        if accumulating or (shard is not None and shard.unsettled):
            return False
        grads = None
        pending = self._trained.updates.steps.pending_gradients()
        if pending:
            self._deferred += 1
            # Pending gradients of a failed worker could not be divided among others, so with resizes nothing is
            # published. Those of a shard are small. Those that a whole step has left behind are there at each boundary.
            if shard is None and (self._resizes or (self._deferred <= _MAX_DEFERRED and not updated)):
                return False
            grads = self._trained.gradients() if shard is not None or not updated else None
        if self._trained.unsettled():  # counts the boundaries that could be recovery points, so it is asked last
            return False
        self._deferred = 0
        self._trained.meet()
        self._state_check.before_boundary(bool(grads))
        self._publishing.at_boundary("batch", self._trained.left_over(pending) if grads is None else grads)
        return False

    def evaluation(self) -> bool:
        """As :meth:`batch`, at the start of a stand-alone evaluation."""
        self._reporter.deliver()
        if self._joining.at("eval"):
            return True
        self._pass(None)
        self._publishing.at_boundary("eval")
        return False

    def _pass(self, epoch: int | None) -> None:
        if (loss := self._loss) is not None:
            self._loss = None
            if not isinstance(loss, torch.Tensor) or (loss.is_cpu and loss.numel() == 1):
                self._progress.loss(float(loss))
        self._position.boundaries += 1
        self._clock.boundary(self._position.boundaries)
        self._runtime.place.step(epoch)
        self._progress.boundary(self._position.boundaries, self._runtime.groups.log_bytes())
        self._reporter.passed()
