"""Options that the script gives, beside those that the launcher was told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shared_core.config import CHECKPOINT_OPTIONS, SCRIPT_OPTIONS, SwiftConfig, full_names, variable_of
from shared_core.errors import ConfigError
from shared_core.handover import NOT_TOLD
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.comm import Runtime
from shared_core.worker.link import wish
from shared_core.worker.recovery.start_point import WorkerStart


class ProgramOptions:
    """The options of one worker. ``env`` holds those that apply, also after :meth:`use_checkpoints`."""

    def __init__(self, env: WorkerEnv, runtime: Runtime, start: WorkerStart) -> None:
        self.env, self._runtime, self._start = env, runtime, start
        self._told = env.config.changed

    def begin_again(self, incarnation: int) -> WorkerEnv:
        """Be the hot standby that becomes this incarnation of the rank; returns its environment."""
        self.env = replace(self.env, incarnation=incarnation, generation=0, spare=True)
        return self.env

    def check_told(self, options: Mapping[str, Any], *, late: bool = True) -> None:
        """See that options of the script which the whole job goes by were told to the launcher, whose values win.
        ``late``: the caller sees to those that a script may say alone. Raises ConfigError for one that was not told.
        """
        options = full_names(options)
        wanted = SwiftConfig.from_dict(options)
        for name in options.keys() - (SCRIPT_OPTIONS if late else set()) - self._told.keys():
            value = wanted.get(name)
            if value != self.env.config.get(name):
                raise ConfigError(f"rank {self.env.rank}: {name}={value!r}{NOT_TOLD.format(variable_of(name), value)}")

    def use_checkpoints(self, options: Mapping[str, Any]) -> None:
        """Switch on checkpoints that the script asks for and the launcher was not told of.

        All ranks call this, with the same, before there is a process group. Where the launcher was told the same, its
        options win and nothing happens. ``options``: of the script, by name; only those of ``CHECKPOINT_OPTIONS``
        count. Raises ConfigError for a bad value, or where training has begun.
        """
        wanted = {name: value for name, value in full_names(options).items() if name in CHECKPOINT_OPTIONS}
        config = self.env.config.merged(wanted, self._told)
        if config == self.env.config:
            return
        if self._runtime.world is not None or self._start.checkpoints.newest_boundary:
            raise ConfigError(
                f"rank {self.env.rank}: checkpoint options came after the process group was created: give them "
                "to the first Trainer or Accelerator (transformers: before TrainingArguments), or to swiftrun"
            )
        self.env = replace(self.env, config=config)
        self._start.use(self.env)
        wish({name: config.get(name) for name in sorted(CHECKPOINT_OPTIONS)}, self.env)
