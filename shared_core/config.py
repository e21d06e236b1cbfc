"""Options of the suite: from code, a YAML or JSON file, or ``SWIFT_RECOVERY_*`` in the environment."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shared_core.errors import ConfigError, MissingExtra
from shared_core.kinds import MOST, Choice, Kind, Number, Place, Truth, Whole, open_regular

ENV_PREFIX = "SWIFT_RECOVERY_"
_SECONDS, _ABOVE, _COUNT = Number(), Number(above=True), Whole()
_KINDS: dict[str, Kind] = {
    "on_failure": Choice(("replace", "reroute", "shrink", "restart")),
    "data_policy": Choice(("exact", "drop")),
    "data": Choice(("refetch", "seeded")),
    "preimages": Choice(("auto", "always", "never")),
    "log_messages": Choice(("auto", "always", "never")),
    "randomness": Choice(("stock", "seeded")),
    "parallel_replay": Choice(("auto", "always", "never")),
    "replay_sums": Choice(("ordered", "slices")),
    "reroute_plan": Choice(("staggered", "decoupled", "coupled")),
    "reduction": Choice(("sum", "ordered")),
    "checkpoint_policy": Choice(
        ("auto", "fixed", "value", "young", "daly", "exact", "checkfreq", "coci", "coci_literal")
    ),
    "resume": Choice(("auto", "always", "never")),
    "replace_timeout_s": _SECONDS,
    "rejoin_after_s": _SECONDS,
    "grow_after_s": _SECONDS,
    "checkpoint_dir": Place("a folder or a URL"),
    "checkpoint_every_steps": _COUNT,
    "checkpoint_price": Number(most=1e300),
    "checkpoint_history": Place("a file"),
    "checkpoint_async": Truth(),
    "checkpoint_keep": Whole(2),
    "checkpoint_quota_bytes": _COUNT,
    "resume_from": Place("a folder or a URL"),
    "wait_timeout_s": _ABOVE,
    "progress_timeout_s": _ABOVE,
    "connect_timeout_s": _ABOVE,
    "verify_checksums": Truth(),
    "log_spill_bytes": _COUNT,
    "seed": Whole(-MOST - 1),
    "reroute_ahead": _COUNT,
    "log_groups": Place("worker, machine, auto, plan or ranges of ranks such as 0-3,4-7"),
    "log_budget_bytes": _COUNT,
    "log_dir": Place("a folder"),
    "log_ring_bytes": _COUNT,
    "log_segment_bytes": _COUNT,
    "log_recoveries": Truth(),
}
#: Options that say how checkpoints are made; a script may give them to workers that run already.
CHECKPOINT_OPTIONS = frozenset(
    {
        "checkpoint_dir",
        "checkpoint_every_steps",
        "checkpoint_policy",
        "checkpoint_price",
        "checkpoint_history",
        "checkpoint_async",
        "checkpoint_keep",
        "checkpoint_quota_bytes",
        "resume",
        "resume_from",
    }
)
#: Options that a script may say alone: a launcher and workers that run already need not know them before.
SCRIPT_OPTIONS = CHECKPOINT_OPTIONS | {"data", "seed", "log_recoveries"}
#: Variables with the prefix that the agent sets for its workers; they are no options.
_RESERVED = frozenset(
    {
        "JOB_DIR",
        "STORE",
        "GENERATION",
        "INCARNATION",
        "EVENTS",
        "CONFIG",
        "RESTART",
        "RESIZED",
        "RUN",
        "FILE",
        "ADDRESS",
        "MACHINES",
        "JOB",
        "COMMAND",
        "HANDED_OVER",
        "SECRET_FILE",
    }
)


@dataclass(frozen=True)
class SwiftConfig:
    """What a user may set.

    Attributes:
        on_failure: ``replace`` (a newcomer takes the lost rank's place), ``reroute`` (the others compute its share of
            each step until a newcomer is let in), ``shrink`` (the others go on without it) or ``restart`` (all workers
            reload the newest checkpoint).
        rejoin_after_s: with ``reroute``, the newcomer is started so many seconds after the loss; 0 starts it at once.
        replace_timeout_s: with ``replace``, shrink when nobody has taken the place after so many seconds; 0 waits on.
        grow_after_s: seconds after which the places of workers that were lost on a living machine are filled again,
            with ``shrink``; 0 leaves them empty. A machine that joins is let in at once.
        data_policy: what becomes of a lost worker's rest of the pass over the data when the number of workers changes:
            ``exact`` deals it out, ``drop`` leaves it out.
        data: how a newcomer regains its place in the data: ``refetch`` reads skipped items again, ``seeded`` makes
            an item's
            randomness a function of seed, rank, epoch and batch, so that skipping costs nothing.
        preimages: keep parameters as they were before each update of a batch, ``auto`` where a batch has several
            updates; and parameters and optimizer state as they were at batch tops, ``auto`` once the script changes
            them outside updates, ``always`` from the start.
        checkpoint_dir: where checkpoints for ``restart`` are written, a folder or an fsspec URL; none is written when
            unset.
        checkpoint_every_steps: batch tops between two checkpoints, for the policy ``fixed``.
        checkpoint_policy: when checkpoints are made: ``fixed``, or measured and calculated by ``value``, ``young``,
            ``daly``, ``exact``, ``checkfreq``, ``coci`` or ``coci_literal``. ``auto``: ``fixed`` where
            ``checkpoint_every_steps`` is set, else ``value``.
        checkpoint_price: what a checkpoint costs beyond time, in units of the loss, for ``value``.
        checkpoint_history: file that tells how earlier runs ended, for ``value``; this run adds itself.
        checkpoint_async: training goes on while a checkpoint is written; otherwise it waits until it is committed.
        checkpoint_keep: committed checkpoints of a run that stay, at least 2.
        checkpoint_quota_bytes: most that they may take together; 0 is no limit.
        resume: begin with the newest checkpoint that an earlier start of the same command has left: ``auto`` with
            ``on_failure="restart"``, ``always``, ``never``.
        resume_from: begin with this checkpoint, whatever command has made it: the folder of one, or a folder of
            checkpoints, of which the newest whole one is taken. Once there are checkpoints of the job that has begun
            so, its next start goes on with those.
        wait_timeout_s: longest wait for a peer or newcomer in a recovery, in seconds; also of ranks that wait for each
            other after one. The job ends then.
        progress_timeout_s: a worker that makes no progress outside collectives for so long is replaced, in seconds.
        connect_timeout_s: longest time to connect the sockets of a new generation, in seconds.
        verify_checksums: publish input checksums and compare replicas after each recovery.
        log_spill_bytes: log memory above which results are spilled to disk, in bytes; 0 derives it from the
            gradient's size.
        seed: seed of ``data="seeded"`` and ``randomness="seeded"``.
        randomness: random numbers in pipeline stages: ``stock``, in the order of the program, or ``seeded``, made of
            seed, step, micro-batch and layer, so that a micro-batch can be computed anywhere.
        parallel_replay: survivors compute a part of what a newcomer replays: ``auto`` where it pays. Needs
            ``randomness="seeded"``.
        reroute_plan: with ``reroute``, how peers of a lost stage fit its micro-batches in: ``coupled`` with whole
            backwards, ``decoupled`` with input gradients first and weight gradients later, ``staggered`` also with each
            stage's update as soon as its own gradients are complete.
        reduction: with ``reroute``, gradients are added as they come (``sum``), or those of each data-parallel index
            apart and then by index (``ordered``): the same bits, whoever computes them.
        reroute_ahead: with ``reroute``, plans for so many further losses lie ready; 0 makes each when it is needed.
        replay_sums: gradients of a shared replay are added by micro-batch in their order (``ordered``, bitwise) or by
            worker (``slices``, less to move, equal up to rounding).
        log_messages: log what pipeline stages send each other to disk: ``auto`` where a stage has no replica.
        log_groups: ranks that start again together, so that messages between them need no log: ``worker`` (each alone),
            ``machine``, ``auto`` (by machine where there are several), ranges of ranks, as ``0-3,4-7``, or ``plan``
            (the grouping with the shortest replay within ``log_budget_bytes``, from measured times).
        log_budget_bytes: what the logs of all machines may take between two checkpoints, for ``plan``; 0 is no limit.
        log_dir: parent of the folder for these logs; that of temporary files when unset.
        log_ring_bytes: so many bytes may wait for the disk before a stage waits for it.
        log_segment_bytes: size of a file of these logs, which are dropped file by file.
        log_recoveries: under Lightning, give the script's loggers a row for each recovery.
    """

    on_failure: str = "replace"
    replace_timeout_s: float = 0.0
    rejoin_after_s: float = 0.0
    grow_after_s: float = 60.0
    data_policy: str = "exact"
    data: str = "refetch"
    preimages: str = "auto"
    checkpoint_dir: str | None = None
    checkpoint_every_steps: int = 0
    checkpoint_policy: str = "auto"
    checkpoint_price: float = 0.0
    checkpoint_history: str | None = None
    checkpoint_async: bool = True
    checkpoint_keep: int = 2
    checkpoint_quota_bytes: int = 0
    resume: str = "auto"
    resume_from: str | None = None
    wait_timeout_s: float = 300.0
    progress_timeout_s: float = 300.0
    connect_timeout_s: float = 5.0
    verify_checksums: bool = True
    log_spill_bytes: int = 0
    seed: int = 0
    randomness: str = "stock"
    parallel_replay: str = "auto"
    replay_sums: str = "ordered"
    reroute_plan: str = "staggered"
    reduction: str = "sum"
    reroute_ahead: int = 1
    log_messages: str = "auto"
    log_groups: str = "auto"
    log_budget_bytes: int = 0
    log_dir: str | None = None
    log_ring_bytes: int = 256 << 20
    log_segment_bytes: int = 64 << 20
    log_recoveries: bool = False

    def __post_init__(self) -> None:
        for option in fields(self):
            given = getattr(self, option.name)
            try:
                object.__setattr__(self, option.name, _KINDS[option.name].read(given))
            except ValueError as error:
                raise ConfigError(f"{option.name} {error}") from None
        ranges_of(self.log_groups)
        if self.checkpoint_policy == "fixed" and not self.checkpoint_every_steps:
            raise ConfigError("checkpoint_policy='fixed' needs checkpoint_every_steps")
        if self.checkpoint_policy not in ("auto", "fixed") and self.checkpoint_every_steps:
            raise ConfigError(
                f"checkpoint_policy={self.checkpoint_policy!r} finds the interval: leave checkpoint_every_steps out"
            )
        if self.resume_from and self.resume == "never":
            raise ConfigError("resume_from names the checkpoint to begin with, resume='never' none: leave one out")
        if self.on_failure == "reroute" and self.replace_timeout_s:
            raise ConfigError(
                "on_failure='reroute' never changes the number of workers: leave replace_timeout_s out, or choose "
                "on_failure='replace'"
            )

    @property
    def resizes(self) -> bool:
        """Whether the number of workers may change."""
        return self.on_failure == "shrink" or (self.on_failure == "replace" and self.replace_timeout_s > 0)

    @property
    def changed(self) -> dict[str, Any]:
        """The options that are not as they are by default."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @property
    def policy(self) -> str:
        """By which policy checkpoints are made; ``none`` where none are."""
        if self.checkpoint_dir is None:
            return "none"
        if self.checkpoint_policy != "auto":
            return self.checkpoint_policy
        return "fixed" if self.checkpoint_every_steps else "value"

    @property
    def continues(self) -> bool:
        """Whether a job begins with what an earlier start of the same command has left, or with what it was told to."""
        wanted = self.resume == "always" or (self.resume == "auto" and self.on_failure == "restart")
        return self.checkpoint_dir is not None and (wanted or bool(self.resume_from))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SwiftConfig:
        """Build from plain data, as read from YAML, JSON or a ``swift_recovery`` section.

        Raises:
            ConfigError: for an unknown option (with the closest known name) or a bad value.
        """
        for name in values:
            if name not in _KINDS:
                known = [option.name for option in fields(cls)]
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known options: {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}{hint}")
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> SwiftConfig:
        """Read a ``.json`` or YAML file.

        Raises:
            ConfigError: if it cannot be read or holds an unknown option.
            MissingExtra: for YAML when PyYAML is not installed.
        """
        values = _read(Path(path))
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, base: SwiftConfig | None = None) -> SwiftConfig:
        """Options from ``SWIFT_RECOVERY_<OPTION>``, over ``SWIFT_RECOVERY_FILE``, over ``SWIFT_RECOVERY_CONFIG``
        (set by the launcher), over ``base``.
        """
        env = os.environ if env is None else env
        values: dict[str, Any] = asdict(base) if base is not None else {}
        if ENV_PREFIX + "CONFIG" in env:
            values |= _parse(env[ENV_PREFIX + "CONFIG"], ENV_PREFIX + "CONFIG", is_json=True)
        if ENV_PREFIX + "FILE" in env:
            values |= _read(Path(env[ENV_PREFIX + "FILE"]))
        for key, value in env.items():
            if key.startswith(ENV_PREFIX) and key.removeprefix(ENV_PREFIX) not in _RESERVED:
                values[key.removeprefix(ENV_PREFIX).lower()] = value
        return cls.from_dict(values)

    def to_json(self) -> str:
        """Inverse of ``from_dict(json.loads(...))``: the options that are not as they are by default, so that what the
        launcher was not told can be said in code.
        """
        return json.dumps(self.changed)


