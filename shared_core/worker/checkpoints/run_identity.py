"""Which run the checkpoints of an attempt belong to. A run keeps its name over all restarts; an attempt has its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shared_core.checkpoint import lineage
from shared_core.errors import DamagedRecord
from shared_core.protocol.codec import Name, decode, text
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.transport.store import Store
from shared_core.worker.checkpoints.recovery_line import Line
from shared_core.worker.comm.state import FatalActions

#: Key in the store: the run of this attempt and what it adopted, for replacements, which do not read its checkpoint.
_RUN = "run"


class RunIdentity:
    """Names of this attempt and its run, equal on all ranks. A damaged record in the store ends the worker."""

    def __init__(self, env: WorkerEnv, store: Callable[[], Store], fatal_actions: FatalActions) -> None:
        self._env, self._store, self._fatal_actions = env, store, fatal_actions
        self._session = self._run = self._adopted = ""

    @property
    def session(self) -> str:
        """A name that only this attempt has. The first use writes to the store: the first rank's proposal wins."""
        if not self._session:
            where = self._env.config.checkpoint.dir
            mine = lineage.next_run(where, self._env.command) if where is not None else lineage.new_run()
            try:
                self._session = text(self._store().compare_set("session", "", mine), "session", Name) or mine
            except DamagedRecord as error:
                self._fatal_actions.give_up(error)
        return self._session

    @property
    def run(self) -> str:
        """A name that a run keeps over all restarts."""
        return self._run or self.session

    @property
    def continues(self) -> bool:
        return bool(self._run)

    @property
    def folder(self) -> str:
        where = self._env.config.checkpoint.dir
        assert where is not None
        return lineage.folder_of(where, self._env.command, self.run)

    def take_up(self, line: Line, told: str) -> None:
        """This attempt begins with a checkpoint; say so to replacements. ``told``: see :attr:`Origins.told`."""
        self._run, self._adopted = line.run, str(line.meta.get("adopted", ""))
        if line.adopts:
            self._run, self._adopted = self.session, told
        self._store().set(_RUN, json.dumps([self._run, self._adopted]))

    def hear(self) -> None:
        """In a replacement: read what :meth:`take_up` has written, if this attempt began with a checkpoint."""
        if self._run or not self._store().check([_RUN]):
            return
        try:
            self._run, self._adopted = decode(self._store().get(_RUN), tuple[Name, str], _RUN)
        except DamagedRecord as error:
            self._fatal_actions.give_up(error)

    def meta(self, boundary: StepBoundary) -> dict[str, Any]:
        env = self._env
        return lineage.meta_of(
            boundary.index,
            boundary.version,
            session=self.session,
            run=self.run,
            command=env.command,
            world_size=env.world_size,
            continues=env.config.continues,
            adopted=self._adopted,
            attempt=env.restart,
            job=env.job,
        )
