"""Refuses a schedule that cannot be executed, and names the action."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shared_core.errors import InvalidSchedule
from shared_core.schedule.problem import NO_LIMIT, Memory, held_after
from shared_core.schedule.schedule import Action, Kind, PlannedWorker, Schedule, Topology
from shared_core.schedule.timing import Times, simulate

#: Two numbers closer than this are the same.
_SAME = 1e-9


def check(
    schedule: Schedule,
    topology: Topology,
    *,
    memory: Memory = NO_LIMIT,
    done: Mapping[PlannedWorker, Collection[Action]] | None = None,
    ordered: bool = False,
) -> None:
    """Raise InvalidSchedule, naming the first wrong action, for a schedule that cannot be executed.

    Every micro-batch must pass every stage once, at one worker, in a possible order, within memory. ``done`` is what
    survivors have executed already, which the rows leave out. ``ordered``: micro-batches of a pipeline at a stage must
    be at one worker, with W (or B) ascending, for sums that are equal bit for bit.
    """
    before = {} if done is None else done
    hosts: dict[tuple[int, int, int], PlannedWorker] = {}
    for worker, row in schedule.rows.items():
        _check_row(worker, row, topology, before.get(worker, ()), memory, hosts)
    _check_complete(topology, hosts, before, schedule)
    if ordered:
        check_order(schedule)
    simulate(schedule, Times(), done=[action for actions in before.values() for action in actions])


def _check_row(
    worker: PlannedWorker,
    row: Sequence[Action],
    topology: Topology,
    done: Collection[Action],
    memory: Memory,
    hosts: dict[tuple[int, int, int], PlannedWorker],
) -> None:
    ran: set[tuple[Kind, int, int]] = {(one.kind, one.pipeline, one.micro_batch) for one in done}
    held = held_after(done)
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
            held -= 0.0 if kind is Kind.I else 1.0
        ran.add((kind, home, index))


def _check_complete(
    topology: Topology,
    hosts: Mapping[tuple[int, int, int], PlannedWorker],
    before: Mapping[PlannedWorker, Collection[Action]],
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
    """Raise InvalidSchedule unless each pipeline's micro-batches of a stage are at one worker, W (or B) ascending."""
    last: dict[tuple[int, int], tuple[PlannedWorker, int]] = {}
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
