"""Recovery of one worker: its parts, wired; what its program calls, and the thread that follows the ledger.

A watcher thread turns the entries of the ledger into events of this worker's phase, and starts what is to be done about
them (:mod:`shared_core.protocol.worker_phase` decides that). Each of these actions has a class of its own, and runs on
a thread of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from shared_core.errors import DamagedRecord, GenerationAbandoned, RecoveryFailed, WaitTimeout
from shared_core.protocol.generation import Entry, generation_key
from shared_core.protocol.rounds import Round
from shared_core.protocol.worker_phase import WorkerAction, WorkerEvent, WorkerPhase
from shared_core.system import threads
from shared_core.waiting import FOREVER_S
from shared_core.worker.fatal_actions import EXIT_STALE, wait_for_change
from shared_core.worker.link import connect_store
from shared_core.worker.recovery.admitting import Admitting
from shared_core.worker.recovery.agreement import Agreement
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.copies import StateCopies
from shared_core.worker.recovery.donor import Donor
from shared_core.worker.recovery.exchange import Exchange, Received
from shared_core.worker.recovery.forming import Forming
from shared_core.worker.recovery.frontier_builder import FrontierBuilder
from shared_core.worker.recovery.listener import RecoveryListener
from shared_core.worker.recovery.resize import Draining
from shared_core.worker.recovery.survivor import Survivor
from shared_core.worker.state.publications import SharedMemoryPublisher


class WorkerRecovery:
    """The recovery of one worker. ``replacement``: this worker takes over from another."""

    def __init__(
        self,
        context: Context,
        publisher: SharedMemoryPublisher,
        donor: Donor,
        copies: StateCopies,
        listener: RecoveryListener,
    ) -> None:
        self.publisher, self._donor, self._copies, self._listener = publisher, donor, copies, listener
        self.begin(context)

    def begin(self, context: Context) -> None:
        """Be that of the worker of ``context``; again in a forked copy of the process."""
        self.env, self.runtime, self.store, self.events = context.env, context.runtime, context.store, context.events
        self.lifecycle, self.fatal_actions = context.lifecycle, context.fatal_actions
        publisher, donor, listener = self.publisher, self._donor, self._listener
        self.replacement = self.env.incarnation > 0
        self._prepared = False
        self._frontier_builder = FrontierBuilder(context, donor, listener)
        self._exchange = Exchange(context, publisher, donor, self._copies)
        agreement = self._agreement = Agreement(context, self._frontier_builder)
        self.forming = Forming(context, publisher, agreement, self._exchange)
        self._admitting = Admitting(context, publisher, self._frontier_builder, self.forming)
        survivor = Survivor(context, donor, agreement, self.forming, listener)
        draining = Draining(context, donor, self._frontier_builder)
        self._threads: dict[WorkerAction, tuple[str, Callable[[Entry], None]]] = {
            WorkerAction.RECOVER: ("swift-recovery", survivor.recover),
            WorkerAction.CARRY_ON: ("swift-recovery", survivor.carry_on),
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
            self._frontier_builder.boundaries = (*self._listener.saved_boundaries(), *self.publisher.boundaries())
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
                    life.wait(lambda seen=generation: life.ended(seen), 0.5)  # type: ignore[misc]
            except RecoveryFailed as error:
                self.fatal_actions.fall_back(str(error))
            except (WaitTimeout, DamagedRecord) as error:
                self.fatal_actions.give_up(error)

    def admit(self, turn: Round) -> Received:
        """Admit replacements that have asked to join; see :meth:`Admitting.admit`.

        Raises:
            GenerationAbandoned: if somebody failed meanwhile, and the replacements are not in.
            WaitTimeout: if a rank does not take part in time.
        """
        with self.lifecycle.acting:
            try:
                return self._admitting.admit(turn)
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
