"""The sections: one for each part of the product that has options.

They stand here, and not beside the parts, because the launcher reads all of them and imports none of the parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar

from shared_core.errors import ConfigError
from shared_core.kinds import Choice, Kind, NamedPlace, Number, Port, Truth, Whole, WholeOrAuto


def option(default: Any, kind: Kind, text: str, *, late: bool = False) -> Any:
    """A field of a section.

    Args:
        kind: what is allowed.
        text: what it means, in Markdown: the line of the options page.
        late: a script may say it alone: launcher and workers that run already need not know it before.
    """
    return field(default=default, metadata={"kind": kind, "text": text, "late": late})


@dataclass(frozen=True)
class Section:
    """Options that belong together. Reads its values as their kinds; what is wrong is a :class:`ConfigError`."""

    section: ClassVar[str]

    def __init_subclass__(cls, section: str = "") -> None:
        cls.section = section

    def __post_init__(self) -> None:
        for each in options_of(self):
            try:
                object.__setattr__(self, each.name, each.metadata["kind"].read(getattr(self, each.name)))
            except ValueError as error:
                raise ConfigError(f"{prefix_of(self)}{each.name} {error}") from None


def options_of(section: Section | type[Section]) -> Iterator[Field[Any]]:
    """The options of a section, without the sections inside."""
    return (each for each in fields(section) if "kind" in each.metadata)


def prefix_of(section: Section | type[Section]) -> str:
    """``checkpoint.``, before the names of a section's options; empty for those of no section."""
    return f"{section.section}." if section.section else ""


_SECONDS, _ABOVE, _COUNT = Number(), Number(above=True), Whole()
_USE = Choice(("auto", "always", "never"))


