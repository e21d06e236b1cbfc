"""Builds the parts of a worker and joins them: the one place where they meet.

Each part gets what it needs in its constructor. What is made later it asks of a relay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from shared_core.errors import RecoveryFailed, SwiftError
from shared_core.events import EventLog
from shared_core.protocol import progress_file
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.system import secret
from shared_core.transport.store import Store
from shared_core.worker.comm import Runtime
from shared_core.worker.comm.boundary_marks import BoundaryMarks
from shared_core.worker.comm.listener import KeptBucketInput, RecordKey
from shared_core.worker.comm.made_groups import MadeGroups
from shared_core.worker.comm.op import Op
from shared_core.worker.fatal_actions import FatalActions
from shared_core.worker.job_store import JobStore
from shared_core.worker.messages.disk_log import DiskLog
from shared_core.worker.messages.group_log import Logged
from shared_core.worker.mirror import Mirror
from shared_core.worker.program.checkpointing import Checkpointing
from shared_core.worker.program.entries import Entries
from shared_core.worker.program.joining import Joining
from shared_core.worker.program.notes import Notes
from shared_core.worker.program.options import ProgramOptions
from shared_core.worker.program.publishing import Publishing
from shared_core.worker.program.step_boundaries import StepBoundaries
from shared_core.worker.program.trained import Trained
from shared_core.worker.program.unmarked import Unmarked
from shared_core.worker.recovery.commits import Commits
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.copies import StateCopies
from shared_core.worker.recovery.donor import Donor
from shared_core.worker.recovery.exchange import Replaying
from shared_core.worker.recovery.first_group import on_first_group
from shared_core.worker.recovery.lifecycle import Lifecycle
from shared_core.worker.recovery.place_reports import PlaceReports
from shared_core.worker.recovery.recovery import WorkerRecovery
from shared_core.worker.recovery.replay import Replays
from shared_core.worker.recovery.replicas import Replicas
from shared_core.worker.recovery.reporting import RecoveryReporter
from shared_core.worker.recovery.spare import Spare
from shared_core.worker.recovery.start import WorkerStart
from shared_core.worker.recovery.survivor_groups import SurvivorGroups
from shared_core.worker.recovery.wait_watchdog import WaitWatchdog
from shared_core.worker.state.compiled import Compiled
from shared_core.worker.state.ddp_buckets import Buckets
from shared_core.worker.state.forward_pass import ForwardRecorder
from shared_core.worker.state.local_state import BoundaryPosition, StateParts
from shared_core.worker.state.overflow import overflow
from shared_core.worker.state.overlapped import Overlapped
from shared_core.worker.state.publications import SharedMemoryPublisher
from shared_core.worker.state.updates import Updates
from shared_core.worker.variables.variables import Origin, Variables


class WorkerRuntime:
    def __init__(self, env: WorkerEnv) -> None:
        config = env.config
        groups_relay, recovery_relay, state_relay = _GroupsRelay(self), _RecoveryRelay(self), _StateRelay(self)
        joining = state_relay.joining
        self.env, self.position = env, BoundaryPosition()
        self.parts = StateParts(Variables(env.rank, state_relay.origin, state_relay.cannot_put_back))
        position, parts = self.position, self.parts
        publisher = self.publisher = SharedMemoryPublisher(
            env.rank_dir / f"attempt{env.restart}", _mirror(env), overflow(env)
        )
        updates = self.updates = Updates(
            config.state.preimages, after=state_relay.updated, fence=state_relay.fence, stable=state_relay.stable
        )
        log = self.log = DiskLog(env)
        runtime = self.runtime = Runtime(env, groups_relay, log, _marks(env))
        donor = Donor(env, publisher, updates, joining)
        store = self.store = JobStore(env)
        fatal_actions = self.fatal_actions = FatalActions(runtime, store)
        compiled = Compiled(state_relay.origin, fatal_actions.fall_back)
        parts.register("swift.compiled", compiled.capture, compiled.restore)
        context = Context(env, runtime, Lifecycle(env, runtime), store, EventLog(env.events, env.run), fatal_actions)
        copies = self.copies = StateCopies(context, updates, state_relay.replicas)
        recovery = self.recovery = WorkerRecovery(context, publisher, donor, copies, recovery_relay)
        progress = self.progress = progress_file.ProgressFile(env.rank_dir / "progress")
        survivor_groups = self.survivor_groups = SurvivorGroups(recovery, copies, position)
        replicas = Replicas(env, recovery, updates)
        self.wait_watchdog, self.place_reports = WaitWatchdog(recovery), PlaceReports(context)
        unmarked = self.unmarked = Unmarked(position, runtime, config.log.budget_bytes)
        buckets = self.buckets = Buckets(runtime, publisher, position, unmarked.trains_unattached)
        forward_recorder = self.forward_recorder = ForwardRecorder(
            runtime, publisher, updates, parts, joining, position
        )
        reporter = self.reporter = RecoveryReporter(context, updates, state_relay.rolled_back)
        commits = Commits(runtime, log, state_relay.newest_boundary, state_relay.due_boundary, config.log.budget_bytes)
        replays = self.replays = Replays(runtime, log, commits)
        start = self.start = WorkerStart(
            context, recovery, survivor_groups, updates, parts, Spare(env, store, publisher), lambda: commits.presses
        )
        self.options = ProgramOptions(env, runtime, start)
        checkpoints = self.checkpoints = Checkpointing(start, position, publisher)
        self.notes = Notes(publisher, position, start)
        trained = self.trained = Trained(
            config,
            runtime,
            updates,
            parts,
            buckets,
            forward_recorder,
            Overlapped(updates.steps, buckets.layout, joining),
            lambda reason: state_relay.cannot_put_back(reason, state_relay.origin()),
        )
        publishing = Publishing(
            position, parts, trained, runtime, publisher, donor, survivor_groups, replicas, checkpoints
        )
        self.joining = Joining(
            start,
            position,
            runtime.place,
            MadeGroups(runtime),
            parts,
            trained,
            buckets,
            updates,
            progress,
            replays,
            reporter,
            publishing,
        )
        self.boundaries = StepBoundaries(
            position, trained, runtime, progress, reporter, publishing, self.joining, config.resizes
        )
        self.entries = Entries(start, position, runtime, publisher, parts, reporter, publishing, self.joining)


class _Relay:
    """Passes calls of a part on to parts that are made after it."""

    def __init__(self, worker: WorkerRuntime) -> None:
        self._worker = worker


class _GroupsRelay(_Relay):
    """The :class:`~shared_core.worker.comm.listener.OperationListener` of the groups."""

    def new_store(self, prefix: str) -> Store:
        return self._worker.store.below(prefix)

    def first_group(self) -> None:
        it = self._worker
        on_first_group(
            it.runtime,
            it.recovery,
            it.start.start_point,
            it.updates,
            it.replays,
            it.reporter,
            it.wait_watchdog,
            it.place_reports,
        )

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

    def bucket_input(self, bucket: torch.Tensor) -> KeptBucketInput | None:
        return self._worker.buckets.input_of(bucket)

    def bucket_handed_over(self, op: Op) -> None:
        self._worker.buckets.handed_over()
        self._worker.trained.bucket_handed_over(op)

    def bucket_order(self, ddp: DistributedDataParallel, op: Op) -> None:
        self._worker.buckets.note(ddp, op)

    def waiting_changed(self, waiting: bool) -> None:
        self._worker.progress.waiting(waiting)

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


class _RecoveryRelay(_Relay):
    """The :class:`~shared_core.worker.recovery.listener.RecoveryListener` of the forming of generations."""

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

    def await_absent(self) -> bool:
        return self._worker.survivor_groups.await_absent()


class _StateRelay(_Relay):
    """For the parts that hold or follow the worker's state."""

    def joining(self) -> bool:
        return self._worker.start.start_point.joining

    def origin(self) -> Origin:
        it = self._worker
        return "other" if it.position.added or it.position.resized else it.start.start_point.origin

    def cannot_put_back(self, reason: str, origin: Origin) -> None:
        """The variables in a checkpoint are older: with those nothing could be put back either, so the job ends."""
        if origin == "checkpoint":
            self._worker.fatal_actions.give_up(RecoveryFailed(reason))
        self._worker.fatal_actions.fall_back(reason)

    def replicas(self) -> list[int]:
        return self._worker.trained.replicas

    def updated(self) -> None:
        self._worker.reporter.updated()
        self._worker.unmarked.updated()

    def fence(self) -> None:
        self._worker.start.checkpoints.fence()

    def stable(self) -> int:
        return self._worker.runtime.stable

    def rolled_back(self) -> None:
        self._worker.start.checkpoints.rolled_back()

    def newest_boundary(self) -> int:
        return self._worker.start.checkpoints.newest_boundary

    def due_boundary(self) -> int:
        return self._worker.start.checkpoints.due_boundary


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
