"""The workers of a job without processes: their threads are generators, see :mod:`cluster`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared_core.errors import GenerationAbandoned, RecoveryFailed
from shared_core.protocol.admission import admit
from shared_core.protocol.cut import Offer, choose_cut
from shared_core.protocol.frontier import Done, Frontier, GroupFrontier, StepBoundary, read_frontiers
from shared_core.protocol.generation import (
    GIVEN_UP,
    Entry,
    EntryKind,
    generation_key,
    go_key,
    plan_key,
    survivor_group_key,
)
from shared_core.protocol.members import members_text
from shared_core.protocol.plan import Agreed, Plan, decide
from shared_core.protocol.rounds import Round, admitting_key, ranks_in
from shared_core.protocol.worker_phase import WorkerAction, WorkerEvent, WorkerPhase, heard, transition

if TYPE_CHECKING:
    from cluster import Job

Pause = str | Callable[[], bool]
Thread = Iterator[Pause]


class Stuck(AssertionError):
    """The simulated job cannot continue, or something was installed by halves."""


@dataclass(frozen=True)
class Failure:
    """One worker that is to fail.

    Attributes:
        rank: which.
        point: name of the place of one of its threads: ``step 3``, ``exchange 1`` (of generation 1).
        incarnation: of the worker.
        how: ``killed``, ``divergent`` (killed for its state), ``taken`` (its machine is taken for failed: it lives on)
            or ``changed`` (nobody fails, but a change of the number of workers begins and is given up at once).
        also: ranks that fail with it.
    """

    rank: int
    point: str
    incarnation: int = 0
    how: str = "killed"
    also: tuple[int, ...] = ()


class Store:
    """The job's store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.values.setdefault(key, value.encode())


