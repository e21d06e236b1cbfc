"""Which run the checkpoints of an attempt belong to, and what the attempt may begin with."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shared_core.checkpoint import lineage
from shared_core.checkpoint.run_lock import WAIT_S, RunLock
from shared_core.checkpoint.spool import Spool
from shared_core.checkpoint.storage import absolute, open_storage
from shared_core.codec import Name, decode, text
from shared_core.errors import DamagedRecord, RunInUse, SwiftError, Unsupported
from shared_core.events import console
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.system import secret
from shared_core.transport.store import Store
from shared_core.worker.checkpoints import recovery_line, resharding
from shared_core.worker.checkpoints.recovery_line import Line, Restored
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


#: What adopts a checkpoint where there is no command line of ours.
BY_OPTION = "the option checkpoint.resume_from"


class Origins:
    """Checkpoints of attempts and starts before this one. ``store`` makes a client below the attempt's prefix."""

    def __init__(
        self, env: WorkerEnv, where: str, spool: Spool, store: Callable[[], Store], session: Callable[[], str]
    ) -> None:
        self._env, self._where, self._spool, self._store, self._session = env, where, spool, store, session
        self._held: dict[str, RunLock] = {}

    @property
    def told(self) -> str:
        """Where the checkpoint lies that the job was told to begin with; empty for none."""
        return absolute(self._env.config.checkpoint.resume_from) if self._env.config.checkpoint.resume_from else ""

    def choose(self, limit_s: float | None) -> Restored | None:
        """The checkpoint that this attempt begins with, read by all ranks; None for none. All ranks call this.
        ``limit_s``: longest wait for other ranks, in seconds; None for ``wait_timeout_s``.

        Raises:
            WaitTimeout: if a rank does not come.
            Unsupported: if all there are were made by other numbers of workers and this number cannot continue from
                them; if there is none where it was told to look.
            NoUsableCheckpoint: if there are some of its own, and none can be used.
            RunInUse: if another job continues with its newest run.
        """
        found, there = self._own()
        stored = [each for each in found if each.tier == recovery_line.STORAGE]
        if stored:
            self._hold(max(stored, key=lambda each: each.preference).run)
        if self.told:
            found = [each for each in found if each.meta.get("adopted") == self.told]
            found += recovery_line.to_adopt(self.told, needed=not found)
        loaded = recovery_line.agree(
            self._env, self._store(), found, lambda line: resharding.load(line, self._env), limit_s
        )
        line = loaded.line if loaded is not None else None
        if line is not None and not line.adopts:
            self._hold(line.run)
        passed = there.unusable(self._env.command.key)
        if not self._env.rank and not self._env.incarnation:
            lineage.tell_passed(passed, line.saved if line is not None else None)
        if loaded is None and self.told:
            raise Unsupported(f"checkpoint.resume_from: no checkpoint at {self.told} can be read on every rank")
        unusable = sum(each.tier == recovery_line.STORAGE for each in found) + sum(bool(each.run) for each in passed)
        if (
            loaded is None and unusable and not self._env.incarnation
        ):  # later there is what this attempt has made itself
            raise lineage.none_usable(self._where, unusable, f"rank {self._env.rank}: ")
        return loaded

    def adopted(self, line: Line) -> str:
        """Text for the user about an adopted checkpoint. Empty in all ranks but the first, and in replacements."""
        if line.saved is None or not line.adopts or self._env.rank or self._env.incarnation:
            return ""
        return f"begins with step {line.step} at {line.saved.path}, of '{line.saved.command.short}'"

    def left_behind(self) -> str:
        """Text for the user: why this attempt starts from scratch although there are checkpoints. Empty if there are
        none, and in all but rank 0 of the first attempt.
        """
        env = self._env
        first = env.restart <= int(len(env.machines) > 1)  # several machines count on from an attempt before
        if env.rank or env.incarnation or not first:
            return ""
        how, again = ("--resume-from", "--resume") if not env.handed_over else (BY_OPTION, "checkpoint.resume='always'")
        return lineage.left_behind(self._where, env.command.key, how, continues=env.config.continues, again=again)

    def _hold(self, run: str) -> None:
        """Lock a run against other jobs: rank 0 only, no replacements. Raises RunInUse; storage errors are printed."""
        env = self._env
        if env.rank or env.incarnation or run in self._held:
            return
        folder = lineage.folder_of(self._where, env.command, run)
        try:
            lock = RunLock(open_storage(folder), env.job)
            lock.take(WAIT_S)
            self._spool.claim(folder, env.job)
        except RunInUse:
            raise
        except (OSError, SwiftError) as error:  # the writer tries again before it writes
            console(f"{folder} cannot be locked against other jobs: {error}")
        else:
            self._held[run] = lock

    def _own(self) -> tuple[list[Line], lineage.Contents]:
        """What it may continue from; and what the storage holds, empty if it continues no earlier start."""
        env = self._env
        found: list[Line] = []
        if env.machines:
            found += recovery_line.at_neighbours(env.machines, env.rank, env.world_size, secret.of_job(env.job_dir))
        found += recovery_line.in_memory(self._spool, env.rank, env.world_size)
        there = lineage.read(self._where, env.command.key, (lambda line: None) if env.rank else console)
        stored = recovery_line.in_storage(there)
        if env.resized is not None:  # what was handed on is at least as new as any of another number of workers
            stored = [each for each in stored if each.world_size == env.world_size]
        mine = [each for each in (*found, *stored) if self._before(each, there)]
        return mine, there if env.config.continues else lineage.Contents()

    def _before(self, line: Line, there: lineage.Contents) -> bool:
        """Whether this attempt may begin with it: another one made it, of this job or of a run that it continues."""
        meta, env = line.meta, self._env
        if line.session == self._session() or meta.get("command") != env.command.key or not line.world_size:
            return False
        if meta.get("job") == env.job:
            return True
        return env.config.continues and there.continues(line.run, env.command.key)
