"""Where a worker begins: a replacement at the failed worker's step boundary, or as the copy of a replica; after a
restart at a checkpoint, or at what was handed on when the number of workers changed; all others at the beginning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shared_core.codec import Count, decode
from shared_core.errors import CorruptFile, DamagedRecord, RecoveryFailed, SwiftError, Unsupported
from shared_core.faults import inject
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.preparing import EXIT_UNFIT, Prepared, place_key
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.waiting import FOREVER_S
from shared_core.worker.checkpoints.checkpoints import Checkpoints
from shared_core.worker.checkpoints.recovery_line import Collect, Restored, ends_before
from shared_core.worker.comm.state import EXIT_STALE
from shared_core.worker.link import JobStore, connect_store
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.exchange import Received, unpack_rank
from shared_core.worker.recovery.recovery import WorkerRecovery
from shared_core.worker.recovery.resize import take_over
from shared_core.worker.recovery.survivor_groups import SurvivorGroups
from shared_core.worker.start import hot_standby, truncation
from shared_core.worker.state.local_state import BoundaryPosition, StateParts
from shared_core.worker.state.publications import Records, SharedMemoryPublisher, StateOrders
from shared_core.worker.state.updates import Updates
from shared_core.worker.variables.variables import Origin


class Spare:
    """The part of a worker that is a hot standby, until it has a place; ``waits`` while it has none. In all others it
    does nothing. The publications are those of its rank, which the living worker writes.
    """

    def __init__(self, env: WorkerEnv, store: JobStore, publisher: SharedMemoryPublisher) -> None:
        self._store, self._publisher = store, publisher
        self.begin(env, forked=False)

    def begin(self, env: WorkerEnv, *, forked: bool) -> None:
        """Be that of the worker that ``env`` describes. ``forked``: it is a copy of the worker whose place it may take,
        and has not run the script itself.
        """
        self._env, self._forked = env, forked
        self.waits = env.spare
        #: Whether entry calls were finished, as far as this one has asked, and ends of calls that it has passed.
        self._finished: dict[int, bool] = {}
        self._passed: list[int] = []
        self._then: list[Callable[[], None]] = []

    def then(self, call: Callable[[], None]) -> None:
        """Have ``call`` run when there is a place."""
        self._then.append(call)

    def finished(self, entry: int) -> bool:
        """Whether the worker of the rank has finished an entry call by now. Remembers the answer for :meth:`serves`."""
        self._finished[entry] = self._publisher.has_end(entry)
        return self._finished[entry]

    def passes_end(self, entry: int) -> bool:
        """Whether the worker of the rank has continued from the end of this entry call, so that this one does, too."""
        newest = self._publisher.boundaries()[-1:]
        if not newest or (newest[0].entry, newest[0].kind) == (entry, "end"):
            return False
        self._passed.append(entry)
        return True

    def await_place(self) -> int:
        """Block until the place is free. Returns the generation in which this worker is to take it. The process exits
        if it can never take the place, or the agent is gone. Raises DamagedRecord if what the launcher has said is
        no generation.
        """
        env = self._env
        if any(boundary.replicas == [env.rank] for boundary in self._publisher.boundaries()):
            os._exit(EXIT_UNFIT)
        until = next((str(self._publisher.end_file(e)) for e, ended in self._finished.items() if not ended), "")
        # It blocks, so it has a connection of its own.
        store = connect_store(FOREVER_S, env).below(env.prefix)
        self._store.prepared(asdict(Prepared(env.rank, env.incarnation, os.getpid(), until, self._forked)))
        inject.point("spare.waits")
        key = place_key(env.rank, env.incarnation)
        try:
            store.wait([key])
            raw = store.get(key)
        except RuntimeError:
            os._exit(1)  # the store is gone: so is the agent
        generation: int = decode(raw, Count, key)
        hot_standby.take_place(generation)
        return generation

    def take_place(self) -> None:
        self.waits = False
        self._publisher.look_again()
        for call in self._then:
            call()

    def serves(self, target: StepBoundary | None, finished: Callable[[int], bool]) -> bool:
        """Whether the way that this one has come leads to ``target``, its place; None where the others do not wait for
        this one. ``finished`` says whether an entry call was finished, as it is known now.
        """
        behind = target is not None and target.kind == "end" and target.entry in self._passed
        return not behind and all(finished(entry) == ended for entry, ended in self._finished.items())


#: Result and state at the end of an entry call.
EntryEnd = tuple[Any, dict[str, Any]]


@dataclass
class StartPoint:
    """The beginning of the script: there is nothing to reach. The other places are its subclasses, below."""

    recovery: WorkerRecovery
    updates: Updates

    @property
    def origin(self) -> Origin:
        """Whose state a worker continues with that begins here."""
        return "same"

    def has_finished(self, entry: int) -> bool:
        return False

    def finished(self, entry: int) -> EntryEnd | None:
        return self.recovery.publisher.read_end(entry) if self.has_finished(entry) else None

    def is_here(self, kind: str, entry: int) -> bool:
        return False

    def parts(self) -> dict[str, Any]:
        """The registered values at the place, by name."""
        return {}

    def records(self) -> Records:
        return self.recovery.publisher.records.read()

    def reach(self, entry: int, replicas: Sequence[int]) -> tuple[Restored, Received | None]:
        raise AssertionError("the beginning of the script is no step boundary")


@dataclass
class FromCheckpoint(StartPoint):
    """All workers begin at a checkpoint, or with what was handed on when their number changed."""

    restored: Restored

    @property
    def origin(self) -> Origin:
        return "other" if self.restored.resized else "checkpoint"

    def finished(self, entry: int) -> EntryEnd | None:
        if entry not in self.restored.ends:
            return None
        self.recovery.publisher.publish_end(entry, *self.restored.ends[entry])  # for replacements of this attempt
        return self.restored.ends[entry]

    def is_here(self, kind: str, entry: int) -> bool:
        return self.restored.boundary.entry == entry

    def parts(self) -> dict[str, Any]:
        return self.restored.parts

    def records(self) -> Records:
        return self.restored.records

    def reach(self, entry: int, replicas: Sequence[int]) -> tuple[Restored, Received | None]:
        if self.restored.collect is not None:
            self._collect(self.restored.collect, replicas)
        for key, results in self.restored.records:
            self.recovery.publisher.records.add(key, results)
        return self.restored, None

    def _collect(self, collect: Collect, replicas: Sequence[int]) -> None:
        """Read the stage's layers from the checkpoint: only now it is known which ones it has."""
        restored = self.restored
        try:
            if self.updates.replicated is None or list(replicas) != [self.recovery.env.rank]:
                raise Unsupported(
                    f"the checkpoint at step boundary {restored.boundary.index} is of a pipeline whose stages had no "
                    f"replicas, and this one is another: start {restored.workers} workers, or start from scratch with "
                    "checkpoint.resume='never'"
                )
            restored.description, restored.tensors = collect(self.updates.replicated)
        except SwiftError as error:
            self.recovery.fatal_actions.fail(error)
            raise