def ranges_of(groups: str) -> list[range]:
    """The ranges of ranks in ``log_groups``, none where it is a word.

    Raises:
        ConfigError: it is neither, or a rank is in two ranges.
    """
    if not isinstance(groups, str):
        raise ConfigError("log_groups must be worker, machine, auto, plan or ranges of ranks such as 0-3,4-7, not None")
    found: list[range] = []
    for part in () if groups in ("auto", "plan", "worker", "machine") else groups.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        ranks = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not ranks:
            raise ConfigError(
                f"log_groups={groups!r}: {part!r} is no range of ranks; write for example 0-3,4-7, or worker, machine, "
                "auto or plan"
            )
        if any(ranks.start < other.stop and other.start < ranks.stop for other in found):
            raise ConfigError(f"log_groups={groups!r}: {part!r} names a rank of another group")
        found.append(ranks)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            text = file.read().decode()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be a YAML or JSON file of options: it is no text") from error
    return _parse(text, str(path), is_json=path.suffix == ".json")


def _parse(text: str, source: str, *, is_json: bool) -> dict[str, Any]:
    try:
        loaded = json.loads(text) if is_json else _parse_yaml(text, source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} must hold options as YAML or JSON: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{source} must hold a mapping of options, not {type(loaded).__name__}")
    return loaded


def _parse_yaml(text: str, source: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra(
            f"reading {source} needs PyYAML: pip install 'swift-recovery[lightning]', or use a .json file"
        ) from error
    try:
        return yaml.safe_load(text)
    # What its constructors raise for "!!bool x", "!!int ''" and "!!timestamp x" is no YAMLError.
    except (yaml.YAMLError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{error}") from error