@dataclass(frozen=True)
class CheckpointOptions(Section, section="checkpoint"):
    """Checkpoints for a restart: where, when, and with which one a job begins."""

    dir: str | None = option(
        None,
        NamedPlace("a folder or a URL"),
        "where checkpoints for a restart are written: a folder, or an fsspec URL. Unset: none is written",
        late=True,
    )
    policy: str = option(
        "auto",
        Choice(("auto", "fixed", "value", "young", "daly", "exact", "checkfreq", "coci", "coci_literal")),
        "when checkpoints are made: `fixed`, or measured and calculated by `value`, `young`, `daly`, `exact`, "
        "`checkfreq`, `coci`, `coci_literal` ([checkpoints.md](checkpoints.md)). `auto`: `fixed` where `every_steps` "
        "is set, else `value`",
        late=True,
    )
    every_steps: int = option(0, _COUNT, "step boundaries between two checkpoints, for `fixed`", late=True)
    price: float = option(
        0.0, Number(most=1e300), "what a checkpoint costs beyond time, in units of the loss, for `value`", late=True
    )
    history: str | None = option(
        None,
        NamedPlace("a file"),
        "file that tells how earlier runs ended, for `value`; this run adds itself",
        late=True,
    )
    background: bool = option(
        True,
        Truth(),
        "training continues while a checkpoint is written; otherwise it waits until each is committed",
        late=True,
    )
    keep: int = option(2, Whole(2), "how many committed checkpoints of a run to keep, at least 2", late=True)
    quota_bytes: int = option(0, _COUNT, "most bytes that they may take together; 0 means no limit", late=True)
    resume: str = option(
        "auto",
        _USE,
        "begin with the newest checkpoint that an earlier start of the same command has left: `auto` with "
        '`on_failure="restart"`, `always`, `never`',
        late=True,
    )
    resume_from: str | None = option(
        None,
        NamedPlace("a folder or a URL"),
        "begin with this checkpoint, whatever command has made it: the folder of one, or a folder of checkpoints, of "
        "which the newest whole one is taken ([checkpoints.md](checkpoints.md#adopting-another-commands-checkpoint))",
        late=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy == "fixed" and not self.every_steps:
            raise ConfigError("checkpoint.policy='fixed' needs checkpoint.every_steps")
        if self.policy not in ("auto", "fixed") and self.every_steps:
            raise ConfigError(f"checkpoint.policy={self.policy!r} finds the interval: leave checkpoint.every_steps out")
        if self.resume_from and self.resume == "never":
            raise ConfigError(
                "checkpoint.resume_from names the checkpoint to begin with, checkpoint.resume='never' none: leave one "
                "out"
            )

    @property
    def chosen_policy(self) -> str:
        """The policy by which checkpoints are made; ``none`` where none are."""
        if self.dir is None:
            return "none"
        if self.policy != "auto":
            return self.policy
        return "fixed" if self.every_steps else "value"


@dataclass(frozen=True)
class ResizeOptions(Section, section="resize"):
    """A job whose number of workers changes."""

    replace_timeout_s: float = option(
        0.0,
        _SECONDS,
        "with `replace`: seconds after which the others continue without a failed worker whose place nobody has taken; "
        "0 keeps waiting",
    )
    grow_after_s: float = option(
        60.0,
        _SECONDS,
        "seconds after which the places of workers that failed are filled again, where the number of workers has "
        "become smaller; 0 leaves them empty. A machine that joins is admitted at once",
    )
    data: str = option(
        "exact",
        Choice(("exact", "drop")),
        "a failed worker's share of the data: `exact` gives the rest of it to the others, `drop` leaves it out",
    )


@dataclass(frozen=True)
class RerouteOptions(Section, section="reroute"):
    """``on_failure="reroute"``: the others compute a failed worker's share."""

    rejoin_after_s: float = option(
        0.0,
        _SECONDS,
        "seconds between a failure and the start of the replacement. Each one that is admitted costs the others a "
        "short stall",
    )
    reduction: str = option(
        "sum",
        Choice(("sum", "ordered")),
        "gradients are added as they come (`sum`), or those of each data-parallel index apart and then by index "
        "(`ordered`): the same bits, whoever computes them",
    )
    plan: str = option(
        "staggered",
        Choice(("staggered", "decoupled", "coupled")),
        "pipelines: how peers fit a failed stage's micro-batches in: with whole backwards (`coupled`), with input "
        "gradients first and weight gradients later (`decoupled`), and with each stage's update as soon as its own "
        "gradients are complete (`staggered`)",
    )
    ahead: int = option(
        1,
        _COUNT,
        "pipelines: for how many further failures plans are made in advance, in the background; 0 makes each plan when "
        "it is needed",
    )
    held_micro_batches: int = option(
        0,
        _COUNT,
        "pipelines: plans let a worker hold at most so many micro-batches between forward and backward, and never "
        "fewer than it holds without a failure; 0: as many as fit into half of the host's free memory, as measured",
    )
    normalise: bool = option(
        True,
        Truth(),
        "pipelines: where losses of one stage cost more than losses spread over stages would, survivors of other "
        "stages compute there, with a copy of its parameters and optimizer state",
    )


@dataclass(frozen=True)
class ReplayOptions(Section, section="replay"):
    """Pipelines without replicas: a replacement runs on from a checkpoint with logged messages."""

    parallel: str = option(
        "auto",
        _USE,
        "survivors compute a part of what a replacement replays: `auto` where it pays, `always`, `never`. Needs "
        '`randomness: "seeded"`',
    )
    sums: str = option(
        "ordered",
        Choice(("ordered", "slices")),
        "gradients of a shared replay are added by micro-batch in their order, bitwise (`ordered`), or by worker "
        "(`slices`): less to move, equal up to rounding",
    )
    randomness: str = option(
        "stock",
        Choice(("stock", "seeded")),
        "random numbers in the stages. `stock`: in the order of the program, as DeepSpeed's. `seeded`: a function of "
        "seed, step, micro-batch and layer, so that a micro-batch can be computed anywhere; other numbers than "
        "DeepSpeed's",
    )


@dataclass(frozen=True)
class LogOptions(Section, section="log"):
    """The message log, from which replacements and those that are behind are served."""

    spill_bytes: int = option(
        0, _COUNT, "log memory above which results go to disk; 0 derives it from the model's size"
    )
    messages: str = option(
        "auto",
        _USE,
        "pipelines: log what stages send each other to disk. `auto`: where a stage has no replica; `always`, `never`",
    )
    groups: str = option(
        "auto",
        NamedPlace("worker, machine, auto, plan or ranges of ranks such as 0-3,4-7"),
        "pipelines: ranks that start again together, so that messages between them need no log. `worker`: each alone; "
        "`machine`: those of a machine; `auto`: by machine where there are several; ranges of ranks, as `0-3,4-7`; or "
        "`plan`: the grouping with the shortest replay within the budget",
    )
    budget_bytes: int = option(
        0,
        _COUNT,
        "pipelines: what the files of all logs together may take at any time. Checkpoints are made more often, or with "
        "`groups: plan` groups are widened, so that they fit; 0 is no limit ([logs](pipelines.md#message-logs)). "
        "In other jobs: what the log of one rank may take while the loop gives no step boundary; 0 is 1 GiB",
    )
    dir: str | None = option(
        None,
        NamedPlace("a folder"),
        "pipelines: parent of the folder for these logs. Unset: the folder of temporary files",
    )
    ring_bytes: int = option(
        256 << 20, _COUNT, "pipelines: bytes that may wait for the disk before a stage waits for it"
    )
    segment_bytes: int = option(
        64 << 20, _COUNT, "pipelines: size of a file of these logs, which are dropped file by file"
    )
    recoveries: bool = option(
        False,
        Truth(),
        "Lightning: give the script's loggers a row with `swift/generation` and `swift/stall_s` for each recovery. In "
        "`metrics.csv` these are two more columns",
        late=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges_of(self.groups)


@dataclass(frozen=True)
class DetectionOptions(Section, section="detection"):
    """When a worker counts as failed, and how long others are waited for."""

    wait_timeout_s: float = option(
        300.0,
        _ABOVE,
        "longest wait for a peer or replacement in a recovery; after it the job ends and says whom it waited for "
        "([how_it_works.md](how_it_works.md#waits))",
    )
    progress_timeout_s: float = option(
        300.0,
        _ABOVE,
        "seconds without progress, outside collectives, after which a worker is replaced",
    )
    connect_timeout_s: float = option(5.0, _ABOVE, "longest time to connect the sockets of a new generation")


@dataclass(frozen=True)
class StateOptions(Section, section="state"):
    """What is kept and compared of the training state."""

    preimages: str = option(
        "auto",
        _USE,
        "what a worker keeps so that a replacement can compute exactly. `auto`: parameters before each update; "
        "parameters and optimizer state at step boundaries once the script [changes them outside "
        "updates](how_it_works.md#what-a-script-changes-by-itself). `always`: from the start. `never`",
    )
    overlapped_update: bool = option(
        False,
        Truth(),
        "the optimizer updates the parameters of a gradient bucket as soon as that is reduced, while others are still "
        "being reduced ([undo](design/undo.md#the-update-overlapped-with-communication))",
    )
    verify_checksums: bool = option(
        True,
        Truth(),
        "publish checksums of inputs, compare replicas after each recovery",
    )
    verify_every: int = option(
        0,
        _COUNT,
        "updates from one comparison of the replicas' state to the next, against silent corruption, under "
        "`DistributedDataParallel`; 1 heals it, 0 compares none ([how_it_works.md](how_it_works.md#silent-corruption))",
    )

    recompute_every: int = option(
        0,
        _COUNT,
        "updates from one batch that a copy of each worker computes again to the next, against wrong arithmetic, under "
        "`DistributedDataParallel`; 0: none ([how_it_works.md](how_it_works.md#silent-corruption))",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heals_corruption and not self.verify_checksums:
            name = "verify_every" if self.verify_every else "recompute_every"
            raise ConfigError(f"state.{name} needs state.verify_checksums: leave that at true")

    @property
    def heals_corruption(self) -> bool:
        """Whether a worker whose state or gradients are wrong is replaced before others have used them."""
        return bool(self.verify_every or self.recompute_every)


@dataclass(frozen=True)
class DeviceOptions(Section, section="device"):
    """Training on other devices than the CPU."""

    experimental: bool = option(
        False,
        Truth(),
        "allow tensors on GPUs. Collectives go through host memory, over gloo ([devices.md](devices.md))",
    )


@dataclass(frozen=True)
class StandbyOptions(Section, section="standby"):
    """Processes that are ready to take a failed worker's place."""

    prepared: int | str = option(
        "auto",
        WholeOrAuto(),
        "ranks of each machine for which a [hot standby](launching.md#hot-standbys) is prepared. `auto`: where the "
        "start-up takes 2 s or more, workers fork themselves instead; where they cannot, as many as memory allows, "
        "without rank 0",
    )


@dataclass(frozen=True)
class WatchOptions(Section, section="watch"):
    """Ports at which the launcher shows the running job."""

    dashboard: int | None = option(
        None,
        Port(),
        "port at 127.0.0.1 of a web page that shows the job; 0: a free one, which the console names "
        "([watching.md](watching.md#the-dashboard))",
    )
    metrics_port: int | None = option(
        None,
        Port(),
        "port of metrics for Prometheus, at `/metrics`; 0: a free one ([watching.md](watching.md#metrics))",
    )
    metrics_address: str = option(
        "127.0.0.1",
        NamedPlace("an address of this machine"),
        "where metrics are served: an address of this machine, or `0.0.0.0` for all of them",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metrics_address is None:
            raise ConfigError("watch.metrics_address must be an address of this machine, got None")


def ranges_of(groups: str) -> list[range]:
    """The ranges of ranks in ``log.groups``, none where it is a word; ConfigError if it is neither, or they overlap."""
    if not isinstance(groups, str):
        raise ConfigError("log.groups must be worker, machine, auto, plan or ranges of ranks such as 0-3,4-7, not None")
    found: list[range] = []
    for part in () if groups in ("auto", "plan", "worker", "machine") else groups.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        ranks = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not ranks:
            raise ConfigError(
                f"log.groups={groups!r}: {part!r} is not a range of ranks; write for example 0-3,4-7, or worker, "
                "machine, auto or plan"
            )
        if any(ranks.start < other.stop and other.start < ranks.stop for other in found):
            raise ConfigError(f"log.groups={groups!r}: {part!r} names a rank of another group")
        found.append(ranks)
    return found
