"""A job without processes: ranks run a program of collectives, messages and step boundaries, and fail at any
moment.

It follows the rules of the runtime: when gloo may finish an operation, what is logged and dropped, what a survivor does
while a recovery runs. What is under test is :func:`shared_core.protocol.plan.decide`. A run fails if gloo groups of one
generation would be given different operations, if nobody can continue, or if a donor does not reach the state it owes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from shared_core.protocol.frontier import Done, Frontier, GroupFrontier, StepBoundary
from shared_core.protocol.members import members_text
from shared_core.protocol.plan import Plan, decide

#: Kinds of collectives: who must have issued it before whom it may finish at, and whether ranks get different results.
REPLICATED = ("all_reduce", "broadcast")
EXCLUSIVE = ("all_to_all", "reduce", "scatter")
FULL = ("all_reduce", "all_to_all")


class Stuck(AssertionError):
    """The simulated job cannot continue, or gloo would have been given different operations."""


@dataclass(frozen=True)
class Step:
    """One thing a rank does: ``issue``, ``wait``, ``send``, ``recv``, ``update`` or ``boundary``."""

    do: str
    group: str = ""
    number: int = -1
    what: str = ""
    root: int = -1
    channel: tuple[int, int, int] = (-1, -1, -1)


@dataclass
class Program:
    """The steps of each rank and the members of each group."""

    steps: list[list[Step]]
    groups: dict[str, tuple[int, ...]]


def random_program(
    rng: random.Random,
    world: int,
    boundaries: int,
    *,
    exclusive: bool = True,
    messages: bool = True,
    crossing: bool = False,
) -> Program:
    """A program in which ranks do the same in the same order.

    Args:
        rng: source of all choices.
        world: number of ranks.
        boundaries: step boundaries.
        exclusive: with operations whose result differs by rank.
        messages: with point-to-point messages.
        crossing: operations may be waited for after the next step boundary (real programs do not do this).
    """
    groups = {"world": tuple(range(world))}
    if world > 2:
        groups["sub"] = tuple(sorted(rng.sample(range(world), rng.randint(2, world - 1))))
    steps: list[list[Step]] = [[] for _ in range(world)]
    count = dict.fromkeys(groups, 0)
    open_waits: list[tuple[str, int]] = []

    def settle(keep: float) -> None:
        for name, number in list(open_waits):
            if rng.random() >= keep:
                open_waits.remove((name, number))
                for rank in groups[name]:
                    steps[rank].append(Step("wait", name, number))

    for batch in range(boundaries + 1):
        for _ in range(rng.randint(1, 5)):
            if messages and rng.random() < 0.3:
                source, destination = rng.sample(range(world), 2)
                channel = (source, destination, rng.randint(0, 1))
                steps[source].append(Step("send", "world", channel=channel))
                steps[destination].append(Step("recv", "world", channel=channel))
                continue
            name = rng.choice(list(groups))
            what = rng.choice(REPLICATED + EXCLUSIVE if exclusive else REPLICATED)
            root = rng.choice(groups[name])
            for rank in groups[name]:
                steps[rank].append(Step("issue", name, count[name], what, root))
            open_waits.append((name, count[name]))
            count[name] += 1
            settle(0.4)
        if rng.random() < 0.7:  # what a step's gradients are
            for rank in range(world):
                steps[rank].append(Step("issue", "world", count["world"], "all_reduce", 0))
            open_waits.append(("world", count["world"]))
            count["world"] += 1
        settle(0.3 if crossing else 0.0)
        if batch < boundaries:
            for rank in range(world):
                steps[rank] += [Step("update"), Step("boundary")]
    settle(0.0)
    return Program(steps, groups)


@dataclass
class Group:
    """A rank's view of a group, as ``GroupState``."""

    next: int = 0
    done: Done = field(default_factory=Done)
    pending: dict[int, Step] = field(default_factory=dict)
    log: dict[int, tuple[int, Step]] = field(default_factory=dict)
    replay: set[int] = field(default_factory=set)
    posted: dict[tuple[int, int, int], int] = field(default_factory=dict)
    received: dict[tuple[int, int, int], int] = field(default_factory=dict)
    sent: dict[tuple[int, int, int], int] = field(default_factory=dict)
    kept: dict[tuple[int, int, int], dict[int, int]] = field(default_factory=dict)
    has: dict[tuple[int, int, int], int] = field(default_factory=dict)


