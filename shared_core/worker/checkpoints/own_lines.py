"""Checkpoints that the present attempt has made: recovery lines of its replacements."""

from __future__ import annotations

from dataclasses import replace

from shared_core.checkpoint import lineage
from shared_core.checkpoint.spool import Spool
from shared_core.errors import CorruptFile
from shared_core.events import console
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.checkpoints import recovery_line
from shared_core.worker.checkpoints.recovery_line import Line
from shared_core.worker.checkpoints.restored import Restored, restored
from shared_core.worker.checkpoints.run_identity import RunIdentity


class OwnLines:
    def __init__(self, env: WorkerEnv, spool: Spool, identity: RunIdentity) -> None:
        self._env, self._spool, self._identity = env, spool, identity
        self._of_failed_worker: set[int] | None = None

    def boundaries(self) -> list[StepBoundary]:
        """Step boundaries at which this rank's state can be read, oldest first. Reads all; damaged ones are told."""
        found: dict[int, StepBoundary] = {}
        for line in self._all():
            if line.step in found:
                continue
            try:
                found[line.step] = replace(recovery_line.load(line, self._env.rank).boundary, saved=True)
            except CorruptFile as error:
                console(f"rank {self._env.rank}: a checkpoint is passed over: {error}")
        return [boundary for _, boundary in sorted(found.items())]

    def at(self, index: int) -> Restored:
        """The checkpoint at a step boundary; raises CorruptFile if it cannot be read, or is gone."""
        for line in self._all():
            if line.step == index:
                return restored(recovery_line.load(line, self._env.rank))
        where = self._env.config.checkpoint.dir
        raise CorruptFile(f"rank {self._env.rank}: the checkpoint at step boundary {index} is gone from {where}")

    def failed_worker_made(self, step: int) -> bool:
        """Whether an earlier incarnation of this rank made it. Reads the list once, at the first call."""
        if not self._env.incarnation:
            return False
        if self._of_failed_worker is None:
            self._of_failed_worker = {each.step for each in self._all()}
        return step in self._of_failed_worker

    def _all(self) -> list[Line]:
        # Operations are counted from the start of an attempt: logs go with its own checkpoints.
        env = self._env
        if env.config.checkpoint.dir is None:
            return []
        found = recovery_line.in_memory(self._spool, env.rank, env.world_size)
        found += recovery_line.in_storage(lineage.read(self._identity.folder, env.command.key), env.world_size)
        return [each for each in found if each.session == self._identity.session]
