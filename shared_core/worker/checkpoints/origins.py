"""What an attempt may begin with: what its command has left, or what it was told to adopt; what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from shared_core.checkpoint import lineage
from shared_core.checkpoint.spool import Spool
from shared_core.checkpoint.storage import absolute
from shared_core.errors import SwiftError, Unsupported
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.system import secret
from shared_core.transport.store import Store
from shared_core.worker.checkpoints import recovery_line, resharding
from shared_core.worker.checkpoints.recovery_line import Line, Loaded

#: What adopts a checkpoint where there is no command line of ours.
BY_OPTION = "the option checkpoint.resume_from"


class Origins:
    """Checkpoints of attempts and starts before this one.

    Args:
        where: the folder of checkpoints.
        store: makes a client of the agents' store, below the attempt's prefix.
        session: gives the name of this attempt.
    """

    def __init__(
        self, env: WorkerEnv, where: str, spool: Spool, store: Callable[[], Store], session: Callable[[], str]
    ) -> None:
        self._env, self._where, self._spool, self._store, self._session = env, where, spool, store, session

    @property
    def told(self) -> str:
        """Where the checkpoint lies that the job was told to begin with; empty for none."""
        return absolute(self._env.config.checkpoint.resume_from) if self._env.config.checkpoint.resume_from else ""

    def choose(self, limit_s: float | None) -> Loaded | None:
        """The checkpoint that this attempt begins with, once all ranks have read it; None for none. It is adopted if
        its line says so.

        Args:
            limit_s: longest wait for other ranks, in seconds; None for ``wait_timeout_s``.

        Raises:
            WaitTimeout: if a rank does not come.
            Unsupported: if there are some, all of other numbers of workers, that this number cannot go on from; if
                there is nothing of what it was told to begin with.
        """
        found = self._own()
        if self.told:
            found = [each for each in found if each.meta.get("adopted") == self.told]
            found += recovery_line.to_adopt(self.told, needed=not found)
        loaded = recovery_line.agree(
            self._env, self._store(), found, lambda line: resharding.load(line, self._env), limit_s
        )
        if loaded is None and self.told:
            raise Unsupported(f"checkpoint.resume_from: no checkpoint at {self.told} can be read on every rank")
        return loaded

    def adopted(self, line: Line) -> str:
        """What is said of a checkpoint that was adopted; empty in all ranks but the first, and for newcomers."""
        if not line.adopts or self._env.rank or self._env.incarnation:
            return ""
        return f"begins with step {line.step} at {line.adopts}, of '{lineage.command_of(line.meta).short}'"

    def left_behind(self) -> str:
        """Why this attempt starts from scratch, although there are checkpoints; empty if there are none, and in all
        ranks and attempts but the first.
        """
        env = self._env
        first = env.restart <= int(len(env.machines) > 1)  # several machines count on from an attempt before
        if env.rank or env.incarnation or not first:
            return ""
        how, again = ("--resume-from", "--resume") if not env.handed_over else (BY_OPTION, "checkpoint.resume='always'")
        return lineage.left_behind(self._where, env.command.key, how, goes_on=env.config.continues, again=again)

    def _own(self) -> list[Line]:
        env = self._env
        found: list[Line] = []
        if env.machines:
            found += recovery_line.at_neighbours(env.machines, env.rank, env.world_size, secret.of_job(env.job_dir))
        found += recovery_line.in_memory(self._spool, env.rank, env.world_size)
        stored = recovery_line.in_storage(self._where, None, env.command.key)
        if env.resized is not None:  # what was handed on is at least as new as any of another number of workers
            stored = [each for each in stored if each.world_size == env.world_size]
        ended = self._ended()
        return [each for each in (*found, *stored) if self._before(each, ended)]

    def _before(self, line: Line, ended: frozenset[str]) -> bool:
        """Whether this attempt may begin with it."""
        meta, env = line.meta, self._env
        if line.session == self._session() or meta.get("command") != env.command.key or not line.world_size:
            return False
        if meta.get("job") == env.job:
            return True
        return env.config.continues and lineage.goes_on(line.run, ended)

    def _ended(self) -> frozenset[str]:
        with suppress(OSError, SwiftError):  # said where checkpoints are listed
            return frozenset().union(*(each.ended() for each in lineage.folders(self._where, self._env.command.key)))
        return frozenset()