@dataclass
class FromReplica(StartPoint):
    """A replacement that the others do not wait for becomes a copy of a replica, at their next step boundary."""

    survivor_groups: SurvivorGroups

    @property
    def origin(self) -> Origin:
        return "other"

    def has_finished(self, entry: int) -> bool:
        return entry in ends_before(self.recovery.publisher, entry + 1)

    def is_here(self, kind: str, entry: int) -> bool:
        return kind != "end"

    def parts(self) -> dict[str, Any]:
        boundaries = self.recovery.publisher.boundaries()
        return self.recovery.publisher.read_boundary(boundaries[-1].index) if boundaries else {}

    def reach(self, entry: int, replicas: Sequence[int]) -> tuple[Restored, Received | None]:
        self.updates.begin_install()
        received = self.survivor_groups.join_request(entry)
        assert received.boundary is not None and received.local is not None
        parts = unpack_rank(self.recovery.publisher, received.local.numpy().tobytes())
        self.recovery.publisher.forget_boundaries()
        state = received.description, received.tensors
        return Restored(received.boundary, parts, {}, [], *state, owned=True, added=True), received


@dataclass
class FromBoundary(StartPoint):
    """A replacement takes over at the failed worker's step boundary: from what that worker has published, or from a
    checkpoint of this attempt (``saved``), where it has no replica.
    """

    target: StepBoundary
    saved: Restored | None

    def has_finished(self, entry: int) -> bool:
        return self.target.entry > entry or (self.target.entry == entry and self.target.kind == "end")

    def is_here(self, kind: str, entry: int) -> bool:
        return (self.target.kind, self.target.entry) == (kind, entry)

    def parts(self) -> dict[str, Any]:
        return self.saved.parts if self.saved else self.recovery.publisher.read_boundary(self.target.index)

    def reach(self, entry: int, replicas: Sequence[int]) -> tuple[Restored, Received | None]:
        self.updates.begin_install()
        received = self.recovery.join()
        boundary = received.boundary
        assert boundary is not None
        if self.saved is not None:
            return replace(self.saved, boundary=boundary, records=self.records()), received
        parts, state = self.recovery.publisher.read_boundary(boundary.index), (received.description, received.tensors)
        return Restored(boundary, parts, {}, self.records(), *state, owned=True), received