class Worker:
    """One incarnation of a rank."""

    def __init__(self, rank: int, program: Program, replacement: bool) -> None:
        self.rank, self.steps, self.replacement = rank, program.steps[rank], replacement
        self.place = 0
        self.boundary = self.boundaries = self.stable = self.version = 0
        self.groups = {name: Group() for name, members in program.groups.items() if rank in members}

    @property
    def finished(self) -> bool:
        """Whether it has reached the end of the program."""
        return self.place == len(self.steps)


def _key(channel: tuple[int, int, int]) -> str:
    return ",".join(map(str, channel))


class Job:
    """A simulated job.

    Args:
        program: what the ranks do.
        rng: source of all choices.
    """

    def __init__(self, program: Program, rng: random.Random) -> None:
        self.program, self.rng = program, rng
        self.world = len(program.steps)
        self.workers = [Worker(rank, program, False) for rank in range(self.world)]
        self.publishers: list[list[tuple[StepBoundary, int]]] = [
            [] for _ in range(self.world)
        ]  # boundaries with their places
        self.issued: dict[str, dict[int, list[int]]] = {}
        self.wire: dict[tuple[int, int, int], list[int]] = {}
        self.broken = False
        self.failures = 0
        self.originals = set(range(self.world))  # ranks that never failed
        self.plans: list[Plan] = []
        self._fresh()

    # -- a generation of gloo groups ---------------------------------------------------------------

    def _fresh(self) -> None:
        self.issued = {name: {rank: [] for rank in members} for name, members in self.program.groups.items()}
        self.wire = {}

    def _start(self, name: str, rank: int, number: int) -> None:
        line = self.issued[name][rank]
        line.append(number)
        for other, theirs in self.issued[name].items():
            if len(theirs) >= len(line) and theirs[len(line) - 1] != number:
                raise Stuck(f"group {name}: rank {rank} runs {number} where rank {other} runs {theirs[len(line) - 1]}")

    def _may_finish(self, name: str, rank: int, step: Step) -> bool:
        here = self.issued[name]
        if step.number not in here[rank]:
            return False
        everyone = all(step.number in line for line in here.values())
        if step.what in FULL or (step.what == "reduce" and rank == step.root):
            return everyone
        if step.what in ("broadcast", "scatter"):
            return step.number in here[step.root]
        return True  # reduce, elsewhere than at the root

    # -- what a worker does ------------------------------------------------------------------------

    def moves(self, worker: Worker) -> list[tuple[str, str, int]]:
        """What can happen next at a worker: ``step``, or ``finish`` of an operation."""
        out = []
        if not worker.finished and self._can_step(worker):
            out.append(("step", "", 0))
        if not self.broken:
            for name, group in worker.groups.items():
                out += [("finish", name, n) for n, s in group.pending.items() if self._may_finish(name, worker.rank, s)]
        return out

    def _can_step(self, worker: Worker) -> bool:
        step = worker.steps[worker.place]
        if step.do == "wait":
            return step.number in worker.groups[step.group].done
        if step.do == "recv":
            group = worker.groups[step.group]
            return not self.broken and group.received.get(step.channel, 0) in self.wire.get(step.channel, ())
        return True

    def do(self, worker: Worker, move: tuple[str, str, int]) -> None:
        """Carry out one of :meth:`moves`."""
        what, name, number = move
        if what == "finish":
            self._finish(worker, name, worker.groups[name].pending.pop(number))
            return
        step = worker.steps[worker.place]
        worker.place += 1
        getattr(self, f"_{step.do}")(worker, step)

    def _wait(self, worker: Worker, step: Step) -> None:
        pass

    def _update(self, worker: Worker, step: Step) -> None:
        worker.version += 1

    def _issue(self, worker: Worker, step: Step) -> None:
        group = worker.groups[step.group]
        assert step.number == group.next
        group.next += 1
        if step.number in group.replay:
            group.replay.remove(step.number)
            self._finish(worker, step.group, step)
            return
        group.pending[step.number] = step
        if not self.broken:
            self._start(step.group, worker.rank, step.number)

    def _finish(self, worker: Worker, name: str, step: Step) -> None:
        group = worker.groups[name]
        group.done.add(step.number)
        # The boundary below which it was issued; the same at every rank.
        group.log[step.number] = (self._boundary_of(worker, name, step.number), step)
        boundary = group.log[step.number][0]
        if name == "world" and step.what in FULL and boundary > worker.stable:
            worker.stable = boundary
            for each in worker.groups.values():
                each.log = {n: entry for n, entry in each.log.items() if entry[0] >= boundary}
                for kept in each.kept.values():
                    for index in [i for i, sent_boundary in kept.items() if sent_boundary < boundary - 1]:
                        del kept[index]

    def _boundary_of(self, worker: Worker, name: str, number: int) -> int:
        boundary = 0
        for step in worker.steps:
            if step.do == "boundary":
                boundary += 1
            elif step.do == "issue" and step.group == name and step.number == number:
                return boundary
        raise AssertionError(number)

    def _boundary(self, worker: Worker, step: Step) -> None:
        worker.boundaries += 1
        boundary = StepBoundary(
            index=worker.boundaries,
            version=worker.version,
            entry=0,
            kind="batch",
            groups={name: group.next for name, group in worker.groups.items()},
            received={name: {_key(c): n for c, n in g.received.items()} for name, g in worker.groups.items()},
            sent={name: {_key(c): n for c, n in g.sent.items()} for name, g in worker.groups.items()},
            members={name: members_text(self.program.groups[name]) for name in worker.groups},
        )
        publisher = [entry for entry in self.publishers[worker.rank] if entry[0].index != boundary.index]
        publisher = sorted([*publisher, (boundary, worker.place)], key=lambda entry: entry[0].index)
        worker.boundary = boundary.index
        while len(publisher) > 1 and publisher[0][0].index < worker.stable:
            publisher.pop(0)
        self.publishers[worker.rank] = publisher

    def _send(self, worker: Worker, step: Step) -> None:
        group = worker.groups[step.group]
        index = group.sent.get(step.channel, 0)
        group.sent[step.channel] = index + 1
        group.kept.setdefault(step.channel, {})[index] = worker.boundary
        if not self.broken and index >= group.has.get(step.channel, 0):
            self._put(step.channel, index)

    def _put(self, channel: tuple[int, int, int], index: int) -> None:
        line = self.wire.setdefault(channel, [])
        if line and line[-1] + 1 != index:
            raise Stuck(f"channel {channel}: message {index} follows message {line[-1]}")
        line.append(index)

    def _recv(self, worker: Worker, step: Step) -> None:
        group = worker.groups[step.group]
        index = group.received.get(step.channel, 0)
        line = self.wire[step.channel]
        if line[0] != index:
            raise Stuck(f"channel {step.channel}: rank {worker.rank} gets message {line[0]} instead of {index}")
        line.pop(0)
        group.received[step.channel] = index + 1

    # -- failures ------------------------------------------------------------------------------------

    def lose(self, ranks: list[int]) -> None:
        """Lose workers at this moment, form generations (with more failures, perhaps, meanwhile) and continue."""
        self.failures += len(ranks)
        self.originals -= set(ranks)
        self.broken = True
        for rank in ranks:
            self.workers[rank] = Worker(rank, self.program, True)
        while True:
            frontiers = {rank: self._frontier(rank) for rank in range(self.world)}
            plan = decide({rank: Frontier.from_json(front.to_json()) for rank, front in frontiers.items()})
            self._check(plan)
            self._drift()
            self._check_donors(plan)
            if self.rng.random() < 0.15 and self.failures < 3 * self.world:
                more = self.rng.sample(range(self.world), self.rng.randint(1, self.world - 1))
                if all(self.workers[r].replacement or r in more for r in range(self.world)):
                    break  # nobody would be left
                self.failures += len(more)
                self.originals -= set(more)
                for rank in more:
                    self.workers[rank] = Worker(rank, self.program, True)
                continue
            break
        self.plans.append(plan)
        self._install(plan)

    def _frontier(self, rank: int) -> Frontier:
        worker = self.workers[rank]
        if worker.replacement:
            return Frontier(rank, 1, True, 0, tuple(boundary for boundary, _ in self.publishers[rank]))
        groups = {}
        for name, group in worker.groups.items():
            exclusive = sorted(n for n, (_, step) in group.log.items() if step.what in EXCLUSIVE)
            groups[name] = GroupFrontier(
                ranks=members_text(self.program.groups[name]),
                next=group.next,
                done=group.done.to_json(),
                log=sorted((group.log.keys() | group.replay) - set(exclusive)),
                exclusive=exclusive,
                received={_key(c): n for c, n in group.received.items()},
                sent={_key(c): n for c, n in group.sent.items()},
                held={_key(c): min(group.kept.get(c) or [n]) for c, n in group.sent.items()},
            )
        return Frontier(rank, 0, False, worker.version, (), groups=groups)

    def _check(self, plan: Plan) -> None:
        """What must hold of any plan, whatever the program."""
        assert plan.replacements == tuple(rank for rank, worker in enumerate(self.workers) if worker.replacement)
        for rank, boundary in plan.boundaries.items():
            assert boundary is None or boundary in [published for published, _ in self.publishers[rank]]
            assert plan.donors[rank] not in plan.boundaries
        for transfer in plan.transfers:
            assert transfer.source != transfer.destination
            source = self.workers[transfer.source]
            for name, numbers in transfer.entries.items():
                held = source.groups[name].log.keys() | source.groups[name].replay
                assert set(numbers) <= held, "the source holds what it is to send"
                own = self.workers[transfer.destination].groups[name]
                assert not own.log.keys() & set(numbers), "nothing is sent to a rank that has it"

    def _drift(self) -> None:
        """Survivors' programs continue while the recovery runs, as far as they can."""
        for worker in self.workers:
            if not worker.replacement:
                for _ in range(self.rng.choice((0, 0, 1, 5))):
                    if worker.finished or not self._can_step(worker):
                        break
                    self.do(worker, ("step", "", 0))

    def _check_donors(self, plan: Plan) -> None:
        for replacement, donor in plan.donors.items():
            boundary, worker = plan.boundaries[replacement], self.workers[donor]
            while boundary is not None and worker.version < boundary.version:
                if worker.finished or not self._can_step(worker):
                    raise Stuck(
                        f"rank {donor} cannot reach version {boundary.version}, which it is to give to rank "
                        f"{replacement}"
                    )
                self.do(worker, ("step", "", 0))

    def _install(self, plan: Plan) -> None:
        self._fresh()
        for rank, boundary in plan.boundaries.items():
            worker = self.workers[rank]
            worker.replacement = False
            if boundary is None:
                continue
            worker.place = next(place for published, place in self.publishers[rank] if published == boundary)
            worker.boundaries = worker.boundary = worker.stable = boundary.index
            worker.version = boundary.version
            for name, group in worker.groups.items():
                group.next = group.done.upto = boundary.groups[name]
                group.received = {_channel(c): n for c, n in boundary.received[name].items()}
                group.sent = {_channel(c): n for c, n in boundary.sent[name].items()}
        for transfer in plan.transfers:
            for name, numbers in transfer.entries.items():
                self.workers[transfer.destination].groups[name].replay |= set(numbers)
        for worker in self.workers:
            for name, group in worker.groups.items():
                for number in sorted(group.pending.keys() & group.replay):
                    group.replay.remove(number)
                    self._finish(worker, name, group.pending.pop(number))
        self.broken = False
        for worker in self.workers:
            for name, group in worker.groups.items():
                redo = {n for n in plan.redo.get(name, ()) if n in group.log}
                for number in sorted(redo | group.pending.keys()):
                    self._start(name, worker.rank, number)
                group.has = {_channel(c): n for c, n in plan.received.get(name, {}).items()}
                for channel, kept in group.kept.items():
                    for index in sorted(kept):
                        if index >= group.has.get(channel, 0):
                            self._put(channel, index)

    # -- running -----------------------------------------------------------------------------------

    def run(self, chance: float, most: int) -> None:
        """Run to the end, losing workers with probability ``chance`` at each move, at most ``most`` times.

        Raises:
            Stuck: if nobody can continue.
            RecoveryFailed: from ``decide``.
        """
        times = 0
        while True:
            able = [(worker, moves) for worker in self.workers if (moves := self.moves(worker))]
            if not able:
                break
            if times < most and self.rng.random() < chance:
                times += 1
                self.lose(self.rng.sample(range(self.world), self.rng.randint(1, self.world - 1)))
                continue
            worker, moves = self.rng.choice(able)
            # A rank may run ahead as far as the operations let it.
            for _ in range(self.rng.choice((1, 1, 2, 20))):
                self.do(worker, self.rng.choice(moves))
                moves = self.moves(worker)
                if not moves:
                    break
        left = {w.rank: str(w.steps[w.place]) for w in self.workers if not w.finished}
        if left:
            raise Stuck(f"nobody can continue; ranks wait at {left}")
        for worker in self.workers:
            for name, group in worker.groups.items():
                assert not group.pending and not group.replay, (worker.rank, name)
                assert group.done.covers(group.next)


def _channel(key: str) -> tuple[int, int, int]:
    source, destination, tag = key.split(",")
    return int(source), int(destination), int(tag)
