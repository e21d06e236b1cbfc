"""What the launcher gives a worker, as variables of its environment. Cheap to import: no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shared_core.checkpoint.command import Command
from shared_core.codec import Count, Form, FramedRecord, OsText, fit
from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError, CorruptFile
from shared_core.events import JOB_DIR as JOB_DIR
from shared_core.events import RUN
from shared_core.plain_json import parse

STORE = "SWIFT_RECOVERY_STORE"
GENERATION = "SWIFT_RECOVERY_GENERATION"
INCARNATION = "SWIFT_RECOVERY_INCARNATION"
EVENTS = "SWIFT_RECOVERY_EVENTS"
CONFIG = "SWIFT_RECOVERY_CONFIG"
RESTART = "SWIFT_RECOVERY_RESTART"
ADDRESS = "SWIFT_RECOVERY_ADDRESS"
RESIZED = "SWIFT_RECOVERY_RESIZED"
MACHINES = "SWIFT_RECOVERY_MACHINES"
JOB = "SWIFT_RECOVERY_JOB"
COMMAND = "SWIFT_RECOVERY_COMMAND"
#: Set in a hot standby, until it takes the place of its rank.
SPARE = "SWIFT_RECOVERY_SPARE"
#: Set where a script was started directly and has become ``swiftrun``: its user gives no flags.
HANDED_OVER = "SWIFT_RECOVERY_HANDED_OVER"

#: File in a rank's folder: environment variables for its replacements.
_LEFT = "environment.json"
_VariableName = Annotated[str, Form(r"[^=\0]+", "the name of a variable")]


@dataclass(frozen=True)
class Resized(FramedRecord):
    """The attempt before, with another number of workers, that wrote its state. ``stay``: its ranks that continue."""

    attempt: Count
    world_size: Count
    stay: tuple[Count, ...]
    boundary: Count


@dataclass(frozen=True)
class WorkerEnv:
    """What the launcher told this worker.

    Attributes:
        generation: in which this worker starts; 0 for the first workers.
        incarnation: how many workers held the rank before.
        restart: number of whole-job restarts before this one; store keys are prefixed with it.
        job_dir: private folder of the job on this machine, in memory where possible.
        store: where the job's store is: path of the agent's socket, or name of the machine that has it.
        events: ``events.jsonl`` of the job, None when events are not written.
        slot: place of this machine, from 0.
        job: what checkpoints name as the job they belong to, equal on all machines.
        handed_over: the script was started directly, so its user gives ``swiftrun`` no flags.
        machines: who holds which place in the generation in which this worker starts; empty on one machine.
        resized: the attempt from which this one continues, if the number of workers has changed.
        run: id of this start of the job, equal on all machines and in all attempts.
        spare: this is a hot standby: the worker of the rank is alive, and ``generation`` is not known yet.
    """

    rank: int
    world_size: int
    generation: int
    incarnation: int
    restart: int
    job_dir: Path
    store: str
    events: Path | None
    config: SwiftConfig
    slot: int = 0
    job: str = ""
    command: Command = Command()
    handed_over: bool = False
    machines: tuple[str | None, ...] = ()
    resized: Resized | None = None
    run: str = ""
    spare: bool = False

    @property
    def prefix(self) -> str:
        """Prefix of every store key of this attempt, ``swift/{restart}/``."""
        return f"swift/{self.restart}/"

    @property
    def rank_dir(self) -> Path:
        return self.job_dir / f"rank{self.rank}"


def launched(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is a worker of ``swiftrun``."""
    return JOB_DIR in (os.environ if environ is None else environ)


def env(environ: Mapping[str, str] | None = None) -> WorkerEnv:
    """Parse the variables the launcher sets; raises ConfigError outside ``swiftrun``, or if they are damaged."""
    source = os.environ if environ is None else environ
    if JOB_DIR not in source:
        raise ConfigError(
            f"{JOB_DIR} is not set: this process was not started by swiftrun. Start it with: swiftrun SCRIPT ..."
        )
    try:
        return _parsed(source)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the variables that the launcher sets are damaged: {error!r}") from error


def _parsed(source: Mapping[str, str]) -> WorkerEnv:
    return WorkerEnv(
        rank=int(source["RANK"]),
        world_size=int(source["WORLD_SIZE"]),
        generation=int(source.get(GENERATION, "0")),
        incarnation=int(source.get(INCARNATION, "0")),
        restart=int(source.get(RESTART, "0")),
        job_dir=Path(source[JOB_DIR]),
        store=source[STORE],
        events=Path(source[EVENTS]) if source.get(EVENTS) else None,
        config=SwiftConfig.from_env(source),
        job=source.get(JOB, source[JOB_DIR]),
        command=Command.from_json(source.get(COMMAND, "")),
        handed_over=HANDED_OVER in source,
        slot=int(source.get("GROUP_RANK", "0")),
        machines=fit(parse(source.get(MACHINES) or "[]"), tuple[str | None, ...]),
        resized=Resized.from_json(source[RESIZED]) if source.get(RESIZED) else None,
        run=source.get(RUN, ""),
        spare=SPARE in source,
    )


def leave_environment(job_dir: Path, rank: int, variables: Mapping[str, str]) -> None:
    """Give the replacements of a rank these environment variables, where the user has not set them."""
    new = job_dir / f"rank{rank}" / (_LEFT + ".new")
    new.write_text(json.dumps(dict(variables)))
    new.replace(new.with_name(_LEFT))


def left_environment(job_dir: Path, rank: int) -> dict[str, str]:
    """What failed workers on this machine have left with :func:`leave_environment`; raises CorruptFile."""
    path = job_dir / f"rank{rank}" / _LEFT
    try:
        left: dict[str, str] = fit(parse(path.read_bytes()), dict[_VariableName, OsText])
        return left
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error
