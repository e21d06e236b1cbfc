"""The forming of a generation, seen from a worker (DESIGN section 6, steps 2 to 7).

A watcher thread waits for the agent's announcement of a loss. Survivors cut their connections, post their frontier,
and wait for the newcomer; all compute the
same plan, connect, move what the plan says, and install it only after a barrier. If anybody is lost meanwhile, the
generation is abandoned and the next one
formed: nothing is ever half-installed.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shared_core.errors import CorruptFile, GenerationAbandoned, NotConnected, RecoveryFailed, SwiftError, WaitTimeout
from shared_core.events import EventLog, console
from shared_core.launcher.ledger import let_in_key, read_entry
from shared_core.protocol.admission import let_in
from shared_core.protocol.cut import Offer, choose_cut
from shared_core.protocol.frontier import Frontier, GroupFrontier, Top
from shared_core.protocol.plan import Plan, decide
from shared_core.protocol.worker_env import Resized, WorkerEnv
from shared_core.testing import inject
from shared_core.waiting import FOREVER_S, Wait, ranks_text, wait_for
from shared_core.worker.comm.connections import MAX_ATTEMPTS
from shared_core.worker.comm.gloo import InnerGroup, finish
from shared_core.worker.comm.groups import GroupState
from shared_core.worker.comm.runtime import Runtime
from shared_core.worker.link import connect_store, report, tell
from shared_core.worker.messages.archive import Archive
from shared_core.worker.messages.group_log import Signature, read_signature
from shared_core.worker.recovery.donor import Donor
from shared_core.worker.recovery.rank_copy import pack
from shared_core.worker.recovery.resize import local_state
from shared_core.worker.recovery.transfer import receive, send
from shared_core.worker.state.publications import Board

#: Exit code of a newcomer that prepared for a batch top which a further loss made useless; the agent starts another.
EXIT_STALE = 75
#: The agent's words for the cause of a loss when it replaces a worker whose state is in the minority.
DIVERGENT = "state differs from its replicas'"
#: Results to serve: per group and sequence number, what was called and what it gave.
Replay = dict[str, dict[int, tuple[Signature, list[torch.Tensor]]]]
_FOREVER = timedelta(days=365)
#: How long the launcher may take to end a worker that has ended the job, in seconds.
_END_S = 60.0


@dataclass(frozen=True)
class Replaying:
    """Newcomers without a replica run on from a checkpoint, or from the beginning.

    Attributes:
        generation: in which they joined.
        newcomers: their ranks.
        survivors: ranks that wait for them.
        complete: optimizer steps that all survivors have made: messages of earlier ones are all in logs.
    """

    generation: int
    newcomers: tuple[int, ...]
    survivors: tuple[int, ...]
    complete: int


@dataclass
class Received:
    """What a newcomer got, staged until the generation is agreed."""

    top: Top | None = None
    description: dict[str, Any] | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    generation: int = 0
    nbytes: int = 0
    replayed: int = 0
    replaying: Replaying | None = None
    local: torch.Tensor | None = None


class RecoveryListener(Protocol):
    """What the forming of generations tells, and asks, the rest of the worker."""

    def recovered(self, fields: dict[str, Any]) -> None:
        """Recovery thread of a survivor: a generation is formed. ``fields`` are those of its event."""

    def rerouted(self, detected: float) -> None:
        """Recovery thread of a survivor: it goes on without a rank whose loss was noticed at this time."""

    def replaying(self, replaying: Replaying) -> None:
        """Newcomers run on from a checkpoint, and this survivor waits for them."""

    def saved_tops(self) -> list[Top]:
        """Batch tops of the checkpoints that this rank can begin from."""

    def together(self) -> tuple[int, ...]:
        """Ranks that start again together with this one; none without a log on disk."""

    def await_absent(self) -> bool:
        """A collective of all ranks waits for absent ones: let them in. False if nobody lets them in."""


class Recovery:
    """Forms generations for one worker.

    Args:
        env: what the launcher told this worker.
        runtime: the groups.
        board: this rank's publications.
        events: the job's event log.
        state: the job's replicated state.
        listener: what it tells, and asks, the rest of the worker.
    """

    def __init__(
        self,
        env: WorkerEnv,
        runtime: Runtime,
        board: Board,
        events: EventLog,
        state: Donor,
        listener: RecoveryListener,
    ) -> None:
        self.env, self.runtime, self.board, self.events, self.state = env, runtime, board, events, state
        self._listener = listener
        self.newcomer = env.incarnation > 0
        self.target: Top | None = None
        self.prepared = False
        #: A newcomer that the others do not wait for: it asks to be let in.
        self.knocks = False
        self._records: dict[int, dict[str, Any]] = {}
        self._watcher: threading.Thread | None = None
        self._tops: tuple[Top, ...] = ()
        self.verify_version: int | None = None
        self._prepared_for = -1
        self._recovering = threading.Lock()
        self._client: Any = None
        self._client_lock = threading.Lock()
        self._forming: InnerGroup | None = None
        self._for_later: Replay = {}
        self._moved = Received()

    # -- store -------------------------------------------------------------------------------------

    def new_store(self, prefix: str) -> Store:
        """The agent's store below this attempt's prefix, over the one connection that all threads of the process share.

        One connection, because torch looks up the peer's name whenever it makes one, which can take seconds; nobody
        blocks in it.
        """
        with self._client_lock:
            if self._client is None:
                self._client = connect_store(self.runtime.wait_timeout_s, self.env)
        return PrefixStore((self.env.prefix + prefix).rstrip("/"), self._client)

    def tell(self, name: str, value: Any) -> None:
        """Set a key that the agent acts on."""
        self.new_store("")
        tell(self._client, name, value, prefix=self.env.prefix)

    def report(self, value: dict[str, Any]) -> None:
        """Tell the agent something that it shows to the user."""
        self.new_store("")
        report(self._client, value, prefix=self.env.prefix)

    # -- life --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Newcomer: decide where to start, before the user's code has done anything that depends on it. First
        workers: nothing.
        """
        if self.prepared:
            return
        self.prepared = True
        self.runtime.latest = self.env.generation
        self.board.follow(self.env.machines)
        self._watcher = threading.Thread(target=self._watch, name="swift-watcher", daemon=True)
        if not self.newcomer:
            self._watcher.start()
            return
        self._tops = (*self._listener.saved_tops(), *self.board.tops())
        self._watcher.start()
        store = self.new_store("")
        record = self._records[self.env.generation] = read_entry(
            store.get(f"gen/{self.env.generation}"),
            f"gen/{self.env.generation}",
            self.env.generation,
            self.env.world_size,
        )
        if self.env.rank in record.get("stay", ()):  # started while the number of workers changes
            threading.Thread(target=self._leave, args=(record,), name="swift-leave", daemon=True).start()
        if record.get("absent"):
            with self.runtime.lock:
                self.knocks = self.runtime.starting = True
                self.runtime.records = dict(self.board.records())
            return
        while True:
            generation = self.runtime.latest
            try:
                self._post_front(store, generation, self._newcomer_front())
                plan = decide(self._fronts(store, generation))
                break
            except GenerationAbandoned:
                continue
            except RecoveryFailed as error:
                self.fall_back(str(error))
            except WaitTimeout as error:
                self.give_up(error)
        self.target = plan.tops.get(self.env.rank)
        with self.runtime.lock:
            self._prepared_for = generation
            if self.target is not None:
                self.runtime.starting = True
                self.runtime.records = dict(self.board.records())
        if self.runtime.latest > generation:
            self._post_front(store, self.runtime.latest, self._newcomer_front())

    def join(self) -> Received:
        """Form a generation on this thread and take over (newcomer) or begin (first workers). Returns what was
        received.
        """
        store = self.new_store("")
        while True:
            with self.runtime.lock:
                # While the number of workers changes nothing is formed.
                self._wait(
                    "the others to hand their state on, because the number of workers changes",
                    lambda: "stay" not in self._records.get(self.runtime.latest, {}),
                )
                generation = self.runtime.latest
            try:
                with (
                    self._recovering
                ):  # a recovery of the next generation begins when this one is installed, or given up
                    return self._form(store, generation)
            except GenerationAbandoned:
                with self.runtime.lock:
                    self.runtime.changed.wait_for(lambda seen=generation: self.runtime.latest > seen, timeout=0.5)  # type: ignore[misc]
            except RecoveryFailed as error:
                self.fall_back(str(error))
            except WaitTimeout as error:
                self.give_up(error)

    def _watch(self) -> None:
        """Thread: follow the announcements; a survivor recovers here."""
        try:
            # It blocks in its store, so it has a connection of its own.
            store = PrefixStore(self.env.prefix.rstrip("/"), connect_store(FOREVER_S, self.env))
            while True:
                key = f"gen/{self.runtime.latest + 1}"
                store.wait([key], _FOREVER)
                record = read_entry(store.get(key), key, self.runtime.latest + 1, self.env.world_size)
                if record.get("over"):
                    return  # the agent does what follows
                if record["incarnations"][self.env.rank] > self.env.incarnation:
                    os._exit(EXIT_STALE)  # another worker has this rank: this machine was taken for lost
                self.board.follow(record.get("machines", ()))
                with self.runtime.lock:
                    self._records[record["generation"]] = record
                    self.runtime.latest = record["generation"]
                    self.runtime.absent = frozenset(record.get("absent", ()))
                    self.runtime.changed.notify_all()
                    live = self.runtime.generation >= 0
                    if self._forming is not None:
                        self._forming.sever()
                if "stay" in record:
                    if self.env.rank in record["stay"]:
                        threading.Thread(target=self._leave, args=(record,), name="swift-leave", daemon=True).start()
                elif record.get("absent"):
                    if live:
                        threading.Thread(target=self._go_on, args=(record,), name="swift-recovery", daemon=True).start()
                elif live:
                    threading.Thread(target=self._recover, args=(record,), name="swift-recovery", daemon=True).start()
                else:
                    threading.Thread(target=self._stay, name="swift-stay", daemon=True).start()
                    if self.newcomer and self._prepared_for >= 0:
                        self._post_front(self.new_store(""), record["generation"], self._newcomer_front())
        except RuntimeError:
            os._exit(1)  # the store is gone: so is the agent
        except Exception as error:  # noqa: BLE001 (a dead watcher would hang the job: end it with the reason)
            self._fatal(error)

    @property
    def record(self) -> dict[str, Any]:
        """What the agent said of the newest generation; empty for the first."""
        return self._records.get(self.runtime.latest, {})

    def _go_on(self, record: dict[str, Any]) -> None:
        """Thread of a survivor that goes on without the lost ranks: nothing is formed until they are let in."""
        self._listener.rerouted(record["detected"])
        with self._recovering:
            self.runtime.break_off()
            inject.point("recovery.severed")
            waits = None
            if not self._abandoned(record["generation"]) and (what := self.runtime.under_way()):
                waits = self.runtime.withdraw()
                if waits is None:
                    self.cannot_complete(what)
        self.events.emit(
            "survivor_ready",
            rank=self.env.rank,
            generation=record["generation"],
            detected=record["detected"],
            ready_s=time.time() - record["detected"],
        )
        if waits is not None:  # the program's thread does not run: what it would do in here is done for it
            try:
                if not self._listener.await_absent():
                    self.cannot_complete(what)
                self.runtime.call_again(*waits)
            except Exception as error:  # noqa: BLE001 (it would wait for ever)
                self._fatal(error)

    def cannot_complete(self, what: str) -> None:
        """This worker is in something that waits for all ranks, and some are absent. Does not return."""
        absent = ", ".join(map(str, sorted(self.runtime.absent)))
        self.fall_back(
            f"rank {self.env.rank} is in {what}, which waits for all ranks, and rank {absent} is absent. With "
            "on_failure='reroute' only training steps go on without a lost rank"
        )

    def let_in(self, generation: int) -> Received:
        """Form a generation with newcomers that have knocked, on the program's thread of all ranks, survivors standing
        at the same batch top; see :func:`shared_core.protocol.admission`.

        Raises:
            GenerationAbandoned: if somebody was lost meanwhile, and the newcomers are not in.
        """
        store, key = self.new_store(""), let_in_key(generation)
        joining = self.runtime.generation < 0
        with self._recovering:
            try:
                front = self._newcomer_front() if joining else self._survivor_front()
                self._post_front(store, generation, replace(front, tops=tuple(self.board.tops()[-1:])))
                fronts = self._fronts(store, generation)
                plan = let_in(fronts)
                self.verify_version = max(each.version for each in fronts.values()) + 1
                inner = self._let_in(plan, store, generation, key)
                self._install(plan, inner, generation, {}, joining, settled=True)
                inject.point("recovery.installed")
            except RecoveryFailed as error:
                self.fall_back(str(error))
        return self._moved

    def _let_in(self, plan: Plan, store: Store, generation: int, key: str) -> InnerGroup | None:
        """Connect and move. A group, or None if another loss has ended the generation with the newcomers in.

        Raises:
            GenerationAbandoned: if it has ended without them.
        """
        inner = None
        try:
            inner, _, _ = self._connect(plan, generation)
            # Whoever is first says whether the newcomers are in: one of us, or an agent that has seen another loss.
            word = store.compare_set(key, "", "yes")
            inject.point("lane.agreed")
        except GenerationAbandoned:
            # Somebody may have come further than we did. Then all have got to the barrier, with all that they need.
            if not store.check([key]):
                raise
            word = store.get(key)
        if bytes(word) == b"yes":
            return inner
        if inner is not None:
            inner.discard()
        raise GenerationAbandoned("another loss came first")

    def _leave(self, record: dict[str, Any]) -> None:
        """Thread: the number of workers changes."""
        with self._recovering:
            try:
                self._leave_once(record["generation"], record["stay"])
            except GenerationAbandoned:
                return  # somebody else was lost, or nobody leaves
            except Exception as error:  # noqa: BLE001 (a full disk, too: whatever it is, another way must be found)
                traceback.print_exc()
                self.tell("declined", {"generation": record["generation"], "reason": f"rank {self.env.rank}: {error}"})

    def _leave_once(self, generation: int, stay: list[int]) -> None:
        if self.runtime.generation >= 0:
            self.runtime.break_off()
        if self._abandoned(generation):
            return
        inject.point("resize.severed")
        store, key = self.new_store(""), f"gen/{generation}"

        def wait(keys: dict[int, str], what: str) -> None:
            self._wait_for(store, keys, generation, f"{what} (the number of workers changes)")

        store.set(f"{key}/offer/{self.env.rank}", self.state.offer().to_json())
        keys = {rank: f"{key}/offer/{rank}" for rank in stay}
        wait(keys, "to say what state they have")
        offers = [Offer.from_json(bytes(raw).decode()) for raw in store.multi_get(list(keys.values()))]
        cut = choose_cut({offer.rank: offer for offer in offers})
        inject.point("resize.cut")
        if self.env.rank in cut.donors.values():
            self.state.hand_on(cut)
            store.set(f"{key}/handed/{self.env.rank}", "1")
        if self.env.rank == min(stay):
            resized = Resized(self.env.restart, self.env.world_size, tuple(stay), cut.top)
            if cut.top and not self.env.machines:
                local_state(self.env, resized)  # only to know that it can be done
            wait({rank: f"{key}/handed/{rank}" for rank in cut.donors.values()}, "to hand their state on")
            self.tell("handed", {"generation": generation, "top": cut.top})

    def _stay(self) -> None:
        """Thread of a worker that has not joined yet: if the number of workers was to change, it does not."""
        with self._recovering:
            if "stay" not in self._records.get(self.runtime.latest, {}):
                self.state.withdraw()

    def _recover(self, record: dict[str, Any]) -> None:
        generation = record["generation"]
        with self._recovering:
            try:
                self._recover_once(generation, record)
            except GenerationAbandoned:
                return  # the thread of the next generation takes over
            except RecoveryFailed as error:
                self.fall_back(str(error))
            except WaitTimeout as error:
                self.give_up(error)
            except Exception:
                # This worker cannot go on, but another may take its place; the agent bounds how often.
                traceback.print_exc()
                os._exit(1)

    def _recover_once(self, generation: int, record: dict[str, Any]) -> None:
        if self.runtime.latest > generation:
            # Cut anyway: whoever waits for the lost rank must not wait for us.
            self.runtime.break_off()
            return
        self.state.withdraw()
        self.runtime.break_off()
        inject.point("recovery.severed")
        store = self.new_store("")
        self._post_front(store, generation, self._survivor_front())
        self.events.emit(
            "survivor_ready",
            rank=self.env.rank,
            generation=generation,
            detected=record["detected"],
            ready_s=time.time() - record["detected"],
        )
        inject.point("recovery.frontier")
        received = self._form(store, generation, posted=True)
        fields = {
            "lost": record["lost"],
            "detected": record["detected"],
            "bytes_moved": received.nbytes,
            "resolution": "replay" if received.replaying else "replica",
        }
        self._listener.recovered({"generation": generation, **fields})
        if received.replaying is not None:
            self._listener.replaying(received.replaying)

    # -- forming -----------------------------------------------------------------------------------

    def _abandoned(self, generation: int) -> bool:
        return self.runtime.latest > generation

    def _wait_for(self, store: Store, keys: dict[int, str], generation: int, what: str) -> None:
        """Wait for keys that ranks set in a generation.

        Raises:
            GenerationAbandoned: if it ends meanwhile.
            WaitTimeout: if one does not come.
        """
        limit_s, bound, world = self.runtime.wait_timeout_s, "wait_timeout_s", self.runtime.world
        if generation == 0 and world is not None and self.runtime.longest_s(world) > limit_s:
            # Nobody was lost: the scripts come here when they do, as without this product.
            limit_s, bound = self.runtime.longest_s(world), "time-out of the process group"
        wait_for(store, keys, lambda: self._abandoned(generation), limit_s, self.env.rank, what, bound=bound)

    def _wait(self, whom: str, done: Callable[[], bool], *, speaks: bool = True) -> None:
        """Wait for what a change of the runtime says. Callers hold its lock.

        Raises:
            WaitTimeout: if it does not come.
        """
        who, limit_s = f"rank {self.env.rank}", self.runtime.wait_timeout_s
        advice = "See above why that does not happen; raise wait_timeout_s if it is only slow."
        wait = Wait(who, whom, limit_s, speaks=lambda: speaks, advice=advice)
        wait.until(self.runtime.changed, done)

    def _why(self, do: str, generation: int) -> str:
        """Why ranks are waited for that are to do something, for the line that says so."""
        record = self._records.get(generation, {})
        lost = record.get("lost")
        if None in record.get("machines", ()):
            return f"to {do} (their machine was lost, and no other one has taken its place yet)"
        if not lost:
            return f"to {do}"
        its = "its newcomer runs" if len(lost) == 1 else "their newcomers run"
        verb = "was" if len(lost) == 1 else "were"
        return f"to {do} ({ranks_text(lost)} {verb} lost, {its} the script up to there)"

    def _post_front(self, store: Store, generation: int, front: Frontier) -> None:
        store.set(f"gen/{generation}/front/{self.env.rank}", front.to_json())

    def _fronts(self, store: Store, generation: int) -> dict[int, Frontier]:
        keys = {rank: f"gen/{generation}/front/{rank}" for rank in range(self.env.world_size)}
        self._wait_for(store, keys, generation, self._why("create the process group", generation))
        fronts = [Frontier.from_json(bytes(raw).decode()) for raw in store.multi_get(list(keys.values()))]
        return {front.rank: front for front in fronts}

    def _newcomer_front(self) -> Frontier:
        return Frontier(
            rank=self.env.rank,
            incarnation=self.env.incarnation,
            newcomer=True,
            version=0,
            tops=self._tops,
        )

    def _survivor_front(self) -> Frontier:
        with self.runtime.lock:
            groups = {
                name: _group_front(group, self.runtime.disk.archive) for name, group in self.runtime.groups.items()
            }
        return Frontier(
            rank=self.env.rank,
            incarnation=self.env.incarnation,
            newcomer=False,
            version=self.state.version,
            tops=(),
            groups=groups,
            together=list(self._listener.together()),
            **self.state.keeps,
        )

    def _form(self, store: Store, generation: int, *, posted: bool = False) -> Received:
        """One attempt at a generation.

        Raises:
            GenerationAbandoned: if somebody was lost meanwhile; nothing is installed then.
            RecoveryFailed: if nobody can serve a newcomer.
        """
        joining = self.newcomer and self.runtime.generation < 0
        if not posted:
            self._post_front(store, generation, self._newcomer_front() if joining else self._survivor_front())
        store.set(f"gen/{generation}/ready/{self.env.rank}", "1")
        fronts = self._fronts(store, generation)
        plan = decide(fronts)
        if plan.leave:
            self._start_together(plan, generation)
        # Replicas are compared at the first batch top after everyone has made a step beyond what anybody has now.
        self.verify_version = max(front.version for front in fronts.values()) + 1 if plan.tops else None
        mine = plan.tops.get(self.env.rank)
        if joining and mine != self.target:
            self.events.emit(
                "warning",
                rank=self.env.rank,
                generation=generation,
                message="batch top no longer reachable, starting over",
            )
            os._exit(EXIT_STALE)
        ready = {rank: f"gen/{generation}/ready/{rank}" for rank in range(self.env.world_size)}
        self._wait_for(store, ready, generation, self._why("reach the training loop", generation))
        inner, replay, received = self._connect(plan, generation)
        survivors = tuple(sorted(fronts.keys() - plan.tops.keys()))
        logs = any(fronts[rank].together for rank in survivors)
        replayed = tuple(r for r, top in sorted(plan.tops.items()) if logs and (top is None or top.saved))
        if replayed:
            complete = min(fronts[rank].version for rank in survivors)
            received.replaying = Replaying(generation, replayed, survivors, complete)
        self._install(plan, inner, generation, replay, joining)
        inject.point("recovery.installed")
        return received

    def _start_together(self, plan: Plan, generation: int) -> NoReturn:
        """A newcomer needs messages that are not on disk: their senders begin again with it (selective logging).

        Raises:
            GenerationAbandoned: in all others, when that is known.
        """
        if self.env.rank in plan.leave:
            lost = ", ".join(map(str, plan.newcomers))
            self.events.emit("together", rank=self.env.rank, generation=generation, newcomers=list(plan.newcomers))
            console(f"rank {self.env.rank} starts again together with rank {lost}: they share a group of log_groups")
            os._exit(EXIT_STALE)
        with self.runtime.lock:
            whom = f"{ranks_text(plan.leave)} to end, which start again together with {ranks_text(plan.newcomers)}"
            first = min(set(range(self.env.world_size)) - set(plan.leave), default=0)
            self._wait(whom, lambda: self._abandoned(generation), speaks=self.env.rank == first)
        raise GenerationAbandoned("others start again")

    def _connect(self, plan: Plan, generation: int) -> tuple[InnerGroup, Replay, Received]:
        """As :meth:`_meet`, in as many attempts as it takes.

        Raises:
            GenerationAbandoned: if somebody was lost meanwhile.
            RecoveryFailed: if it cannot be done.
        """
        attempt = 0
        while True:
            try:
                return self._meet(plan, generation, attempt)
            except NotConnected as error:
                attempt += 1
                if attempt == MAX_ATTEMPTS:
                    raise RecoveryFailed(f"rank {self.env.rank}: nobody was lost, and yet: {error}") from error
            except CorruptFile as error:
                raise RecoveryFailed(f"the log on disk cannot be read: {error}") from error

    def _meet(self, plan: Plan, generation: int, attempt: int) -> tuple[InnerGroup, Replay, Received]:
        """Connect the job's default group and move what the plan says, on all ranks or on none.

        Raises:
            GenerationAbandoned: if somebody was lost meanwhile.
            NotConnected: if it broke off although nobody was lost.
        """
        world = self.runtime.world
        assert world is not None
        inner = self.runtime.new_inner(world, generation, attempt)
        received = self._moved = Received(top=plan.tops.get(self.env.rank), generation=generation)
        try:
            with self.runtime.lock:
                if self._abandoned(generation):
                    raise GenerationAbandoned("connected too late")
                self._forming = inner
            inject.point("recovery.connected")
            replay = self._move(inner, plan, received)
            inject.point("recovery.exchanged")
            last = inner.pg.barrier(dist.BarrierOptions())
            finish(last, lambda: self._abandoned(generation), "the last barrier", self._exchanged(plan))
        except RuntimeError as error:
            inner.discard()
            if isinstance(error, (SwiftError, inject.FaultInjected)):
                raise
            with self.runtime.lock:
                # A broken connection mostly means a loss, which is announced in a moment.
                if self.runtime.changed.wait_for(lambda: self._abandoned(generation), timeout=2.0):
                    raise GenerationAbandoned(str(error)) from error
            raise NotConnected(str(error)) from error
        finally:
            with self.runtime.lock:
                self._forming = None
        return inner, replay, received

    def _exchanged(self, plan: Plan) -> Wait:
        """For the barrier after the exchange."""
        busy = {*plan.donors, *plan.donors.values()}
        busy |= {rank for each in plan.transfers for rank in (each.source, each.destination)}
        whom = ranks_text(busy - {self.env.rank} or set(range(self.env.world_size)) - {self.env.rank})
        return Wait(
            f"rank {self.env.rank}",
            f"{whom} to move state and logged messages in the recovery",
            self.runtime.wait_timeout_s,
            speaks=lambda: self.env.rank == min(set(range(self.env.world_size)) - busy, default=min(busy, default=0)),
            advice="One of them may hang, or the network is too slow: raise wait_timeout_s.",
        )

    def _install(
        self,
        plan: Plan,
        inner: InnerGroup | None,
        generation: int,
        replay: Replay,
        joining: bool,
        *,
        settled: bool = False,
    ) -> None:
        """Take over what was moved, and go live.

        Args:
            plan: what was agreed.
            inner: the default group's.
            generation: which one.
            replay: results to serve.
            joining: this worker is a newcomer.
            settled: newcomers are in, even if another loss has ended the generation, which does not go live then.

        Raises:
            GenerationAbandoned: if somebody was lost meanwhile.
        """
        runtime = self.runtime
        wrong = joining and self._predecessor_was_wrong()
        with runtime.lock:
            # From here on this worker counts as a survivor; the watcher asks under the same lock.
            if self._abandoned(generation):
                if inner is not None:
                    inner.discard()
                if not settled:
                    raise GenerationAbandoned("a loss was announced at the last moment")
                inner = None
                runtime.broken = True
            else:
                runtime.absent = frozenset()
            runtime.generation = generation
            if joining:
                runtime.starting = False
                top = plan.tops[self.env.rank]
                if top is not None:
                    runtime.top = runtime.stable = top.index
                    runtime.in_startup = False
                    runtime.entry = top.entry
                    for name, group in runtime.groups.items():
                        group.next = top.groups.get(name, 0)
                        group.done.upto = group.next
                        group.channels.start_from(top.received.get(name, {}), top.sent.get(name, {}))
                runtime.expected = {} if wrong or plan.copies else self.board.checksums()
            for name, entries in replay.items():
                if name in runtime.groups:
                    runtime.groups[name].replay.update(entries)
                else:
                    self._for_later.setdefault(name, {}).update(entries)
        if inner is not None:
            runtime.go_live(generation, inner, plan.redo, plan.received)

    def _predecessor_was_wrong(self) -> bool:
        """Whether the predecessor was replaced because its state was damaged: then what it computed is no measure."""
        record = self._records[self.env.generation]
        return DIVERGENT in str(record.get("cause", {}).get(str(self.env.rank), ""))

    def kept_for(self, group: str) -> dict[int, tuple[Signature, list[torch.Tensor]]]:
        """What was logged for a group that a newcomer makes again while it replays."""
        return self._for_later.pop(group, {})

    # -- moving ------------------------------------------------------------------------------------

    def _move(self, inner: InnerGroup, plan: Plan, received: Received) -> Replay:
        """Logs and state, in an order all ranks share."""
        rank = self.env.rank
        replay: Replay = {}
        for transfer in plan.transfers:
            if rank == transfer.source:
                rows, tensors = self._logged(transfer.entries)
                send(inner, transfer.destination, {"rows": rows}, tensors)
                received.nbytes += _nbytes(tensors)
            elif rank == transfer.destination:
                head, tensors = receive(inner, transfer.source)
                received.nbytes += _nbytes(tensors)
                at = 0
                for name, seq, sig, count in head["rows"]:
                    replay.setdefault(name, {})[seq] = (read_signature(sig), tensors[at : at + count])
                    at += count
                received.replayed += len(head["rows"])
        for newcomer, donor in sorted(plan.donors.items()):
            top = plan.tops[newcomer]
            if top is None:
                continue  # starts from the beginning: computes its state itself
            if rank == donor:
                with self.state.frozen(top.version, top.index) as (description, tensors):
                    send(inner, newcomer, description, tensors)
                    received.nbytes += _nbytes(tensors)
                if plan.copies:
                    packed = pack(self.board, top.index, self.runtime.groups)
                    local = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
                    send(inner, newcomer, {}, [local])
            elif rank == newcomer:
                received.description, received.tensors = receive(inner, donor)
                received.nbytes += _nbytes(received.tensors)
                if plan.copies:
                    _, (received.local,) = receive(inner, donor)
        return replay

    def _logged(self, entries: dict[str, list[int]]) -> tuple[list[list[Any]], list[torch.Tensor]]:
        rows: list[list[Any]] = []
        tensors: list[torch.Tensor] = []
        for name, seqs in entries.items():
            for seq in seqs:
                sig, results = self.runtime.logged(self.runtime.groups[name], seq)
                rows.append([name, seq, sig, len(results)])
                tensors += results
        return rows, tensors

    # -- ends --------------------------------------------------------------------------------------

    def fall_back(self, reason: str) -> NoReturn:
        """Nobody can serve a newcomer: the whole job goes back to its checkpoint. Does not return."""
        self.tell("restart", reason)
        with self.runtime.lock:
            try:
                self._wait("the launcher to restart all workers", lambda: False)
            except WaitTimeout as error:
                console(str(error))
        os._exit(1)

    def fail(self, error: BaseException) -> None:
        """End the job with this error."""
        self.tell("fail", {"rank": self.env.rank, "message": f"{type(error).__name__}: {error}"})

    def give_up(self, error: WaitTimeout) -> NoReturn:
        """A wait has run out of time: end the job with that, which the launcher prints. Does not return."""
        self.fail(error)
        threading.Event().wait(_END_S)
        os._exit(1)

    def _fatal(self, error: BaseException) -> None:
        traceback.print_exception(error)
        self.fail(error)
        threading.Event().wait(_END_S)
        os._exit(1)


def _group_front(group: GroupState, archive: Archive | None) -> GroupFrontier:
    received, sent = group.channels.watermarks()
    entries = group.log.entries
    on_disk = archive.indices(group.name) if archive is not None else ()
    return GroupFrontier(
        ranks=group.ranks,
        next=group.next,
        done=group.done.to_json(),
        log=sorted({*(seq for seq, entry in entries.items() if entry.redo is None), *group.replay, *on_disk}),
        exclusive=[seq for seq, entry in entries.items() if entry.redo is not None],
        received=received,
        sent=sent,
        held=group.channels.held(),
    )


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
