"""Where a worker begins: a replacement at the failed worker's step boundary, or as the copy of a replica; after a
restart at a checkpoint, or at what was handed on when the number of workers changed; all others at the beginning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shared_core.errors import CorruptFile, DamagedRecord, RecoveryFailed, SwiftError, Unsupported
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.checkpoints.checkpoints import Checkpoints
from shared_core.worker.checkpoints.recovery_line import Collect
from shared_core.worker.checkpoints.restored import Restored, ends_before
from shared_core.worker.fatal_actions import EXIT_STALE
from shared_core.worker.recovery.exchange import Received
from shared_core.worker.recovery.rank_copy import unpack
from shared_core.worker.recovery.recovery import WorkerRecovery
from shared_core.worker.recovery.resize import take_over
from shared_core.worker.recovery.spare import Spare
from shared_core.worker.recovery.survivor_groups import SurvivorGroups
from shared_core.worker.start import truncation
from shared_core.worker.state.updates import Updates


class StartPoint:
    """What one worker begins with. Used by the program's thread. ``joining``: there is a place to reach, and it is not
    reached yet.
    """

    def __init__(
        self,
        env: WorkerEnv,
        recovery: WorkerRecovery,
        survivor_groups: SurvivorGroups,
        checkpoints: Checkpoints,
        updates: Updates,
        spare: Spare,
    ) -> None:
        self.spare = spare
        self._env, self._recovery, self._survivor_groups, self._checkpoints = (
            env,
            recovery,
            survivor_groups,
            checkpoints,
        )
        self._publisher, self._updates = recovery.publisher, updates
        # A replacement whose failed worker has passed a step boundary mostly starts there.
        passed = env.spare or (env.incarnation > 0 and bool(self._publisher.boundaries()))
        self._restored = None if passed else self._line()
        self._saved: Restored | None = None
        self._peeked: dict[str, Any] | None = None
        self.joining = env.incarnation > 0 or self._restored is not None

    def _line(self) -> Restored | None:
        """What the workers of this attempt start from; None for the beginning."""
        env, resized = self._env, self._env.resized
        fresh = not env.restart and not env.config.continues
        try:
            checkpoint = None
            if fresh:
                self._checkpoints.start_from_scratch()
            else:
                checkpoint = self._checkpoints.newest()
        except CorruptFile as error:
            self._recovery.fatal_actions.fall_back(str(error))
        except Unsupported as error:
            self._recovery.fatal_actions.fail(error)
            raise
        if resized is None or (checkpoint is not None and checkpoint.boundary.index >= resized.boundary):
            return checkpoint
        try:
            return take_over(env, resized)
        except (RecoveryFailed, CorruptFile) as error:
            self._recovery.fatal_actions.fall_back(str(error))

    def prepare(self) -> None:
        """Replacement: decide where to begin, before the user's code has done anything that depends on it. Blocks. A
        hot standby does nothing until it has a place.
        """
        if self.spare.waits:
            return
        self._recovery.prepare()
        target = self._recovery.forming.target
        if self._recovery.asks_to_join:
            self._restored = None  # the others have got further
        elif target is not None:
            self._restored = None  # a failed worker has got further than the checkpoint of this attempt
            if target.saved and self.joining and self._saved is None:
                try:
                    self._saved = self._checkpoints.own.at(target.index)
                except CorruptFile as error:  # since it was looked at
                    self._recovery.fatal_actions.fall_back(str(error))
                self._publisher.complete(self._saved.records, self._saved.ends)
                self._recovery.runtime.records = dict(self._publisher.records.read())
        elif self._recovery.replacement and self._restored is None and self.joining:
            self._restored = self._line()

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
        self._checkpoints.look_at_failed_worker()
        self.prepare()
        target, asks_to_join = self._recovery.forming.target, self._recovery.asks_to_join
        no_boundary = target is None and not asks_to_join
        if no_boundary or not self.spare.serves(None if asks_to_join else target, self._is_finished):
            os._exit(EXIT_STALE)  # it has gone another way than the failed worker; the launcher starts another

    @property
    def restarts(self) -> bool:
        """Whether the place is that of a checkpoint from which all workers begin."""
        return self._restored is not None

    @property
    def of_others(self) -> bool:
        """Whether the place is a copy of another rank's, or of another number of workers."""
        return self._recovery.asks_to_join or (self._restored is not None and self._restored.resized)

    # -- before the place is reached ---------------------------------------------------------------

    def from_scratch(self) -> None:
        """This replacement is in, and the failed worker had passed no step boundary: it begins as the first
        workers did.
        """
        self.joining = self._restored is not None
        truncation.stop()

    def joined(self) -> None:
        self.joining = False
        truncation.stop()

    def finished(self, entry: int) -> tuple[Any, dict[str, Any]] | None:
        """Result and state at the end of an entry call that the failed worker had finished; None if it had not."""
        if not self.joining:
            return None
        if self.spare.waits:
            return self._publisher.read_end(entry) if self.spare.finished(entry) else None
        if self._restored is not None:
            if entry not in self._restored.ends:
                return None
            result, parts = self._restored.ends[entry]
            self._publisher.publish_end(entry, result, parts)  # for replacements of this attempt
            return result, parts
        if self._recovery.asks_to_join:
            return ends_before(self._publisher, entry + 1).get(entry)
        return self._publisher.read_end(entry) if self._is_finished(entry) else None

    def _is_finished(self, entry: int) -> bool:
        if self._recovery.asks_to_join:
            return entry in ends_before(self._publisher, entry + 1)
        target = self._recovery.forming.target
        return target is not None and (target.entry > entry or (target.entry == entry and target.kind == "end"))

    def peek(self, name: str) -> Any:
        """The value of a registered name at the place; None for none, and where the place is reached. May block."""
        if not self.joining:
            return None
        self.settle()
        if self._peeked is None:
            self.prepare()
            self._peeked = self._parts()
        return self._peeked.get(name)

    def _parts(self) -> dict[str, Any]:
        if self._restored is not None:
            return self._restored.parts
        target = self._recovery.forming.target
        if self._recovery.asks_to_join and (boundaries := self._publisher.boundaries()):
            target = boundaries[-1]
        if target is None:
            return {}
        return self._saved.parts if self._saved is not None else self._publisher.read_boundary(target.index)

    def remembered(self, kind: str) -> dict[str, Any]:
        """What failed workers have kept under ``kind``, by name; the newest of each. May block."""
        self.settle()
        records = self._restored.records if self._restored is not None else self._publisher.records.read()
        return {key.name: value for key, value in records if key.kind == kind}

    # -- at the place ------------------------------------------------------------------------------

    def is_here(self, kind: str, entry: int) -> bool:
        """Whether a step boundary of this kind in this entry call is the place. May block."""
        if not self.joining:
            return False
        if self.spare.waits:
            if kind == "end" and self.spare.passes_end(entry):
                return False
            self.settle()
        if self._recovery.asks_to_join:
            return kind != "end"
        if self._restored is not None:
            return self._restored.boundary.entry == entry
        target = self._recovery.forming.target
        return target is not None and target.kind == kind and target.entry == entry

    def reach(self, entry: int, replicas: Sequence[int]) -> tuple[Restored, Received | None]:
        """Get the state of the place, at the step boundary that :meth:`is_here`. Blocks. ``replicas`` are the ranks
        that train the same as this one, where not all do.

        Returns the state, and what was received from others; None where all begin here. Only a copy of another rank is
        both ``added`` and received.
        """
        if self._restored is not None:
            if self._restored.collect is not None:
                self._collect(self._restored, self._restored.collect, replicas)
            for key, results in self._restored.records:
                self._publisher.records.add(key, results)
            return self._restored, None
        self._updates.begin_install()
        if self._recovery.asks_to_join:  # the others have continued: this rank becomes a copy of a replica
            received = self._survivor_groups.join_request(entry)
            assert received.boundary is not None and received.local is not None
            parts = unpack(self._publisher, received.local.numpy().tobytes())
            self._publisher.forget_boundaries()
            state = received.description, received.tensors
            return Restored(received.boundary, parts, {}, [], *state, owned=True, added=True), received
        received = self._recovery.join()
        boundary = received.boundary
        assert boundary is not None
        if self._saved is not None:
            return replace(self._saved, boundary=boundary, records=self._publisher.records.read()), received
        parts, records = self._publisher.read_boundary(boundary.index), self._publisher.records.read()
        state = received.description, received.tensors
        return Restored(boundary, parts, {}, records, *state, owned=True), received

    def _collect(self, restored: Restored, collect: Collect, replicas: Sequence[int]) -> None:
        """Read the stage's layers from the checkpoint: only now it is known which ones it has."""
        try:
            if self._updates.replicated is None or list(replicas) != [self._env.rank]:
                raise Unsupported(
                    f"the checkpoint at step boundary {restored.boundary.index} is of a pipeline whose stages had no "
                    f"replicas, and this one is another: start {restored.workers} workers, or start from scratch with "
                    "checkpoint.resume='never'"
                )
            restored.description, restored.tensors = collect(self._updates.replicated)
        except SwiftError as error:
            self._recovery.fatal_actions.fail(error)
            raise

    def reached(self, place: Restored) -> str:
        """The state is in place. Returns the checkpoint that all begin from, in words; empty if it is none."""
        whence = ""
        if self._restored is None and place.tier:
            self._publisher.forget_boundaries()  # of places that are now ahead
        elif place.tier:
            of = f", which {place.workers} workers have made" if place.resized else ""
            whence = f"the checkpoint at step boundary {place.boundary.index} ({place.tier}){of}"
        self._restored = self._saved = None
        return whence
