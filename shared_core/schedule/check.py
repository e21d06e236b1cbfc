"""Refuses a schedule that cannot be executed, and names the action."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shared_core.errors import ConfigError, InvalidSchedule
from shared_core.schedule.schedule import Action, Kind, Schedule, Topology, Worker
from shared_core.schedule.timing import Slot, Times, simulate

#: Two times closer than this, relative to the larger, are the same.
_SAME = 1e-9


@dataclass(frozen=True)
class Memory:
    """How many micro-batches a worker can hold at once.

    Attributes:
        micro_batches: at every worker; None is no limit.
        workers: of workers that differ.
        stash: what a micro-batch takes between I and W, in parts of what it takes from F to I. torch keeps all
            activations until W: 1.
    """

    micro_batches: float | None = None
    workers: Mapping[Worker, float] = field(default_factory=dict)
    stash: float = 1.0

    def __post_init__(self) -> None:
        for limit in (self.micro_batches, *self.workers.values()):
            if limit is not None and not limit >= 1:
                raise ConfigError(f"a worker must be able to hold at least 1 micro-batch, got {limit!r}")
        if not 0 <= self.stash <= 1:
            raise ConfigError(f"stash must be between 0 and 1, got {self.stash!r}")

    def at(self, worker: Worker) -> float:
        """The limit of a worker."""
        limit = self.workers.get(worker, self.micro_batches)
        return math.inf if limit is None else limit


NO_LIMIT = Memory()


def check(
    schedule: Schedule,
    topology: Topology,
    *,
    memory: Memory = NO_LIMIT,
    done: Mapping[Worker, Collection[Action]] | None = None,
    ordered: bool = False,
) -> None:
    """Every micro-batch passes every stage once, at one worker, in a possible order and within the memory.

    Args:
        schedule: the rows.
        topology: shape of the job.
        memory: limits.
        done: what surviving workers have executed already in an iteration under way; it is not in the rows.
        ordered: the micro-batches of a pipeline at a stage must be at one worker, with W (or B) in ascending order,
            which a reduction needs that is equal bit for bit.

    Raises:
        InvalidSchedule: names the first action that is wrong.
    """
    before = {} if done is None else done
    hosts: dict[tuple[int, int, int], Worker] = {}
    for worker, row in schedule.rows.items():
        _check_row(worker, row, topology, before.get(worker, ()), memory, hosts)
    _check_complete(topology, hosts, before, schedule)
    if ordered:
        check_order(schedule)
    simulate(schedule, Times(), done=[action for actions in before.values() for action in actions])


def _check_row(
    worker: Worker,
    row: Sequence[Action],
    topology: Topology,
    done: Collection[Action],
    memory: Memory,
    hosts: dict[tuple[int, int, int], Worker],
) -> None:
    ran: set[tuple[Kind, int, int]] = {(one.kind, one.pipeline, one.micro_batch) for one in done}
    held = held_after(done, memory.stash)
    limit = memory.at(worker)
    for at, action in enumerate(row):
        name = f"{action.text(worker)} of {worker}"
        kind, index, home = action.kind, action.micro_batch, action.pipeline
        if action.stage != worker.stage:
            raise InvalidSchedule(f"{name} is of another stage; a worker holds the parameters of its own stage only")
        if kind is Kind.OPT:
            if at != len(row) - 1:
                raise InvalidSchedule(f"{name} must be the last action of the row, but {row[at + 1]} follows")
            continue
        if not (0 <= home < topology.pipelines and 0 <= index < topology.micro_batches):
            raise InvalidSchedule(f"{name}: there is no such micro-batch in {topology}")
        key = (home, action.stage, index)
        if hosts.setdefault(key, worker) != worker:
            raise InvalidSchedule(f"{name}: {hosts[key]} runs this micro-batch at this stage too; only one may")
        if (kind, home, index) in ran:
            raise InvalidSchedule(f"{name} is there twice")
        if kind is Kind.F:
            held += 1
            if held > limit + _SAME:
                raise InvalidSchedule(f"{name}: {worker} would hold {held:g} micro-batches, but has room for {limit:g}")
        else:
            needed = Kind.I if kind is Kind.W else Kind.F
            if (needed, home, index) not in ran:
                raise InvalidSchedule(f"{name} comes before {action._replace(kind=needed).text(worker)}")
            other = {Kind.B: Kind.I, Kind.I: Kind.B, Kind.W: Kind.B}[kind]
            if (other, home, index) in ran:
                raise InvalidSchedule(f"{name}: {action._replace(kind=other).text(worker)} did the same already")
            held -= {Kind.B: 1.0, Kind.I: 1.0 - memory.stash, Kind.W: memory.stash}[kind]
        ran.add((kind, home, index))


def held_after(done: Collection[Action], stash: float = 1.0) -> float:
    """How many micro-batches a worker holds that has executed these actions; see ``Memory.stash``."""
    change = {Kind.F: 1.0, Kind.I: stash - 1.0, Kind.W: -stash, Kind.B: -1.0, Kind.OPT: 0.0}
    return sum(change[action.kind] for action in done)


def peaks(schedule: Schedule, stash: float = 1.0) -> dict[Worker, float]:
    """The most micro-batches that each worker holds at once: how many buffers it needs; see ``Memory.stash``."""
    found = {}
    for worker, row in schedule.rows.items():
        held = most = 0.0
        for action in row:
            held += held_after((action,), stash)
            most = max(most, held)
        found[worker] = most
    return found


def _check_complete(
    topology: Topology,
    hosts: Mapping[tuple[int, int, int], Worker],
    before: Mapping[Worker, Collection[Action]],
    schedule: Schedule,
) -> None:
    counts = {Kind.F: 1, Kind.I: 4, Kind.W: 16, Kind.B: 20, Kind.OPT: 0}
    seen: dict[tuple[int, int, int], int] = {}
    for part in (before, schedule.rows):
        for row in part.values():
            for action in row:
                key = (action.pipeline, action.stage, action.micro_batch)
                seen[key] = seen.get(key, 0) + counts[action.kind]
    for d in range(topology.pipelines):
        for s in range(topology.stages):
            for j in range(topology.micro_batches):
                count = seen.get((d, s, j), 0)
                if count == 21:
                    continue
                kind = Kind.F if not count & 1 else Kind.W if count & 4 else Kind.B
                where = hosts.get((d, s, j))
                raise InvalidSchedule(f"{Action(s, kind, j, d)} is missing" + (f" at {where}" if where else ""))


def check_order(schedule: Schedule) -> None:
    """The micro-batches of a pipeline at a stage are at one worker, their W (or B) in ascending order.

    Raises:
        InvalidSchedule: names the first action that is wrong.
    """
    last: dict[tuple[int, int], tuple[Worker, int]] = {}
    for worker, row in schedule.rows.items():
        for action in row:
            if action.kind not in (Kind.W, Kind.B):
                continue
            key = (action.pipeline, action.stage)
            host, index = last.get(key, (worker, -1))
            if host != worker:
                raise InvalidSchedule(
                    f"{action}: {host} runs micro-batches of this pipeline too; in order only one may"
                )
            if action.micro_batch < index:
                raise InvalidSchedule(f"{action} of {worker} comes after that of micro-batch {index}")
            last[key] = (worker, action.micro_batch)


def check_times(rows: Mapping[Worker, Sequence[Slot]], communication: float = 0.0) -> None:
    """Nothing runs before its inputs are there, and no worker does two things at once.

    Raises:
        InvalidSchedule: names the first action that is wrong.
    """
    ends: dict[tuple[Kind, int, int, int], float] = {}
    stages = 1 + max((worker.stage for worker in rows), default=0)
    for row in rows.values():
        for action, _, end in row:
            made = Kind.I if action.kind is Kind.B else action.kind
            ends[made, action.pipeline, action.stage, action.micro_batch] = end
    for worker, row in rows.items():
        busy, holder = -math.inf, ""
        for action, start, end in sorted(row, key=lambda slot: slot.start):
            name = f"{action.text(worker)} of {worker}"
            if start < busy - _SAME * max(1.0, abs(busy)):
                raise InvalidSchedule(f"{name} starts at {start:g}, while {holder} runs until {busy:g}")
            busy, holder = end, action.text(worker)
            for kind, stage in _inputs(action, stages):
                needed = action._replace(kind=kind, stage=stage)
                arrival = ends.get((kind, action.pipeline, stage, action.micro_batch), math.inf)
                arrival += communication if stage != action.stage else 0.0
                if start < arrival - _SAME * max(1.0, abs(arrival)):
                    raise InvalidSchedule(f"{name} starts at {start:g}, but {needed} is there at {arrival:g} only")


def _inputs(action: Action, stages: int) -> list[tuple[Kind, int]]:
    if action.kind is Kind.F:
        return [(Kind.F, action.stage - 1)] if action.stage else []
    if action.kind is Kind.W:
        return [(Kind.I, action.stage)]
    if action.kind is Kind.OPT:
        return []
    inputs = [(Kind.F, action.stage)]
    return [*inputs, (Kind.I, action.stage + 1)] if action.stage + 1 < stages else inputs
