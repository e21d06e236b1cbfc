"""Recovery of one worker: its parts, wired; what its program calls, and the thread that follows the ledger.

A watcher thread turns the entries of the ledger into events of this worker's phase, and starts what is to be done about
them (:mod:`shared_core.protocol.worker_phase` decides that). Each of these actions runs on a thread of its own.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable

from shared_core.errors import DamagedRecord, GenerationAbandoned, RecoveryFailed, Unsupported, WaitTimeout
from shared_core.faults import inject
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.generation import Entry, generation_key
from shared_core.protocol.rounds import Round
from shared_core.protocol.worker_phase import WorkerAction, WorkerEvent, WorkerPhase
from shared_core.system import threads
from shared_core.waiting import FOREVER_S
from shared_core.worker.comm.state import EXIT_STALE, wait_for_change
from shared_core.worker.link import connect_store
from shared_core.worker.recovery.agreement import Agreement
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.copies import StateCopies
from shared_core.worker.recovery.exchange import Donor, Exchange, Received
from shared_core.worker.recovery.forming import Forming
from shared_core.worker.recovery.replay import Replays
from shared_core.worker.recovery.reporting import RecoveryReporter
from shared_core.worker.recovery.resize import Draining
from shared_core.worker.state.publications import SharedMemoryPublisher


class WorkerRecovery:
    """The recovery of one worker.

    Args:
        irreplaceable: gives why no failed worker of this job can be replaced; empty where one can. On any thread.
        saved_boundaries: gives the step boundaries of the checkpoints that this rank can begin from.

    Attributes:
        replacement: this worker takes over from another.
    """

    def __init__(
        self,
        context: Context,
        publisher: SharedMemoryPublisher,
        donor: Donor,
        copies: StateCopies,
        reporter: RecoveryReporter,
        replays: Replays,
        irreplaceable: Callable[[], str],
        saved_boundaries: Callable[[], list[StepBoundary]],
    ) -> None:
        self.publisher, self._donor, self._copies, self._saved_boundaries = publisher, donor, copies, saved_boundaries
        self._reporter, self._replays, self._irreplaceable = reporter, replays, irreplaceable
        self.begin(context)

    def begin(self, context: Context) -> None:
        """Be that of the worker of ``context``; again in a forked copy of the process."""
        self.env, self.runtime, self.store, self.events = context.env, context.runtime, context.store, context.events
        self.lifecycle, self.fatal_actions = context.lifecycle, context.fatal_actions
        publisher, donor = self.publisher, self._donor
        self.replacement = self.env.incarnation > 0
        self._prepared = False
        self._exchange = Exchange(context, publisher, donor, self._copies)
        agreement = self._agreement = Agreement(context, donor)
        self.forming = Forming(context, publisher, agreement, self._exchange)
        draining = Draining(context, donor, agreement)
        self._threads: dict[WorkerAction, tuple[str, Callable[[Entry], None]]] = {
            WorkerAction.RECOVER: ("swift-recovery", self._form_again),
            WorkerAction.CARRY_ON: ("swift-recovery", self._carry_on),
            WorkerAction.DRAIN: ("swift-leave", draining.drain_for_resize),
            WorkerAction.WITHDRAW: ("swift-stay", draining.withdraw),
        }

    @property
    def asks_to_join(self) -> bool:
        """Whether this is a replacement that the others do not wait for: it asks to be admitted."""
        return self.lifecycle.phase is WorkerPhase.ASKS_TO_JOIN

    # -- the program's thread ----------------------------------------------------------------------

    def prepare(self) -> None:
        """Replacement: agree with all ranks where to start, before the user's code has done anything that depends on
        it; blocks. First workers: only start the watcher. A second call does nothing.
        """
        if self._prepared:
            return
        self._prepared = True
        env, life = self.env, self.lifecycle
        self.runtime.latest = life.born
        if not self.replacement:
            self.publisher.follow(env.machines)
        else:
            self._agreement.boundaries = (*self._saved_boundaries(), *self.publisher.boundaries())
            try:
                born = Entry.from_json(self.store.below().get(generation_key(life.born)), life.born, env.world_size)
            except DamagedRecord as error:
                self.fatal_actions.give_up(error)
            self.publisher.follow(born.machines)
            self._hear(born)
        threads.start(self._watch, name="swift-watcher")
        if self.replacement:
            self._find_place()
        if life.phase.answers:
            self.runtime.answer_from(dict(self.publisher.records.read()))

    def _find_place(self) -> None:
        """Replacement: agree with all others on where it starts, unless they continue without it."""
        life = self.lifecycle
        while life.phase is WorkerPhase.STARTING:
            generation = life.newest
            try:
                target = self.forming.prepare(generation)
            except GenerationAbandoned:
                continue
            except RecoveryFailed as error:
                self.fatal_actions.fall_back(str(error))
            except (WaitTimeout, DamagedRecord) as error:
                self.fatal_actions.give_up(error)
            with self.runtime.lock:
                if life.phase is not WorkerPhase.STARTING:
                    continue
                life.step(WorkerEvent.NO_BOUNDARY if target is None else WorkerEvent.BOUNDARY_FOUND)
                overtaken = life.ended(generation)
            if overtaken:  # entries that come from now on the watcher answers
                self._agreement.post(self.store.below(), life.newest)

    def join(self) -> Received:
        """Form a generation on this thread and take over (replacement) or begin (first workers). Blocks. Returns what
        was received. What cannot be done ends the worker or the job.
        """
        life = self.lifecycle
        life.step(WorkerEvent.ARRIVED)
        while True:
            with self.runtime.lock:
                whom = "the others to hand their state on, because the number of workers changes"
                wait_for_change(self.runtime, whom, lambda: not life.changing)
                generation = life.newest
            try:
                with life.acting:  # a recovery of the next generation begins when this one is installed, or given up
                    return self.forming.form(generation)
            except GenerationAbandoned:
                with self.runtime.lock:
                    self.runtime.changed.wait_for(lambda seen=generation: life.ended(seen), 0.5)  # type: ignore[misc]
            except RecoveryFailed as error:
                self.fatal_actions.fall_back(str(error))
            except (WaitTimeout, DamagedRecord) as error:
                self.fatal_actions.give_up(error)

    def admit(self, turn: Round) -> Received:
        """Admit replacements that have asked to join. Raises GenerationAbandoned and WaitTimeout; see
        :meth:`Forming.admit`.
        """
        with self.lifecycle.acting:
            try:
                return self.forming.admit(turn)
            except RecoveryFailed as error:
                self.fatal_actions.fall_back(str(error))
            except DamagedRecord as error:
                self.fatal_actions.give_up(error)

    # -- the watcher's thread ----------------------------------------------------------------------

    def _watch(self) -> None:
        env, life = self.env, self.lifecycle
        try:
            # It blocks in its store, so it has a connection of its own.
            store = connect_store(FOREVER_S, env).below(env.prefix)
            actions: tuple[WorkerAction, ...] = ()
            while WorkerAction.STOP_WATCHING not in actions:
                self._agreement.hear(store, life.newest)
                generation = life.newest + 1
                key = generation_key(generation)
                entry = Entry.from_json(store.get(key), generation, env.world_size)
                if not entry.kind.over:
                    self.publisher.follow(entry.machines)
                actions = self._hear(entry)
        except RuntimeError:
            os._exit(1)  # the store is gone: so is the agent
        except DamagedRecord as error:
            self.fatal_actions.give_up(error)
        except Exception as error:  # noqa: BLE001 (a dead watcher would hang the job: end it with the reason)
            self.fatal_actions.break_down(error)

    def _hear(self, entry: Entry) -> tuple[WorkerAction, ...]:
        with self.runtime.lock:
            actions = self.lifecycle.hear(entry)
            if self.lifecycle.newest == entry.generation:
                self._exchange.sever()
        for action in actions:
            self._act(action, entry)
        return actions

    def _act(self, action: WorkerAction, entry: Entry) -> None:
        if action is WorkerAction.EXIT:
            os._exit(EXIT_STALE)
        elif action is WorkerAction.POST_FRONT:
            self._agreement.post(self.store.below(), entry.generation)
        elif action in self._threads:
            name, act = self._threads[action]
            threads.start(act, (entry,), name=name)

    # -- after failures of others: each on a thread of its own, raises nothing -------------------------

    def _form_again(self, entry: Entry) -> None:
        """Form the generation of an entry. What cannot be done ends the worker or the job."""
        with self.lifecycle.acting:
            try:
                self._recover(entry)
            except GenerationAbandoned:
                return  # the thread of the next generation takes over
            except (RecoveryFailed, Unsupported) as error:  # such as an optimizer's state that cannot be moved
                self.fatal_actions.fall_back(str(error))
            except (WaitTimeout, DamagedRecord) as error:
                self.fatal_actions.give_up(error)
            except Exception:
                # This worker cannot continue, but another may take its place; the agent bounds how often.
                traceback.print_exc()
                os._exit(1)

    def _recover(self, entry: Entry) -> None:
        if not self.lifecycle.break_off(entry):
            return
        self._donor.withdraw()
        if why := self._irreplaceable():
            raise RecoveryFailed(why)
        inject.point("recovery.severed")
        self._agreement.post(self.store.below(), entry.generation)
        self._say_ready(entry)
        inject.point("recovery.frontier")
        received = self.forming.form(entry.generation)
        fields = {
            "failed": list(entry.failed),
            "detected": entry.detected,
            "bytes_moved": received.nbytes,
            "exchange_s": received.seconds,
            "resolution": "replay" if received.replaying else "replica",
        }
        self._reporter.recovered({"generation": entry.generation, **fields})
        if received.replaying is not None:
            self._replays.begun(received.replaying)

    def _carry_on(self, entry: Entry) -> None:
        """Continue without the absent ranks: nothing is formed until they are admitted."""
        self._reporter.rerouted(entry.detected)
        self._copies.offer()
        runtime, waits, what = self.runtime, None, ""
        with self.lifecycle.acting:
            newest = self.lifecycle.break_off(entry)
            if not self.lifecycle.ended(entry.generation):
                self._donor.withdraw()
            inject.point("recovery.severed")
            if newest and (what := runtime.operations.under_way()):
                waits = runtime.operations.withdraw()
                if waits is None:
                    self.fatal_actions.cannot_complete(what)
        self._say_ready(entry)
        if waits is not None:  # the program's thread does not run: what it would do in here is done for it
            try:
                if not runtime.listener.await_absent():
                    self.fatal_actions.cannot_complete(what)
                runtime.operations.call_again(*waits)
            except Exception as error:  # noqa: BLE001 (it would wait for ever)
                self.fatal_actions.break_down(error)

    def _say_ready(self, entry: Entry) -> None:
        self.events.emit(
            "survivor_ready",
            rank=self.env.rank,
            generation=entry.generation,
            detected=entry.detected,
            ready_s=time.time() - entry.detected,
        )
