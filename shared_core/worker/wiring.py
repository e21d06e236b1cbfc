"""Builds the parts of a worker and joins them: the one place where they meet.

Each part gets what it needs in its constructor. Only calls from below (of groups, of recoveries, before and after an
update) are relayed to parts that are made after the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from shared_core.errors import RecoveryFailed
from shared_core.events import EventLog
from shared_core.faults import inject
from shared_core.protocol import progress_file
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.system import secret
from shared_core.worker import link
from shared_core.worker.comm import Runtime
from shared_core.worker.comm.op import Op
from shared_core.worker.comm.results import BoundaryMarks
from shared_core.worker.comm.state import KeptBucketInput
from shared_core.worker.integrity import StateCheck
from shared_core.worker.link import JobStore
from shared_core.worker.messages.disk_log import DiskLog
from shared_core.worker.messages.group_log import Logged
from shared_core.worker.program.boundaries import (
    Checkpointing,
    Joining,
    LeavingPublisher,
    Publishing,
    StepBoundaries,
)
from shared_core.worker.program.entries import Entries, Notes, Saves
from shared_core.worker.program.options import ProgramOptions
from shared_core.worker.program.own_standby import OwnStandby
from shared_core.worker.program.trained import DATA, UPDATE, StepClock, Trained
from shared_core.worker.program.unmarked import Unmarked
from shared_core.worker.recovery.context import Context, Lifecycle
from shared_core.worker.recovery.copies import StateCopies
from shared_core.worker.recovery.exchange import Donor
from shared_core.worker.recovery.place_reports import PlaceReports
from shared_core.worker.recovery.recovery import WorkerRecovery
from shared_core.worker.recovery.replay import Replays
from shared_core.worker.recovery.replicas import Replicas
from shared_core.worker.recovery.reporting import RecoveryReporter
from shared_core.worker.recovery.start_point import Spare, WorkerStart
from shared_core.worker.recovery.survivor_groups import SurvivorGroups
from shared_core.worker.recovery.wait_watchdog import WaitWatchdog
from shared_core.worker.state.compiled import Compiled
from shared_core.worker.state.ddp_buckets import Buckets
from shared_core.worker.state.forward_pass import ForwardRecorder
from shared_core.worker.state.local_state import BoundaryPosition, StateParts
from shared_core.worker.state.overlapped import Overlapped
from shared_core.worker.state.publication_file import overflow
from shared_core.worker.state.publications import Mirror, SharedMemoryPublisher
from shared_core.worker.state.shared_images import SharedImages
from shared_core.worker.state.updates import Updates
from shared_core.worker.variables.variables import Origin, Variables


class WorkerRuntime:
    def __init__(self, env: WorkerEnv) -> None:
        config, position = env.config, BoundaryPosition()
        self.env, self.position = env, position
        publisher = self.publisher = SharedMemoryPublisher(
            env.rank_dir / f"attempt{env.restart}", _mirror(env), overflow(env)
        )
        log, store, relay = DiskLog(env), JobStore(env), _Relay(self)
        self.store = store
        runtime = self.runtime = Runtime(env, relay, publisher, store, log, _marks(env))
        fatal_actions = self.fatal_actions = runtime.fatal_actions
        context = Context(env, runtime, Lifecycle(env, runtime), store, EventLog(env.events, env.run), fatal_actions)
        self._context = context
        progress = self.progress = progress_file.ProgressFile(env.rank_dir / "progress")
        clock = self.clock = StepClock(runtime, progress)
        # What is trained, and what only this rank has.
        parts = self.parts = StateParts(Variables(env.rank, lambda: position.origin, self._cannot_put_back))
        compiled = Compiled(lambda: position.origin, fatal_actions.fall_back)
        parts.register("swift.compiled", compiled.capture, compiled.restore)
        unmarked = self.unmarked = Unmarked(position, runtime, config.log.budget_bytes)
        updates = self.updates = Updates(
            config.state.preimages,
            before=lambda: clock.enter(UPDATE),
            after=self._updated,
            fence=lambda: self.start.checkpoints.fence(),
            stable=lambda: runtime.stable,
            # With several machines each worker keeps all by itself.
            shared=None if len(env.machines) > 1 else SharedImages(env.job_dir, env.restart, env.rank, env.world_size),
            issued=lambda: sum(each.next for each in runtime.groups.values()),
        )
        buckets = self.buckets = Buckets(runtime, publisher, position, unmarked.trains_unattached)
        forward_recorder = self.forward_recorder = ForwardRecorder(runtime, publisher, updates, parts, position)
        trained = self.trained = Trained(
            config,
            runtime,
            updates,
            parts,
            buckets,
            forward_recorder,
            Overlapped(updates, buckets.layout, position),
            lambda reason: self._cannot_put_back(reason, position.origin),
            clock,
        )
        # Recovery.
        donor = Donor(env, publisher, updates, position)
        copies = self.copies = StateCopies(context, updates, lambda: trained.replicas)
        replays = self.replays = Replays(
            runtime,
            log,
            lambda: self.start.checkpoints.newest_boundary,
            lambda: self.start.checkpoints.due_boundary,
            config.log.budget_bytes,
        )
        reporter = self.reporter = RecoveryReporter(context, updates, lambda: self.start.checkpoints.rolled_back())
        recovery = self.recovery = WorkerRecovery(
            context,
            publisher,
            donor,
            copies,
            reporter,
            replays,
            lambda: unmarked.irreplaceable,
            lambda: self.start.checkpoints.own.boundaries(),
        )
        survivor_groups = self.survivor_groups = SurvivorGroups(recovery, copies, position)
        self.wait_watchdog, self.place_reports = WaitWatchdog(recovery), PlaceReports(context)
        spare = self._spare = Spare(env, store, publisher)
        start = self.start = WorkerStart(
            context, recovery, survivor_groups, updates, parts, spare, position, lambda: replays.presses
        )
        state_check = self.state_check = StateCheck(context, updates, position, lambda: self.start.checkpoints)
        # What the program calls.
        self.options = ProgramOptions(env, runtime, start)
        checkpoints = self.checkpoints = Checkpointing(start, position, publisher)
        self.notes = Notes(publisher, position, start)
        replicas = self._replicas = Replicas(recovery, updates)
        publishing = Publishing(position, parts, trained, runtime, publisher, survivor_groups, replicas, checkpoints)
        self.joining = Joining(start, position, trained, progress, replays, reporter, publishing)
        self.own_standby = OwnStandby(runtime, start, trained, self.options, context.events, self.begin_again)
        self.boundaries = StepBoundaries(
            position,
            trained,
            runtime,
            reporter,
            LeavingPublisher(env.rank_dir, publishing, publisher, self.own_standby, self.joining),
            self.joining,
            clock,
            state_check,
            config.resizes,
        )
        fall_back = fatal_actions.fall_back
        self.entries = Entries(
            start, position, runtime, publisher, parts, reporter, publishing, self.joining, fall_back
        )
        self.saves = Saves(env, updates, self.notes, parts, fall_back)

    def begin_again(self, env: WorkerEnv) -> None:
        """In a forked copy of the process: be the hot standby that ``env`` describes.

        What belongs to the program stays as it is: what is attached, registered and counted. What lives by threads and
        connections, or knows this worker's past, begins again; hooks of the program and the other parts hold it.
        """
        link.forget_ends()
        self.store.begin(env)
        self.runtime.in_copy()
        self.env = env
        context = self._context = replace(self._context, env=env, lifecycle=Lifecycle(env, self.runtime))
        self.copies.begin(context)
        self.recovery.begin(context)
        self.state_check.begin(context)
        self.survivor_groups.begin()
        self._replicas.begin()
        self.wait_watchdog.begin()
        self.place_reports.begin(context)
        self.reporter.begin(env)
        self._spare.begin(env, forked=True)
        self.start.begin(context)
        if self.runtime.world is not None:
            self.runtime.answer_from({})
            self._spare.then(self.wait_watchdog.watch)

    def _updated(self) -> None:
        self.clock.enter(DATA)
        self.reporter.updated()
        self.unmarked.updated()

    def _cannot_put_back(self, reason: str, origin: Origin) -> None:
        """The variables in a checkpoint are older: with those nothing could be put back either, so the job ends."""
        if origin == "checkpoint":
            self.fatal_actions.give_up(RecoveryFailed(reason))
        self.fatal_actions.fall_back(reason)


class _Relay:
    """Passes calls of the groups on to parts that are made after them: their
    :class:`~shared_core.worker.comm.state.OperationListener`.
    """

    def __init__(self, worker: WorkerRuntime) -> None:
        self._worker = worker

    def first_group(self) -> None:
        """Form the first generation. A replacement with a step boundary to reach does so there; another joins here."""
        it, start = self._worker, self._worker.start
        it.place_reports.start()
        # A hot standby goes the way of a replacement, and says nothing to the others before it has a place.
        if start.spare.waits:
            it.runtime.answer_from(dict(it.publisher.records.read()))
            start.spare.then(it.wait_watchdog.watch)
            inject.point("spare.prepares")
            return
        it.wait_watchdog.watch()
        start.prepare()
        if it.runtime.starting:
            return
        if it.recovery.replacement:
            it.updates.begin_install()
            it.updates.load(0, None, ())
        inject.point("startup")
        received = it.recovery.join()
        if it.recovery.replacement:
            it.replays.begin(received.replaying)
            start.from_scratch()
            it.reporter.joined(None)

    def made_again(self, group: str) -> tuple[StepBoundary | None, Mapping[int, Logged]]:
        return self._worker.recovery.forming.made_again(group)

    def exact(self) -> bool:
        return self._worker.updates.exact

    def before_bucket(self) -> None:
        if self._worker.buckets.modules:
            self._worker.forward_recorder.before_bucket()
            self._worker.state_check.before_bucket()

    def bucket_input(self, bucket: torch.Tensor) -> KeptBucketInput | None:
        return self._worker.buckets.input_of(bucket)

    def bucket_handed_over(self, op: Op) -> None:
        self._worker.clock.handed_over()
        self._worker.buckets.handed_over()
        self._worker.state_check.bucket(op)
        self._worker.trained.bucket_handed_over(op)

    def bucket_order(self, ddp: DistributedDataParallel, op: Op) -> None:
        self._worker.buckets.note(ddp, op)

    def waiting_changed(self, waiting: bool) -> None:
        self._worker.progress.waiting(waiting)
        if waiting:
            self._worker.updates.waits()

    def whereabouts(self) -> str:
        return self._worker.wait_watchdog.whereabouts

    def await_absent(self) -> bool:
        return self._worker.survivor_groups.await_absent()


def _marks(env: WorkerEnv) -> BoundaryMarks | None:
    """A file that all ranks write to, where they are on one machine."""
    if len(env.machines) > 1:
        return None
    return BoundaryMarks(env.job_dir / f"boundaries{env.restart}.{env.world_size}", env.rank, env.world_size)


def _mirror(env: WorkerEnv) -> Mirror | None:
    if len(env.machines) < 2:
        return None
    folder = env.rank_dir / f"attempt{env.restart}"
    return Mirror(env.rank, env.restart, env.slot, folder, secret.of_job(env.job_dir))
