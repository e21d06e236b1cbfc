"""The one face adapters use: attach what is trained, mark the step boundaries, register what only this rank has.

A replacement runs the user's script from the start like the failed worker did. In its first :meth:`Job.step_boundary`
of the right entry call it joins: it gets the replicated state from a survivor and the rank-local state that the failed
worker had published. From there on it runs the failed worker's batch again with logged results until it is level with
the others.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from shared_core.config import SwiftConfig
from shared_core.handover import say_alone_once
from shared_core.protocol import worker_env
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.comm import Runtime, prepare
from shared_core.worker.comm import install as install_backend
from shared_core.worker.state.local_state import Capture, Restore
from shared_core.worker.state.publications import StateOrders
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.wiring import WorkerRuntime


class Job:
    """The fault-tolerant job as one worker sees it. One per process, made by :func:`current_job`.

    Attributes:
        position: how far the program of this worker is.
        entries: its entry calls (fit, validate, test, predict).
        notes: what is kept for replacements of this rank, beside what is registered.
        saves: checkpoints that the script writes.
        survivor_groups: by which the others continue without a failed rank.
        replays: for pipelines whose replacements start from a checkpoint.
        reporter: events and recoveries.

    Example::

        if (job := shared_core.current_job()) is not None:
            job.register("words", capture=lambda: dict(words), restore=words.update)
    """

    def __init__(self, worker: WorkerRuntime) -> None:
        self.rank, self.world_size = worker.env.rank, worker.env.world_size
        self._worker = worker
        self.position, self.entries, self.notes = worker.position, worker.entries, worker.notes
        self.variables = worker.parts.variables
        self.parts, self.trained, self.updates = worker.parts, worker.trained, worker.updates
        self.checkpoints, self.options = worker.checkpoints, worker.options
        self.survivor_groups, self.replays = worker.survivor_groups, worker.replays
        self.reporter, self.runtime, self.saves = worker.reporter, worker.runtime, worker.saves

    @property
    def env(self) -> WorkerEnv:
        """What the launcher told this worker, with the options that hold now."""
        return self.options.env

    @property
    def config(self) -> SwiftConfig:
        """The options of the job."""
        return self.options.env.config

    @property
    def reroutes(self) -> bool:
        """Whether the others continue at once when a rank fails (``on_failure="reroute"``)."""
        return self.config.reroutes

    @property
    def joining(self) -> bool:
        """Whether this is a replacement (or a worker restarted from a checkpoint) that has not joined yet."""
        return self._worker.joining.pending

    @property
    def added(self) -> bool:
        """Whether what is being restored is a copy of another rank's, because this rank has been added."""
        return self.position.added

    @property
    def origin(self) -> str:
        """Whose state is being restored: of the ``same`` run, of a ``checkpoint``, or of an ``other`` rank."""
        return self.position.origin

    @property
    def replicated(self) -> Replicated | None:
        """What is attached; None before that."""
        return self.updates.replicated

    @property
    def orders(self) -> StateOrders | None:
        """The passes over the data whose rest may be dealt out to another number of workers; None where it is not."""
        return self._worker.start.orders

    def attach(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        replicas: Sequence[int] | None = None,
        sharded: bool = False,
    ) -> None:
        """Say what is trained. A later call replaces an earlier one.

        Parameters of ``modules`` and the state of ``optimizers`` are replicated state. Buffers, modes, groups of the
        optimizers, random generators and parameters that no optimizer steps are published at each step boundary.

        Args:
            modules: all modules that are trained, wrapped in ``DistributedDataParallel`` where they are, and those that
                the script changes itself: averages, target networks.
            optimizers: their optimizers.
            replicas: ranks that train the same parameters, where not all do: those of this rank's pipeline stage. Then
                parameters are also kept before each update, because a message that a failed rank has not delivered must
                be computed with the parameters that it had, which its replica may have updated.
            sharded: each replica has a part of the optimizer's state to itself. ``optimizers`` is empty then; the
                caller registers the state, and makes each update inside ``updates.update()``.

        Raises:
            Unsupported: for parameters that are not on the CPU, and for DDP with ``on_failure="reroute"``.
            UnsupportedOptimizer: for an optimizer whose state cannot be moved.
        """
        self.trained.attach(modules, optimizers, replicas=replicas, sharded=sharded)

    def keep_boundaries(self) -> None:
        """The script will change parameters or optimizer state outside updates.

        That is seen anyway, but only when it has been done for the first time; a worker that fails in that very batch
        cannot be replaced then.
        """
        self.trained.keep_boundaries()

    def keep_images(self) -> None:
        """The script may use parameters anywhere in a batch, not only by the output of ``DistributedDataParallel``.

        They are kept before each update, so that a replacement has those of its own place and never newer ones. Does
        nothing with ``on_failure="reroute"``.
        """
        if not self.reroutes:  # there replacements are copies of others
            self.updates.keep_images(at_once=True)

    def register(
        self, name: str, capture: Capture, restore: Restore, *, forward_mutated: bool = False, main: bool = False
    ) -> None:
        """Register rank-local state; see :meth:`Parts.register`."""
        self.parts.register(name, capture, restore, forward_mutated=forward_mutated, main=main)

    def make_own_standby(self) -> None:
        """The program comes to where it would do otherwise in a replacement, and nothing is read or drawn for its first
        batch yet. Here this worker may fork itself, as its own hot standby. In that copy, this returns when it is the
        replacement, and the job is :attr:`joining`. Later calls do nothing.
        """
        self._worker.own_standby.make()

    def peek(self, name: str) -> Any:
        """The failed worker's newest published value of a registered name, or None.

        For what must be known before the join, such as names of log files.
        """
        return self._worker.start.peek(name)

    def step_boundary(self, *, accumulating: bool = False, epoch: int | None = None) -> bool:
        """Call at the very start of each batch, before anything random and any collective of it.

        Args:
            accumulating: gradients of earlier micro-batches are pending, so this is no recovery point.
            epoch: number of the epoch, of a loop that does not count epochs by :class:`TrainingLoop`.

        Returns:
            Whether this process has just joined, with all that is registered as at the failed worker's boundary.
        """
        return self._worker.boundaries.batch(accumulating, epoch)

    def evaluation_boundary(self) -> bool:
        """As :meth:`step_boundary`, at the start of a stand-alone evaluation."""
        return self._worker.boundaries.evaluation()

    def when_unmarked(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called where the script makes updates without a step boundary between them."""
        self._worker.unmarked.listen(tell)

    def note_loss(self, loss: torch.Tensor | float) -> None:
        """The training loss of this batch, from which a policy learns what progress is worth.

        Rank 0's counts; a tensor is not read at once, so it costs no wait for a device.
        """
        self.checkpoints.note_loss(loss)
        self._worker.boundaries.note_loss(loss)

    def expect_steps(self, left: int) -> None:
        """So many step boundaries are still to come, if nothing changes: for those who watch the job."""
        self._worker.boundaries.expect(left)

    def fall_back(self, reason: str) -> NoReturn:
        """Nobody can take the failed worker's place: all workers start again. Does not return."""
        self._worker.fatal_actions.fall_back(reason)


_job: Job | None = None


def current_job() -> Job | None:
    """The job of this process; None when it was not started by ``swiftrun``.

    Example::

        job = shared_core.current_job()
        rank = job.rank if job is not None else 0
    """
    global _job
    if _job is None and worker_env.launched():
        _job = Job(WorkerRuntime(worker_env.env()))
        atexit.register(_job.reporter.memory)
    return _job


def prepare_groups() -> None:
    """Have the gloo groups of a program that does not call :func:`install` survive failures too, if it attaches what it
    trains. Called in a worker of ``swiftrun`` before its program; ``SWIFT_RECOVERY=0`` leaves groups to torch.
    """

    def first() -> Runtime:
        job = current_job()
        assert job is not None
        job._worker.unmarked.await_attach()
        return job.runtime

    off = os.environ.get("SWIFT_RECOVERY", "1").strip().lower() in ("0", "false", "no", "off")
    if worker_env.launched() and not off:
        prepare(first)


def install() -> Job | None:
    """Make every gloo group created from now on one that survives failures, and refuse one that cannot. ``swiftrun``
    prepares gloo groups by itself, so that a script need not call this there. Outside ``swiftrun`` this does nothing
    and returns None; where no launcher has started the process at all, one line says how to start.

    Example::

        shared_core.install()
        torch.distributed.init_process_group("gloo")
    """
    job = current_job()
    if job is None:
        say_alone_once()
    else:
        install_backend(job.runtime)
    return job