class Worker:
    """One incarnation of a rank."""

    def __init__(self, job: Job, rank: int, incarnation: int, born: int) -> None:
        self.job, self.rank, self.incarnation, self.born = job, rank, incarnation, born
        self.phase, self.newest, self.generation = WorkerPhase.STARTING, born, -1
        self.entries: dict[int, Entry] = {}
        self.absent = frozenset[int]()
        self.acting = self.offering = False
        self.target: StepBoundary | None = None
        #: Generations in which it has said where it stands; what was agreed on; where all replacements are there.
        self.said: set[int] = set()
        self.agreed: dict[int, Agreed] = {}
        self.gone: set[int] = set()
        #: What it has published; a replacement: the failed worker.
        self.publisher = list(job.publishers[rank])
        #: Optimizer steps.
        self.version = 0
        #: Collectives of the default group, one a step: issued, finished, logged, to serve.
        self.issued = self.done = 0
        self.log: set[int] = set()
        self.replay: set[int] = set()
        self.connected: int | None = None
        self.threads: list[tuple[Thread, Pause]] = []
        self.start(self.program())
        self.start(self.watch())

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" ({self.incarnation})" if self.incarnation else "")

    # -- what the product's classes do around the decisions ----------------------------------------

    def start(self, thread: Thread) -> None:
        self.threads.append((thread, "begin"))

    def ended(self, generation: int) -> bool:
        return self.newest > generation

    def step(self, event: WorkerEvent) -> tuple[WorkerAction, ...]:
        before = self.phase
        self.phase, actions = transition(before, event)
        self.job.rows.add((before, event))
        does = f" [{', '.join(action.name for action in actions)}]" if actions else ""
        if self.phase is not before or actions:
            self.job.say(f"{self}: {before.value} -- {event.value} --> {self.phase.value}{does}")
        return actions

    def hear(self, entry: Entry) -> tuple[WorkerAction, ...]:
        event = heard(entry, self.rank, self.incarnation)
        if event not in (WorkerEvent.OVER, WorkerEvent.REPLACED):
            self.entries[entry.generation], self.newest = entry, entry.generation
            self.absent = entry.absent or frozenset()
        actions = self.step(event)
        for action in actions:
            if action is WorkerAction.EXIT:
                self.job.exit(self)
            elif action is WorkerAction.POST_FRONT:
                self.post(entry.generation)
            elif action is WorkerAction.WITHDRAW:
                self.start(self.withdraw(entry))
            elif action is not WorkerAction.STOP_WATCHING:
                act = {
                    WorkerAction.RECOVER: self.recover,
                    WorkerAction.CARRY_ON: self.carry_on,
                    WorkerAction.DRAIN: self.drain_for_resize,
                }[action]
                self.start(act(entry))
        return actions

    def watch(self) -> Thread:
        if self.incarnation:
            self.hear(self.job.entry(self.born))
        actions: tuple[WorkerAction, ...] = ()
        store = self.job.store
        while WorkerAction.STOP_WATCHING not in actions:
            plan, go = plan_key(self.newest), go_key(self.newest)
            yield lambda: store.check([plan])  # noqa: B023 (used at once)
            if store.get(plan) != GIVEN_UP.encode():
                self.agreed[self.newest] = Agreed.from_json(store.get(plan), plan, len(self.job.ranks))
            yield lambda: store.check([go])  # noqa: B023 (used at once)
            if store.get(go) != GIVEN_UP.encode():
                self.gone.add(self.newest)
            yield lambda: store.check([generation_key(self.newest + 1)])
            actions = self.hear(self.job.entry(self.newest + 1))

    def await_all(
        self, name: str, ranks: range | tuple[int, ...], generation: int, prefix: str = ""
    ) -> Iterator[Pause]:
        keys = [f"{prefix or generation_key(generation)}/{name}/{rank}" for rank in ranks]
        yield lambda: self.ended(generation) or self.job.store.check(keys)
        if not self.job.store.check(keys):
            raise GenerationAbandoned(name)

    # -- forming -----------------------------------------------------------------------------------

    @property
    def joins(self) -> bool:
        return self.incarnation > 0 and self.generation < 0

    def front(self, boundaries: tuple[StepBoundary, ...] = ()) -> Frontier:
        if self.joins:
            return Frontier(self.rank, self.incarnation, True, 0, tuple(self.publisher))
        log = sorted(self.log | self.replay)
        group = GroupFrontier(members_text(self.job.ranks), self.issued, Done(self.done).to_json(), log, [])
        return Frontier(self.rank, self.incarnation, False, self.version, boundaries, {"world": group})

    def post(self, generation: int) -> None:
        if generation in self.said:
            return
        self.said.add(generation)
        key, store = generation_key(generation), self.job.store
        store.set(f"{key}/front/{self.rank}", self.front().to_json())
        if store.add(f"{key}/fronts", 1) == len(self.job.ranks):
            self.start(self.decide(generation))

    def decide(self, generation: int) -> Thread:
        """This one was the last to say where it stands."""
        yield f"deciding {generation}"
        store, keys = self.job.store, {r: f"{generation_key(generation)}/front/{r}" for r in self.job.ranks}
        frontiers = read_frontiers({rank: store.get(key) for rank, key in keys.items()}, keys, len(self.job.ranks))
        try:
            agreed = Agreed(decide(frontiers))
        except RecoveryFailed as error:
            agreed = Agreed(None, str(error))
        store.compare_set(plan_key(generation), "", agreed.to_json())
        if agreed.plan is not None and not agreed.plan.boundaries:
            store.compare_set(go_key(generation), "", "1")

    def await_plan(self, generation: int) -> Iterator[Pause]:
        """Until ``agreed`` has the plan."""
        yield lambda: self.ended(generation) or generation in self.agreed
        if self.ended(generation):
            raise GenerationAbandoned("plan")

    def meet(self, generation: int, turn: Round | None = None) -> Iterator[Pause]:
        """Connect, move, and stand at the barrier until all do."""
        yield f"connect {generation}"
        if self.ended(generation):
            raise GenerationAbandoned("connected too late")
        yield f"exchange {generation}"
        prefix = generation_key(generation) if turn is None else turn.name
        members = self.job.ranks if turn is None else turn.members(len(self.job.ranks))
        self.job.store.set(f"{prefix}/barrier/{self.rank}", "1")
        yield from self.await_all("barrier", members, generation, prefix)
        yield f"installing {generation}"

    def form(self, generation: int) -> Iterator[Pause]:
        joins = self.joins
        self.post(generation)
        yield f"frontier {generation}"
        yield from self.await_plan(generation)
        plan = self.agreed[generation].plan_or_fail()
        if joins:
            if plan.boundaries.get(self.rank) != self.target:
                self.job.say(f"{self}: its step boundary is no longer reachable")
                self.job.exit(self)
                yield lambda: False
            if self.job.store.add(f"{generation_key(generation)}/readies", 1) == len(plan.boundaries):
                self.job.store.compare_set(go_key(generation), "", "1")
        yield lambda: self.ended(generation) or generation in self.gone
        if self.ended(generation):
            raise GenerationAbandoned("go")
        yield from self.meet(generation)
        if self.ended(generation):
            raise GenerationAbandoned("a failure was announced at the last moment")
        self.install(plan, generation, joins, WorkerEvent.INSTALLED)

    def install(self, plan: Plan, generation: int, joins: bool, event: WorkerEvent, name: str = "") -> None:
        live = event in (WorkerEvent.INSTALLED, WorkerEvent.ADMITTED)
        self.job.agree(name or str(generation), plan)
        self.step(event)
        self.connected = generation if live else None
        if live or joins:
            self.generation = generation
        if joins and (boundary := plan.boundaries[self.rank]) is not None:
            self.issued = self.done = boundary.groups["world"]
            # Over survivor groups, who goes through the batch again does nothing in updates that the state contains.
            self.version = plan.newest if self.job.survivor_groups else boundary.version
        for each in plan.transfers:
            if each.destination == self.rank:
                self.replay |= set(each.entries["world"])
        if live:
            self.job.issued.setdefault(generation, {})[self.rank] = self.issued

    def holding(self, body: Iterator[Pause]) -> Thread:
        """With the lock that one acting thread holds at a time."""
        yield lambda: not self.acting
        self.acting = True
        try:
            yield from body
        except GenerationAbandoned:
            pass
        except RecoveryFailed as error:
            self.job.restart(f"{self}: {error}")
        finally:
            self.acting = False

    def break_off(self, entry: Entry) -> bool:
        """As :meth:`Lifecycle.break_off`."""
        if self.generation >= entry.generation:
            return False
        self.connected = None
        return not self.ended(entry.generation)

    # -- actions -----------------------------------------------------------------------------------

    def recover(self, entry: Entry) -> Thread:
        def body() -> Iterator[Pause]:
            if not self.break_off(entry):
                return
            self.offering = False
            yield "severed"
            yield from self.form(entry.generation)

        return self.holding(body())

    def carry_on(self, entry: Entry) -> Thread:
        def body() -> Iterator[Pause]:
            self.break_off(entry)
            if not self.ended(entry.generation):
                self.offering = False
            yield "severed"

        return self.holding(body())

    def withdraw(self, entry: Entry) -> Thread:
        def body() -> Iterator[Pause]:
            if not self.ended(entry.generation):
                self.offering = False
            yield "withdrawn"

        return self.holding(body())

    def drain_for_resize(self, entry: Entry) -> Thread:
        def body() -> Iterator[Pause]:
            generation, store = entry.generation, self.job.store
            if not self.break_off(entry):
                return
            self.offering = True  # no step boundary is passed from here on
            yield "offer"
            key = generation_key(generation)
            boundaries = tuple((boundary.index, boundary.version, boundary.kind) for boundary in self.publisher)
            offer = Offer(self.rank, 0, boundaries, None if self.joins else self.version)
            store.set(f"{key}/offer/{self.rank}", offer.to_json())
            yield from self.await_all("offer", entry.stay, generation)
            offers = (Offer.from_json(store.get(f"{key}/offer/{rank}").decode()) for rank in entry.stay)
            try:
                cut = choose_cut({offer.rank: offer for offer in offers})
                if self.job.rng is not None and self.job.rng.random() < 0.2:
                    raise RecoveryFailed("the state cannot be written")
            except RecoveryFailed as error:
                self.job.declined(generation, str(error))
                return
            if self.rank in cut.donors.values():
                store.set(f"{key}/handed/{self.rank}", "1")
            yield "cut"
            if self.rank == min(entry.stay):
                yield from self.await_all("handed", tuple(cut.donors.values()), generation)
                self.job.handed(generation, cut.boundary)

        return self.holding(body())

    # -- the program -------------------------------------------------------------------------------

    def program(self) -> Thread:
        """The user's script: up to the default group, then a step after the other."""
        try:
            if self.incarnation:
                yield from self.find_place()
            yield "script"
            if self.phase is WorkerPhase.ASKS_TO_JOIN:
                yield from self.join_request()
            else:
                yield from self.join()
            while self.version < self.job.steps:
                yield from self.train()
            self.job.store.set(f"done/{self.rank}", "1")
        except RecoveryFailed as error:
            self.job.restart(f"{self}: {error}")

    def find_place(self) -> Iterator[Pause]:
        yield lambda: self.born in self.entries
        while self.phase is WorkerPhase.STARTING:
            generation = self.newest
            self.post(generation)
            try:
                yield from self.await_plan(generation)
            except GenerationAbandoned:
                continue
            self.target = self.agreed[generation].plan_or_fail().boundaries.get(self.rank)
            yield "place found"
            if self.phase is WorkerPhase.STARTING:
                self.step(WorkerEvent.NO_BOUNDARY if self.target is None else WorkerEvent.BOUNDARY_FOUND)
                if self.ended(generation):
                    self.post(self.newest)

    def join(self) -> Iterator[Pause]:
        self.step(WorkerEvent.ARRIVED)
        while self.generation < 0:
            yield lambda: self.newest == 0 or self.entries[self.newest].kind is not EntryKind.DRAIN
            generation = self.newest
            yield from self.holding(self.form(generation))
            if self.generation < 0:
                yield lambda seen=generation: self.ended(seen)  # type: ignore[misc]

    def train(self) -> Iterator[Pause]:
        """One step: publish the step boundary, issue its collective, finish it."""
        yield lambda: not self.offering
        self.job.publish(self)
        if self.job.survivor_groups:
            yield from self.train_over_survivor_group()
            return
        yield f"step {self.version + 1}"
        step, self.issued = self.issued, self.issued + 1
        if self.connected is not None:
            self.job.issued[self.connected][self.rank] = self.issued
        yield lambda: not self.offering and (step in self.replay or self.job.complete(self, step))
        self.replay.discard(step)
        assert step == self.done == self.version, "every step is made once, in order"
        self.done, self.version, self.log = step + 1, step + 1, {step}
        yield f"stepped {self.version}"

    # -- on_failure="reroute" ----------------------------------------------------------------------

    def train_over_survivor_group(self) -> Iterator[Pause]:
        """One step of those that are present; then replacements that have asked to join are admitted."""
        job = self.job
        job.store.set(survivor_group_key(self.rank, self.incarnation), "1")
        yield "survivor_group"
        yield lambda: self.phase is WorkerPhase.WITHOUT or self.newest == self.generation
        if self.phase is not WorkerPhase.WITHOUT and self.newest != self.generation:
            return
        generation, absent = self.newest, self.absent if self.phase is WorkerPhase.WITHOUT else frozenset[int]()
        meeting = job.survivor_group(self, generation, absent)
        yield f"step {self.version + 1}"
        yield lambda: self.ended(generation) or meeting.over
        if not meeting.over:
            del meeting.here[self.rank]
            return
        yield f"stepped {self.version}"
        if meeting.admits:
            turn = Round(generation, absent, meeting.admits)
            for rank in turn.ranks:
                job.store.set(admitting_key(generation, rank), turn.to_json())
            yield from self.holding(self.admit(turn))
            yield lambda: self.ended(generation) or self.absent == turn.away  # no round follows one that failed

    def join_request(self) -> Iterator[Pause]:
        self.job.store.set(f"join_request/{self.rank}.{self.incarnation}", "1")
        while self.phase is WorkerPhase.ASKS_TO_JOIN and self.generation < 0:
            generation = self.newest
            key = admitting_key(generation, self.rank)
            yield lambda: self.ended(generation) or self.job.store.check([key])  # noqa: B023 (used at once)
            if self.job.store.check([key]):
                turn = Round.from_json(self.job.store.get(key), generation, self.rank, len(self.job.ranks))
                yield from self.holding(self.admit(turn))
            if self.generation < 0:
                yield lambda: self.ended(generation)  # noqa: B023 (used at once)

    def admit(self, turn: Round) -> Iterator[Pause]:
        joins, store, generation = self.joins, self.job.store, turn.generation
        members, decided = turn.members(len(self.job.ranks)), f"{turn.name}/plan"
        store.set(f"{turn.name}/front/{self.rank}", self.front(tuple(self.publisher[-1:])).to_json())
        if store.add(f"{turn.name}/fronts", 1) == len(members):
            yield f"deciding {generation}"
            keys = {rank: f"{turn.name}/front/{rank}" for rank in members}
            frontiers = read_frontiers({rank: store.get(key) for rank, key in keys.items()}, keys, len(self.job.ranks))
            try:
                agreed = Agreed(admit(frontiers, self.entries[generation].absent or ()))
            except RecoveryFailed as error:
                agreed = Agreed(None, str(error))
            store.set(decided, agreed.to_json())
        yield f"admitted {generation}"
        yield lambda: self.ended(generation) or store.check([decided])
        if not store.check([decided]):
            raise GenerationAbandoned("plan")
        plan = Agreed.from_json(store.get(decided), decided, len(self.job.ranks)).plan_or_fail()
        try:
            yield from self.meet(generation, turn)
            word = store.compare_set(turn.key, "", turn.word)
            yield f"agreed {generation}"
        except GenerationAbandoned:
            if not store.check([turn.key]):
                raise
            word = store.get(turn.key)
        if ranks_in(word, turn.key, turn.absent) != turn.ranks:
            raise GenerationAbandoned("another failure came first")
        late = self.ended(generation)
        if not late:
            self.absent = turn.away
        event = WorkerEvent.ADMITTED_LATE if late else WorkerEvent.ADMITTED_SOME if turn.away else WorkerEvent.ADMITTED
        self.install(plan, generation, joins, event, turn.name)
        if joins and (boundary := plan.boundaries[self.rank]) is not None:
            self.publisher = [boundary]


class Gathered:
    """A step over a survivor group: it is made when all that are present have come, for all of them at once."""

    def __init__(self, ranks: frozenset[int]) -> None:
        self.ranks, self.here, self.over, self.admits = ranks, dict[int, Worker](), False, frozenset[int]()