class WorkerStart:
    """Finds where one worker begins, and takes the program there. Used by the program's thread.

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
        self._updates, self._parts, self.spare, self._position = updates, parts, spare, position
        self._presses = presses
        self.begin(context)

    def begin(self, context: Context) -> None:
        """Say where the checkpoints of the worker of ``context`` are made, and find the one from which it starts; again
        in a forked copy of the process, and with options of checkpoints that the script has given.
        """
        self._context, env, config, recovery = context, context.env, context.env.config, self._recovery
        checkpoints = self.checkpoints = Checkpoints(context, self._updates, self._presses)
        if config.reroutes:
            checkpoints.keep_number("with on_failure='reroute' each worker is to compute the share of any other")
        if (pricing := checkpoints.pricing) is not None:
            self._parts.register("swift.checkpoints", pricing.capture, pricing.restore, main=True)
        # A replacement whose failed worker has passed a step boundary mostly starts there.
        passed = env.spare or (env.incarnation > 0 and bool(recovery.publisher.boundaries()))
        self._start_point = StartPoint(recovery, self._updates) if passed else self._place_of_all()
        self._decided = env.incarnation == 0
        self._peeked: dict[str, Any] | None = None
        self._note(joining=env.incarnation > 0 or isinstance(self._start_point, FromCheckpoint))
        self.orders: StateOrders | None = None
        if config.resizes or (config.checkpoint.dir is not None and not config.reroutes):
            self.orders = StateOrders(recovery.publisher.orders, config.resize.data == "drop", config.resizes)

    def use(self, env: WorkerEnv) -> None:
        """The script has given options of checkpoints, which are in ``env``, before anything has begun."""
        self.begin(replace(self._context, env=env))

    @property
    def joining(self) -> bool:
        """Whether there is a place to reach, and it is not reached yet."""
        return self._position.joining

    def _note(self, *, joining: bool) -> None:
        self._position.note_start(joining, self._start_point.origin)

    def prepare(self) -> None:
        """Replacement: decide where to begin; blocks. A hot standby does nothing until it has a place."""
        if self.spare.waits:
            return
        self._recovery.prepare()
        if not self._decided:
            self._start_point, self._decided = self._place_of_replacement(), True
            self._note(joining=self.joining)

    def _place_of_replacement(self) -> StartPoint:
        """Where the others have got further than the checkpoint of this attempt, that does not count."""
        recovery, target = self._recovery, self._recovery.forming.target
        if recovery.asks_to_join:
            return FromReplica(recovery, self._updates, self._survivor_groups)
        if target is None:
            found = self._start_point
            return found if isinstance(found, FromCheckpoint) else self._place_of_all()
        saved = None
        if target.saved:
            try:
                saved = self.checkpoints.own.at(target.index)
            except CorruptFile as error:  # since it was looked at
                recovery.fatal_actions.fall_back(str(error))
            recovery.publisher.complete(saved.records, saved.ends)
            recovery.runtime.records = dict(recovery.publisher.records.read())
        return FromBoundary(recovery, self._updates, target, saved)

    def _place_of_all(self) -> StartPoint:
        """What the workers of this attempt start from."""
        env, fatal_actions, found = self._context.env, self._recovery.fatal_actions, None
        try:
            if env.restart or env.config.continues:
                found = self.checkpoints.newest()
            else:
                self.checkpoints.start_from_scratch()
            if env.resized is not None and (found is None or found.boundary.index < env.resized.boundary):
                found = take_over(env, env.resized)
        except (CorruptFile, RecoveryFailed) as error:
            fatal_actions.fall_back(str(error))
        except Unsupported as error:
            fatal_actions.fail(error)
            raise
        if found is None:
            return StartPoint(self._recovery, self._updates)
        return FromCheckpoint(self._recovery, self._updates, found)

    def settle(self) -> None:
        """Hot standby: what comes now depends on the place, so block until it is free. All others: nothing."""
        if self.spare.waits:
            self.take_place(self.await_place())

    def await_place(self) -> int:
        """Hot standby: block until the place is free. Returns the generation in which it is to be taken."""
        try:
            return self.spare.await_place()
        except DamagedRecord as error:
            self._recovery.fatal_actions.give_up(error)

    def take_place(self, generation: int) -> None:
        """Hot standby: be the replacement of a failed worker. The process exits if it cannot be."""
        self.spare.take_place()
        self._recovery.lifecycle.born_in(generation)
        self.checkpoints.look_at_failed_worker()
        self.prepare()
        found = self._start_point
        target = found.target if isinstance(found, FromBoundary) else None
        no_place = target is None and not isinstance(found, FromReplica)
        if no_place or not self.spare.serves(target, found.has_finished):
            os._exit(EXIT_STALE)  # it has gone another way than the failed worker; the launcher starts another

    # -- before the place is reached ---------------------------------------------------------------

    def from_scratch(self) -> None:
        """The failed worker had passed no step boundary: this one begins as the first workers did."""
        self._note(joining=isinstance(self._start_point, FromCheckpoint))
        truncation.stop()

    def joined(self) -> None:
        self._note(joining=False)
        truncation.stop()

    def finished(self, entry: int) -> EntryEnd | None:
        """Result and state at the end of an entry call that the failed worker had finished; None if it had not."""
        if not self.joining:
            return None
        if self.spare.waits:
            return self._recovery.publisher.read_end(entry) if self.spare.finished(entry) else None
        return self._start_point.finished(entry)

    def peek(self, name: str) -> Any:
        """The value of a registered name at the place; None for none, and where the place is reached. May block."""
        if not self.joining:
            return None
        self.settle()
        if self._peeked is None:
            self.prepare()
            self._peeked = self._start_point.parts()
        return self._peeked.get(name)

    def remembered(self, kind: str) -> dict[str, Any]:
        """What failed workers have kept under ``kind``, by name; the newest of each. May block."""
        self.settle()
        return {key.name: value for key, value in self._start_point.records() if key.kind == kind}

    # -- at the place ------------------------------------------------------------------------------

    def is_here(self, kind: str, entry: int) -> bool:
        """Whether a step boundary of this kind in this entry call is the place. May block."""
        if not self.joining:
            return False
        if self.spare.waits:
            if kind == "end" and self.spare.passes_end(entry):
                return False
            self.settle()
        return self._start_point.is_here(kind, entry)

    def reach(self, entry: int, replicas: Sequence[int]) -> tuple[Restored, Received | None]:
        """Get the state of the place, at the step boundary that :meth:`is_here`. Blocks. ``replicas`` are the ranks
        that train the same as this one, where not all do.

        Returns the state, and what was received from others; None where all begin here. Only a copy of another rank is
        both ``added`` and received.
        """
        return self._start_point.reach(entry, replicas)

    def reached(self, place: Restored) -> str:
        """The state is in place. Returns the checkpoint that all begin from, in words; empty if it is none."""
        whence = ""
        if isinstance(self._start_point, FromBoundary) and place.tier:
            self._recovery.publisher.forget_boundaries()  # of places that are now ahead
        elif place.tier:
            of = f", which {place.workers} workers have made" if place.resized else ""
            whence = f"the checkpoint at step boundary {place.boundary.index} ({place.tier}){of}"
        self._start_point = StartPoint(self._recovery, self._updates)
        self._note(joining=False)
        return whence
