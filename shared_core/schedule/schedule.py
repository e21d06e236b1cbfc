"""Schedules as data: what each worker computes in one iteration, in which order.

The notation is that of ``torch.distributed.pipelining``: stage, kind, micro-batch, as in ``2F0``. A micro-batch belongs
to its *home* pipeline and has an index in it; where a worker of another pipeline computes it, the home is added:
``2F0@1`` is the forward of micro-batch 0 of pipeline 1 at stage 2. ``2OPT`` is the optimizer step of stage 2. All
indices count from zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shared_core.errors import ConfigError, InvalidSchedule

_ACTION = re.compile(r"([0-9]{1,9})(?:(OPT)|([FIWB])([0-9]{1,9})(?:@([0-9]{1,9}))?)")
_WORKER = re.compile(r"W([0-9]{1,9})_([0-9]{1,9})")


class Kind(StrEnum):
    """What an action computes; the letters of ``torch.distributed.pipelining``, and the optimizer step."""

    F = "F"  # forward
    I = "I"  # gradient of the input, which the stage before waits for  # noqa: E741
    W = "W"  # gradient of the weights, which nobody waits for but the optimizer
    B = "B"  # both at once
    OPT = "OPT"


class PlannedWorker(NamedTuple):
    """A place in the job: data-parallel index and pipeline stage. Its text form is ``W1_2``."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"W{self.pipeline}_{self.stage}"


class Action(NamedTuple):
    """One thing that a worker computes.

    Attributes:
        micro_batch: index in its home pipeline; -1 for ``OPT``.
        pipeline: the home pipeline of the micro-batch; for ``OPT`` that of the worker.
    """

    stage: int
    kind: Kind
    micro_batch: int
    pipeline: int

    def text(self, worker: PlannedWorker | None = None) -> str:
        """As text; ``@`` and the home pipeline are left out where it is ``worker``'s own."""
        if self.kind is Kind.OPT:
            return f"{self.stage}OPT"
        text = f"{self.stage}{self.kind.value}{self.micro_batch}"
        return text if worker is not None and worker.pipeline == self.pipeline else f"{text}@{self.pipeline}"

    def __str__(self) -> str:
        return self.text()


def parse_action(text: str, worker: PlannedWorker) -> Action:
    """Reverse of ``Action.text(worker)``. Raises InvalidSchedule where it is not an action."""
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise InvalidSchedule(f"{text!r} in the row of {worker} is not an action; it must look like 2F0, 2W0@1 or 2OPT")
    stage, optimizer, kind, index, pipeline = match.groups()
    if optimizer:
        return Action(int(stage), Kind.OPT, -1, worker.pipeline)
    return Action(int(stage), Kind(kind), int(index), worker.pipeline if pipeline is None else int(pipeline))


@dataclass(frozen=True)
class Topology:
    """Shape of a job: data-parallel pipelines, stages of each, micro-batches of each in one iteration."""

    pipelines: int
    stages: int
    micro_batches: int

    def __post_init__(self) -> None:
        for name in ("pipelines", "stages", "micro_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")

    def workers(self) -> list[PlannedWorker]:
        """All places, pipeline by pipeline."""
        return [PlannedWorker(d, s) for d in range(self.pipelines) for s in range(self.stages)]


@dataclass(frozen=True)
class Schedule:
    """One row of actions, in order, for every worker that takes part."""

    rows: Mapping[PlannedWorker, tuple[Action, ...]]

    def to_text(self) -> dict[str, list[str]]:
        """Plain data for JSON: ``{"W0_0": ["0F0", ...], ...}``."""
        return {str(worker): [action.text(worker) for action in row] for worker, row in self.rows.items()}

    @classmethod
    def from_text(cls, rows: Mapping[str, Iterable[str]]) -> Schedule:
        """Reverse of ``to_text``. Raises InvalidSchedule where a name is not a worker, or an entry not an action."""
        found = {}
        for name, row in rows.items():
            match = _WORKER.fullmatch(name)
            if match is None:
                raise InvalidSchedule(f"{name!r} is not a worker; it must look like W1_2 (pipeline, stage)")
            worker = PlannedWorker(int(match[1]), int(match[2]))
            found[worker] = tuple(parse_action(text, worker) for text in row if text.strip())
        return cls(found)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {' '.join(row)}" for name, row in self.to_text().items())


def held_without_failure(topology: Topology, stage: int) -> int:
    """The most micro-batches that a worker of a stage holds at once under 1F1B."""
    return min(topology.stages - stage, topology.micro_batches)


def one_f_one_b(topology: Topology) -> Schedule:
    """The plan without a failure: 1F1B, in which stage s starts with (stages - s) forwards."""
    count, rows = topology.micro_batches, {}
    for worker in topology.workers():
        d, s = worker
        warm = held_without_failure(topology, s)
        row = [Action(s, Kind.F, j, d) for j in range(warm)]
        for j in range(count):
            row.append(Action(s, Kind.B, j, d))
            if j + warm < count:
                row.append(Action(s, Kind.F, j + warm, d))
        rows[worker] = (*row, Action(s, Kind.OPT, -1, d))
    return Schedule(rows)
