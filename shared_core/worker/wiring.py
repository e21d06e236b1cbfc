"""Builds the parts of a worker and joins them: the one place where they meet.

Each part gets what it needs in its constructor. Only calls from below (of groups, of recoveries, before and after an
update) are relayed to parts that are made after the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from shared_core.errors import RecoveryFailed, SwiftError
from shared_core.events import EventLog
from shared_core.faults import inject
from shared_core.protocol import progress_file
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.system import secret
from shared_core.transport.store import Store
from shared_core.worker import link
from shared_core.worker.comm import Runtime
from shared_core.worker.comm.listener import KeptBucketInput, RecordKey
from shared_core.worker.comm.op import Op
from shared_core.worker.comm.results import BoundaryMarks
from shared_core.worker.fatal_actions import FatalActions
from shared_core.worker.integrity.state_check import StateCheck
from shared_core.worker.job_store import JobStore
from shared_core.worker.messages.disk_log import DiskLog
from shared_core.worker.messages.group_log import Logged
from shared_core.worker.mirror import Mirror
from shared_core.worker.program.boundary_state import BoundaryState
from shared_core.worker.program.entries import Entries
from shared_core.worker.program.joining import Joining
from shared_core.worker.program.leaving import LeavingPublisher
from shared_core.worker.program.notes import Notes, Saves
from shared_core.worker.program.options import ProgramOptions
from shared_core.worker.program.own_standby import OwnStandby
from shared_core.worker.program.publishing import Checkpointing, Publishing
from shared_core.worker.program.step_boundaries import StepBoundaries
from shared_core.worker.program.step_clock import DATA, UPDATE, StepClock
from shared_core.worker.program.trained import Trained
from shared_core.worker.program.unmarked import Unmarked
from shared_core.worker.recovery.context import Context, Lifecycle
from shared_core.worker.recovery.copies import StateCopies
from shared_core.worker.recovery.donor import Donor
from shared_core.worker.recovery.exchange import Replaying
from shared_core.worker.recovery.place_reports import PlaceReports
from shared_core.worker.recovery.recovery import WorkerRecovery
from shared_core.worker.recovery.replay import Commits, Replays
from shared_core.worker.recovery.replicas import Replicas
from shared_core.worker.recovery.reporting import RecoveryReporter
from shared_core.worker.recovery.spare import Spare
from shared_core.worker.recovery.start_point import WorkerStart
from shared_core.worker.recovery.survivor_groups import SurvivorGroups
from shared_core.worker.recovery.wait_watchdog import WaitWatchdog
from shared_core.worker.state.compiled import Compiled
from shared_core.worker.state.ddp_buckets import Buckets
from shared_core.worker.state.forward_pass import ForwardRecorder
from shared_core.worker.state.local_state import BoundaryPosition, StateParts
from shared_core.worker.state.overflow import overflow
from shared_core.worker.state.overlapped import Overlapped
from shared_core.worker.state.publications import SharedMemoryPublisher
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
        self.log, self.store = log, store
        runtime = self.runtime = Runtime(env, relay, log, _marks(env))
        fatal_actions = self.fatal_actions = FatalActions(runtime, store)
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
            Overlapped(updates.steps, buckets.layout, position),
            lambda reason: self._cannot_put_back(reason, position.origin),
            clock,
        )
        # Recovery.
        donor = Donor(env, publisher, updates, position)
        copies = self.copies = StateCopies(context, updates, lambda: trained.replicas)
        recovery = self.recovery = WorkerRecovery(context, publisher, donor, copies, relay)
        survivor_groups = self.survivor_groups = SurvivorGroups(recovery, copies, position)
        self.wait_watchdog, self.place_reports = WaitWatchdog(recovery), PlaceReports(context)
        commits = Commits(
            runtime,
            log,
            lambda: self.start.checkpoints.newest_boundary,
            lambda: self.start.checkpoints.due_boundary,
            config.log.budget_bytes,
        )
        replays = self.replays = Replays(runtime, log, commits)
        spare = self._spare = Spare(env, store, publisher)
        start = self.start = WorkerStart(
            context, recovery, survivor_groups, updates, parts, spare, position, lambda: commits.presses
        )
        state_check = self.state_check = StateCheck(context, updates, position, lambda: self.start.checkpoints)
        reporter = self.reporter = RecoveryReporter(context, updates, lambda: start.checkpoints.rolled_back())
        # What the program calls.
        self.options = ProgramOptions(env, runtime, start)
        checkpoints = self.checkpoints = Checkpointing(start, position, publisher)
        self.notes = Notes(publisher, position, start)
        replicas = self._replicas = Replicas(recovery, updates)
        state = BoundaryState(runtime, parts, trained)
        publishing = Publishing(position, state, trained, runtime, publisher, survivor_groups, replicas, checkpoints)
        self.joining = Joining(start, position, state, trained, progress, replays, reporter, publishing)
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
    """Passes calls from below on to parts that are made after the caller: it is the
    :class:`~shared_core.worker.comm.listener.OperationListener` of the groups, and the
    :class:`~shared_core.worker.recovery.listener.RecoveryListener` of the forming of generations.
    """

    def __init__(self, worker: WorkerRuntime) -> None:
        self._worker = worker

    # -- of the groups -------------------------------------------------------------------------------------------------

    def new_store(self, prefix: str) -> Store:
        return self._worker.store.below(prefix)

    def first_group(self) -> None:
        """Form the first generation. A replacement with a step boundary to reach does so there; another joins here."""
        it, arrival = self._worker, self._worker.start.start_point
        it.place_reports.start()
        # A hot standby goes the way of a replacement, and says nothing to the others before it has a place.
        if arrival.spare.waits:
            it.runtime.answer_from(dict(it.publisher.records.read()))
            arrival.spare.then(it.wait_watchdog.watch)
            inject.point("spare.prepares")
            return
        it.wait_watchdog.watch()
        arrival.prepare()
        if it.runtime.starting:
            return
        if it.recovery.replacement:
            it.updates.begin_install()
            it.updates.load(0, None, ())
        inject.point("startup")
        received = it.recovery.join()
        if it.recovery.replacement:
            it.replays.begin(received.replaying)
            arrival.from_scratch()
            it.reporter.joined(None)

    def made_again(self, group: str) -> tuple[StepBoundary | None, Mapping[int, Logged]]:
        return self._worker.recovery.forming.made_again(group)

    def record(self, key: RecordKey, results: list[torch.Tensor]) -> None:
        self._worker.publisher.records.add(key, results)

    def publish_checksum(self, group: int, seq: int, checksum: int) -> None:
        self._worker.publisher.input_checksums.add(group, seq, checksum)

    def publish_source(self, group: int, number: int, source: int) -> None:
        self._worker.publisher.sources.add(group, number, source)

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
            self._worker.updates.steps.waits()

    def whereabouts(self) -> str:
        return self._worker.wait_watchdog.whereabouts

    def await_absent(self) -> bool:
        return self._worker.survivor_groups.await_absent()

    def cannot_complete(self, what: str) -> None:
        self._worker.fatal_actions.cannot_complete(what)

    def unrepeatable(self, why: str) -> None:
        self._worker.fatal_actions.fall_back(why)

    def unreadable(self, error: SwiftError) -> None:
        rank = self._worker.env.rank
        why = RecoveryFailed(f"rank {rank}: the log on disk cannot be read: {error}")
        self._worker.fatal_actions.fall_back(str(why))

    def failed(self, error: SwiftError) -> None:
        self._worker.fatal_actions.fail(error)

    # -- of the forming of generations ---------------------------------------------------------------------------------

    def recovered(self, fields: dict[str, Any]) -> None:
        self._worker.reporter.recovered(fields)

    def irreplaceable(self) -> str:
        return self._worker.unmarked.irreplaceable

    def rerouted(self, detected: float) -> None:
        self._worker.reporter.rerouted(detected)
        self._worker.copies.offer()

    def replaying(self, replaying: Replaying) -> None:
        self._worker.replays.begun(replaying)

    def saved_boundaries(self) -> list[StepBoundary]:
        return self._worker.start.checkpoints.own.boundaries()

    def together(self) -> tuple[int, ...]:
        return self._worker.log.together


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
