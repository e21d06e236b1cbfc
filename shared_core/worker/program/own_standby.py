"""The worker's own hot standby: a copy of its process, forked where the script comes to its loop.

The copy has what the script has made up to there, and waits in the call that made it. When the worker fails, it makes
another copy of itself, becomes the replacement, and continues in the script as any replacement does. So the script's
start runs once, in rank 0 too.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable

import torch

from shared_core.events import EventLog
from shared_core.faults import inject
from shared_core.protocol import worker_env
from shared_core.protocol.preparing import LEAST_STARTUP_S, Forkable, Measured, why_not
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.system import process
from shared_core.system.process import machine_bytes, private_bytes, set_title
from shared_core.worker.comm import Runtime
from shared_core.worker.program.options import ProgramOptions
from shared_core.worker.program.trained import Trained
from shared_core.worker.recovery import forked
from shared_core.worker.recovery.start_point import WorkerStart
from shared_core.worker.start import hot_standby


class OwnStandby:
    """Makes the copies of one worker. ``begin_again`` makes the parts of a copy those of a hot standby."""

    def __init__(
        self,
        runtime: Runtime,
        start: WorkerStart,
        trained: Trained,
        options: ProgramOptions,
        events: EventLog,
        begin_again: Callable[[WorkerEnv], None],
    ) -> None:
        self._runtime, self._start, self._trained, self._options = runtime, start, trained, options
        self._events, self._begin_again = events, begin_again
        self._asked = False

    def make(self) -> None:
        """The script is at a place where a replacement would wait for its failed worker's. In a copy, this returns
        when it is the replacement. Later calls do nothing.
        """
        if self._asked or self._start.start_point.spare.waits:
            return
        self._asked = True
        startup_s, config, agent = time.time() - process.begun(), self._options.env.config, os.getppid()
        if startup_s < LEAST_STARTUP_S or config.standby.prepared != "auto":
            return
        if reason := why_not(config, self._look(startup_s, agent)):
            self._tell(f"the worker makes no copy of itself: {reason}")
            return
        forked.flush()
        generation = None
        while self._fork(agent):
            generation = self._wait()
        if generation is not None:
            self._start.start_point.take_place(generation)

    def may_leave(self) -> bool:
        """Whether a copy of this worker can continue where it is, at a step boundary."""
        config, why = self._options.env.config, ""
        if config.checkpoint.dir is not None or config.resizes:
            why = "it makes checkpoints, or the number of workers may change"
        elif process.children():
            why = "it has child processes"
        if why := why or why_not(config, self._look(time.time() - process.begun(), os.getppid())):
            self._tell(f"a worker that leaves makes no copy of itself: {why}")
        return not why

    def copy(self) -> bool:
        """Fork this worker; True in the copy, once it is the replacement and knows its generation."""
        drawn = random.getstate()
        if not self._fork(os.getppid()):
            return False
        random.setstate(drawn)  # Python seeds it anew in each fork
        generation = self._wait()  # the start point after it is another one
        self._start.start_point.take_place(generation)
        return True

    def _look(self, startup_s: float, agent: int) -> Forkable:
        env, environ = self._options.env, os.environ
        store = f"{environ.get('MASTER_ADDR', '')} {environ.get('MASTER_PORT', '')}"
        known = {*self._runtime.addresses, store, f"pid {agent}"}
        return Forkable(
            workers=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            machines=max(1, len(env.machines)),
            compute_threads=torch.get_num_threads(),
            threads=forked.other_threads(),
            files=forked.other_files(env.job_dir, known),
            unfit=self._unfit(),
            measured=Measured(startup_s, private_bytes(os.getpid()), *machine_bytes()),
        )

    def _unfit(self) -> str:
        if torch.accelerator.is_available():
            return "there is a device, whose driver does not survive a fork"
        if self._trained.shard is not None or self._trained.replicas:
            return "of a sharded model, or a pipeline, this rank has a part that not all have"
        return ""

    def _fork(self, agent: int) -> bool:
        with self._runtime.lock:  # what it guards is whole in the copy
            return forked.fork(agent)

    def _wait(self) -> int:
        """In a copy: be a hot standby, until there is a place."""
        env = self._options.begin_again(self._options.env.incarnation + 1)
        os.environ[worker_env.INCARNATION], os.environ[worker_env.SPARE] = str(env.incarnation), "1"
        inject.arm_from_env()
        hot_standby.begin()
        set_title(f"standby of rank {env.rank}", sys.argv[0], sys.argv[1:])
        self._begin_again(env)
        return self._start.start_point.await_place()

    def _tell(self, reason: str) -> None:
        rank, generation = self._options.env.rank, self._runtime.generation
        self._events.emit("preparing", rank=rank, generation=generation, number=0, reason=reason)
