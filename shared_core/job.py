"""The one face adapters use: attach what is trained, mark the batch tops, register what only this rank has.

A newcomer runs the user's script from the start like its predecessor did; in its first :meth:`Job.batch_top` of the
right entry call it joins: it gets the
replicated state from a survivor and the rank-local state that its predecessor had published, and from there on it
runs the predecessor's batch again with
logged results until it is level with the others.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from shared_core.config import CHECKPOINT_OPTIONS, SCRIPT_OPTIONS, SwiftConfig, full_names, variable_of
from shared_core.errors import ConfigError, Unsupported
from shared_core.faults import inject
from shared_core.handover import NOT_TOLD
from shared_core.protocol import worker_env
from shared_core.protocol.frontier import Top
from shared_core.protocol.keys import CHECKPOINTS
from shared_core.worker import link
from shared_core.worker.checkpoints.checkpoints import Checkpoints
from shared_core.worker.checkpoints.restored import Restored
from shared_core.worker.comm import install as install_backend
from shared_core.worker.recovery.lane import Lane
from shared_core.worker.recovery.reporting import Listener
from shared_core.worker.recovery.starting_place import Beginning
from shared_core.worker.state.attached import Attached
from shared_core.worker.state.local_state import Capture, Restore
from shared_core.worker.state.publications import LOOSE, Orders, Tally
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.unstepped import Loose
from shared_core.worker.wiring import Worker, wire

#: Tops without a recovery point until pending gradients are published along with the top.
_MAX_DEFERRED = 16


@dataclass(frozen=True)
class EntryDecision:
    """What to do with an entry call (fit, validate, test, predict).

    Attributes:
        skip: the predecessor had finished it: return ``result`` at once.
        result: what it returned.
    """

    skip: bool
    result: Any = None


class Job:
    """The fault-tolerant job as one worker sees it. One per process, made by :func:`current_job`.

    Attributes:
        rank: logical rank.
        world_size: number of logical ranks.
        incarnation: this is the n-th worker that holds the rank, from 0.
        config: the options of the job.
        attempt: number of times that all workers have been started again.
        resized: what is being restored is that of another number of workers.
        added: what is being restored is a copy of another rank's, because this one has been added.
        rejoined: this worker has been let in by others that had gone on without its predecessor; whoever acts on it
            sets it back.
        alike: all ranks train the same, although it is not wrapped in ``DistributedDataParallel``: they are compared
            after recoveries.
        reachable: a fresh worker that runs the script gets to the present place; elsewhere no checkpoint is written.
        replays: for pipelines whose newcomers run on from a checkpoint.
    """

    def __init__(self, worker: Worker) -> None:
        env = worker.env
        self.rank, self.world_size, self.incarnation, self.config = (
            env.rank,
            env.world_size,
            env.incarnation,
            env.config,
        )
        self._worker, self._env, self._position = worker, env, worker.position
        self._said = env.config.changed
        self.attempt = env.restart
        self._replica_ranks: list[int] = []
        self.reachable, self.alike = True, False
        self.resized = self.added = self.rejoined = False
        self._deferred = 0
        self._keeps_tops = False
        self._handles: list[Any] = []
        self._board, self._progress, self._updates = worker.board, worker.progress, worker.updates
        self._runtime, self._lanes = worker.runtime, worker.lanes
        self._donor, self._replicas, self._parts = worker.donor, worker.replicas, worker.parts
        self._buckets, self._passes, self._news = worker.buckets, worker.passes, worker.news
        self._commits, self.replays = worker.commits, worker.replays

    @property
    def _checkpoints(self) -> Checkpoints:
        return self._worker.start.checkpoints

    @property
    def _beginning(self) -> Beginning:
        return self._worker.start.beginning

    @property
    def orders(self) -> Orders | None:
        """The passes over the data whose rest may be dealt out to another number of workers; None where it is not."""
        return self._worker.start.orders

    @property
    def tops(self) -> int:
        """Batch tops passed by the logical rank."""
        return self._position.tops

    # -- what adapters call ------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Optimizer steps applied."""
        return self._updates.state_version

    @property
    def joining(self) -> bool:
        """Whether this is a newcomer (or a worker restarted from a checkpoint) that has not joined yet."""
        return self._beginning.joining

    def check_told(self, options: Mapping[str, Any]) -> None:
        """See that options of the script which the whole job goes by were told to the launcher. Where it was told
        another value, that one wins.

        Args:
            options: of the script, by name.

        Raises:
            ConfigError: names one that was not.
        """
        options = full_names(options)
        wanted = SwiftConfig.from_dict(options)
        for name in options.keys() - SCRIPT_OPTIONS - self._said.keys():
            value = wanted.get(name)
            if value != self.config.get(name):
                raise ConfigError(f"rank {self.rank}: {name}={value!r}{NOT_TOLD.format(variable_of(name), value)}")

    def use_checkpoints(self, options: Mapping[str, Any]) -> None:
        """Have checkpoints made although the launcher was not told. All ranks call this, with the same, before there is
        a process group; nothing happens where the launcher was told the same, whose options win.

        Args:
            options: of the script, by name; only those of ``CHECKPOINT_OPTIONS`` count.

        Raises:
            ConfigError: for a bad value, or where training has begun.
        """
        wanted = {name: value for name, value in full_names(options).items() if name in CHECKPOINT_OPTIONS}
        config = self.config.merged(wanted, self._said)
        if config == self.config:
            return
        if self.in_charge or self._checkpoints.newest_top:
            raise ConfigError(
                f"rank {self.rank}: options of checkpoints came when there was a process group already: give them to "
                "the first Trainer or Accelerator (transformers: before TrainingArguments), or to swiftrun"
            )
        self.config = config
        self._env = replace(self._env, config=config)
        self._worker.begin(self._env)
        self._worker.store.tell(CHECKPOINTS, {name: config.get(name) for name in sorted(CHECKPOINT_OPTIONS)})

    def attach(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        replicas: Sequence[int] | None = None,
        sharded: bool = False,
    ) -> None:
        """Say what is trained. Parameters of ``modules`` and the state of ``optimizers`` are replicated state;
        buffers, modes, groups of the optimizers and random generators are published at each batch top, and so are
        parameters that no optimizer steps. A later call replaces an earlier one.

        Args:
            modules: all modules that are trained, wrapped in ``DistributedDataParallel`` where they are, and those that
                the script changes itself: averages, target networks.
            optimizers: their optimizers.
            replicas: ranks that train the same parameters, where not all do: those of this rank's pipeline stage. Then
                parameters are also kept before each update, because a message that a lost rank has not delivered must
                be computed with the parameters that it had, which its replica may have updated.
            sharded: each replica has a part of the optimizer's state to itself. ``optimizers`` is empty then; the
                caller registers the state, and makes each update inside :meth:`update`.

        Raises:
            Unsupported: for parameters that are not on the CPU, for DDP with ``static_graph``, and for DDP with
                ``on_failure="reroute"``.
            UnsupportedOptimizer: for an optimizer whose state cannot be moved.
        """
        for module in modules:
            for name, parameter in module.named_parameters():
                if parameter.device.type not in ("cpu", "meta"):
                    raise Unsupported(
                        f"rank {self.rank}: parameter {name} is on {parameter.device}; swift recovery supports CPU "
                        "training in this version. "
                        "Choose accelerator='cpu', or train without this plugin."
                    )
        self._buckets.attach(modules)
        if self._buckets.modules and self.reroutes:
            raise Unsupported(
                "on_failure='reroute' needs a loop in which any worker can compute the share of a lost one, and "
                "DistributedDataParallel sums what each has computed itself: attach the model without it and loop over "
                "job.shared_steps(loader, epochs) (with Accelerate: plugin.shared_steps), or choose "
                "on_failure='replace'"
            )
        for handle in self._handles:
            handle.remove()
        self._handles = [ddp.register_forward_hook(self._passes.after_forward) for ddp in self._buckets.modules]
        replicated = Replicated(modules, optimizers)
        alike = replicas is None and not sharded
        self._loose = Loose(replicated, {id(p) for ddp in self._buckets.modules for p in ddp.parameters()})
        # What a re-routed step changes outside updates is in a newcomer's copy; pipelines keep images of their own.
        loose = self._loose if alike and not self.reroutes else None
        self._updates.attach(replicated, undo=self.config.resizes, sharded=sharded, loose=loose)
        if self._keeps_tops:
            self._updates.outside.expect()
        if replicas is not None:
            self._attach_stage(sorted(replicas))
        if not self.config.log.spill_bytes:
            # Of two steps: gradients (in fp32 at most) and, of a sharded stage, gathered parameters.
            extra = 4 * sum(p.numel() for p in replicated.parameters) if sharded else 0
            self._runtime.results.limit(max(2 * (replicated.nbytes + extra), 4 << 20))
        attached = Attached(modules, replicated, alike=alike)
        self._passes.attach(attached.buffers)
        self.register("swift.ddp", self._buckets.flags, self._buckets.set_flags)
        self._runtime.sum_buckets(self.config.state.verify_checksums and not self._buckets.may_be_unused)
        self.register("swift.buffers", attached.buffers, attached.restore_buffers, forward_mutated=True)
        self.register("swift.modes", attached.modes, attached.restore_modes)
        self.register("swift.hyperparameters", attached.groups, attached.restore_groups)
        self.register(LOOSE, self._capture_loose, self._loose.restore)
        if (optimizers or sharded) and os.environ.get("SWIFT_FAULTS") and modules:
            self._handles.append(modules[0].register_forward_hook(lambda *_: inject.point("forward")))

    def keep_tops(self) -> None:
        """The script will change parameters or optimizer state outside updates. That is seen anyway, but only when it
        has been done for the first time; a worker that is lost in that very batch cannot be replaced then.
        """
        self._keeps_tops = True
        self._updates.outside.expect()

    def _capture_loose(self) -> dict[int, torch.Tensor]:
        return self._loose.capture() if self._updates.outside.active or self.reroutes else {}

    def _attach_stage(self, replicas: list[int]) -> None:
        if self.config.resizes:
            raise Unsupported(
                "the number of workers of a pipeline cannot change: use on_failure='replace' without "
                "replace_timeout_s, or 'restart'"
            )
        self._replica_ranks = replicas
        alone, wanted = len(replicas) == 1, self.config.log.messages
        if not alone:
            self._updates.keep_images(at_once=True)
        if wanted == "always" or (wanted == "auto" and alone):
            self._runtime.results.log_to_disk()

    def register(
        self, name: str, capture: Capture, restore: Restore, *, forward_mutated: bool = False, main: bool = False
    ) -> None:
        """Register rank-local state; see :meth:`Parts.register`."""
        self._parts.register(name, capture, restore, forward_mutated=forward_mutated, main=main)

    def unregister(self, name: str) -> None:
        """Forget a registered part."""
        self._parts.unregister(name)

    def batch_top(self, *, accumulating: bool = False) -> bool:
        """Call at the very top of each batch, before anything random and any collective of it.

        Args:
            accumulating: gradients of earlier micro-batches are pending, so this is no recovery point.

        Returns:
            Whether this process has just joined; then everything registered was restored to the predecessor's batch
            top.
        """
        inject.point("batch_top")
        self._news.deliver()
        if self._beginning.is_here("batch", self._position.entry):
            self._join()
            return True
        self._position.tops += 1
        self._progress.top(self.tops)
        self._updates.next_batch()
        if accumulating:
            return False
        grads = None
        if self._updates.pending_gradients():
            self._deferred += 1
            # Gradients of a worker that is lost could not be dealt out to others.
            if self._deferred <= _MAX_DEFERRED or self.config.resizes:
                return False
            grads = self._gradients()
        if self._buckets.unsettled():  # counts the tops that could be recovery points, so it is asked last
            return False
        self._deferred = 0
        with self._donor.publishing:
            self._publish("batch", grads)
        return False

    def at_end(self, call: Callable[[], None]) -> None:
        """Have ``call`` run when the program has ended without an error, before this worker is done."""
        link.at_end(call)

    def take_back(self) -> None:
        """The last update was undone, and is made anew."""
        self._updates.take_back()

    def update(self) -> AbstractContextManager[None]:
        """What an update of a sharded stage is made in, from its first change to a parameter to its last; see
        :meth:`attach`.
        """
        return self._updates.update()

    def mark(self) -> None:
        """Call right after :meth:`batch_top` where a batch has no collective of all ranks; see :meth:`Commits.mark`."""
        if not self.reroutes:  # steps make no log
            self._commits.mark()

    def eval_top(self) -> bool:
        """As :meth:`batch_top`, at the start of a stand-alone evaluation."""
        self._news.deliver()
        if self._beginning.is_here("eval", self._position.entry):
            self._join()
            return True
        self._position.tops += 1
        self._progress.top(self.tops)
        with self._donor.publishing:
            self._publish("eval")
        return False

    def entry(self, name: str) -> EntryDecision:
        """Call at the start of each entry call (fit, validate, test, predict); they are numbered.

        Returns:
            Whether the predecessor had finished it, and its result. Then the registered parts are restored to what
            they were at its end, except those of what is attached, which may be from another call.
        """
        inject.point("entry")
        self._beginning.prepare()
        self._position.entry += 1
        self._runtime.enter_call(self._position.entry)
        finished = self._beginning.finished(self._position.entry)
        if finished is None:
            return EntryDecision(False)
        result, parts = finished
        self._parts.restore(parts, attached=False)
        return EntryDecision(True, result)

    def end_top(self) -> None:
        """Call after a skipped entry call, when all that it makes has been made: a newcomer joins here whose
        predecessor was between this call and the next.
        """
        if self._beginning.is_here("end", self._position.entry):
            self._join()
        self._leave_entry()

    def between_calls(self) -> None:
        """What the script does from here to the next batch top a newcomer does again, whose place is further on: small
        results of collectives are kept for it.
        """
        self._runtime.start_up_again()

    def _leave_entry(self) -> None:
        """What the script does between two entry calls is start-up, too, with operations that are counted apart."""
        self._runtime.enter_call(-2 - self._position.entry)

    def entry_done(self, result: Any) -> None:
        """Call at the end of each entry call. What is registered must hold everything that the script finds after it,
        what is trained too: peers go on, and could not give it later.

        Args:
            result: plain data; what a newcomer that finds the entry finished returns for it.
        """
        if self.joining:
            return
        self._news.deliver()
        self._position.tops += 1
        parts = self._parts.capture()
        self._board.publish_end(self._position.entry, result, parts)
        with self._donor.publishing:
            self._publish("end")
        self._leave_entry()

    def peek(self, name: str) -> Any:
        """The predecessor's newest published value of a registered name, or None; for what must be known before the
        join (log file names).
        """
        return self._beginning.peek(name)

    def remember(self, kind: str, name: str, value: Any) -> None:
        """Keep plain data for newcomers of this rank, for the whole job; see :meth:`remembered`."""
        self._board.record((self._position.entry, kind, name, self.tops), value)

    def remembered(self, kind: str) -> dict[str, Any]:
        """What predecessors have kept under ``kind``, by name; the newest of each."""
        return self._beginning.remembered(kind)

    def tally(self, name: str) -> Tally:
        """A number that a newcomer finds as its predecessor left it: how often something was done that must not be
        done twice.
        """
        return self._board.tally(name)

    def keep_number(self, reason: str) -> None:
        """Checkpoints that are made from now on serve no other number of workers.

        Args:
            reason: why, for people.
        """
        self._checkpoints.fixed = reason

    @property
    def in_charge(self) -> bool:
        """Whether the default process group is one that survives failures."""
        return self._runtime.world is not None

    def fall_back(self, reason: str) -> NoReturn:
        """Nobody can take the lost worker's place: all workers go back to the newest checkpoint. Does not return."""
        self._worker.endings.fall_back(reason)

    @property
    def folder(self) -> Path:
        """Private to the job, shared by its workers on this machine, and removed with it."""
        return self._env.job_dir

    @property
    def checkpoint_near(self) -> bool:
        """In rank 0: whether a checkpoint may be made at the next batch top. What it counts as written must be."""
        return self._checkpoints.near(self.tops + 1)

    @property
    def checkpoint_due(self) -> bool:
        """Whether a checkpoint was due at the present batch top; all ranks agree on it."""
        return self.tops > 0 and self._checkpoints.due_top == self.tops

    def note_loss(self, loss: torch.Tensor | float) -> None:
        """The training loss of this batch, from which a policy learns what progress is worth. Rank 0's counts; a tensor
        is not read at once.
        """
        if (pricing := self._checkpoints.pricing) is not None:
            pricing.loss(self.tops, loss)

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to the job's log."""
        self._news.emit(kind, **fields)

    def unchecked(self) -> AbstractContextManager[None]:
        """Inputs of collectives in here are not compared with the predecessor's: they rest on the clock or on files."""
        return self._runtime.unchecked()

    def on_recovered(self, listener: Listener) -> None:
        """Have ``listener`` called with the fields of each recovery, on the main thread, at the next batch top
        after it.
        """
        self._news.listen(listener)

    # -- going on without a lost rank --------------------------------------------------------------

    @property
    def reroutes(self) -> bool:
        """Whether the others go on at once when a rank is lost (``on_failure="reroute"``)."""
        return self.config.on_failure == "reroute"

    @property
    def absent(self) -> frozenset[int]:
        """Ranks that were lost and have not been let in again, as of the newest announcement."""
        return self._runtime.absent

    @property
    def ahead(self) -> int:
        """Updates that the state contains already and this worker, let in or behind, has still to go through: they
        do nothing.
        """
        return self._updates.state_version - self._updates.version

    def before_collectives(self, call: Callable[[], None]) -> None:
        """Have ``call`` run before a collective of all ranks while some are absent; also for one that waits already
        when they are lost, on another thread then. It lets them in. The newest ``call`` counts.
        """
        self._lanes.before_collectives(call)

    def issued(self) -> int:
        """Collectives that this worker has issued, of all groups."""
        with self._runtime.lock:
            return sum(group.next for group in self._runtime.groups.values())

    def lane(self) -> Lane:
        """Connect the ranks that are present; returns when all of them have called this. See :class:`Lane`.

        A worker that uses lanes does all communication of its training steps over them. Ask again when one breaks. If a
        rank does not come in the time-out of the process group, the job ends.
        """
        return self._lanes.lane()

    def knocking(self, *, wait: bool = False) -> tuple[int, ...]:
        """The absent ranks, if newcomers of all of them wait to be let in; else none.

        Ask on one rank, right after :meth:`batch_top`, and tell the others: they may see it later.

        Args:
            wait: block until they do, or another rank is lost; otherwise this returns at once. If they do not come in
                ``rejoin_after_s`` and ``wait_timeout_s``, the job ends.
        """
        return self._lanes.knocking(self._position.entry, wait=wait)

    def let_in(self, ranks: Sequence[int]) -> bool:
        """Let newcomers in, each as a copy of one of its replicas as it has published itself at the last batch top,
        random generators included. All members of the newest lane call this after the same :meth:`batch_top`: right
        after it, or after the step that followed and before anything else that communicates. Newcomers then run the
        batch from its top, and have :attr:`ahead`.

        Args:
            ranks: what :meth:`knocking` gave.

        Returns:
            Whether they are in. If not, another rank was lost meanwhile. In both cases ask for the next lane.
        """
        return self._lanes.let_in(ranks)

    # -- publishing --------------------------------------------------------------------------------

    def _publish(self, kind: str, grads: dict[int, torch.Tensor] | None = None, *, save: bool = True) -> None:
        self._updates.outside.see()
        parts = self._parts.capture()
        parts["swift.outside"] = self._updates.outside.active
        parts["swift.eligible"] = self._buckets.eligible
        parts["swift.images"] = self._updates.keeps_images
        if grads is not None:
            parts["swift.gradients"] = grads
        runtime = self._runtime
        with runtime.lock:
            groups = {name: group.next for name, group in runtime.groups.items()}
            marks = {name: group.channels.watermarks() for name, group in runtime.groups.items()}
        top = Top(
            index=self.tops,
            version=self._updates.version,
            entry=self._position.entry,
            kind=kind,
            groups=groups,
            received={name: mark[0] for name, mark in marks.items() if mark[0]},
            sent={name: mark[1] for name, mark in marks.items() if mark[1]},
            members={name: list(group.ranks) for name, group in runtime.groups.items()},
            replicas=self._replica_ranks,
        )
        values = parts.get(LOOSE)
        refers = {LOOSE: self._loose.publish(self._board, top.index, values)} if values else {}
        self._board.publish_top(top, parts | refers)
        stable = runtime.passed_top(top.index)
        if self._lanes.formed:
            stable = top.index  # a newcomer is a copy of a replica as it is at its newest top
            runtime.results.settle(stable)
        self._board.drop_before(stable)
        self._updates.at_top(top.index, stable)
        self._passes.at_top()
        alike = self._buckets.modules or self.alike
        self._replicas.compare(self._replica_ranks or range(self.world_size if alike else 0))
        if save and kind == "batch" and self.reachable and not self.absent:
            self._checkpoints.at_top(top, parts, self._board)

    def _gradients(self) -> dict[int, torch.Tensor]:
        assert self._updates.replicated is not None
        return {i: p.grad for i, p in enumerate(self._updates.replicated.parameters) if p.grad is not None}

    # -- joining -----------------------------------------------------------------------------------

    def _join(self) -> None:
        inject.point("join")
        started = time.time()
        place, received = self._beginning.reach(self._position.entry, self._replica_ranks)
        let_in = received is not None and place.added
        if received is not None:
            self.replays.own = received.replaying
        self._updates.load(place.top.version, place.description, place.tensors)
        self._buckets.settle(place.records, place.top)
        self.resized, self.added = place.resized, place.added
        self._take_place(place)
        self.resized = self.added = False
        self.rejoined = let_in
        self._news.began(place.top.index, self._beginning.reached(place))
        if let_in or received is None:
            # Where a checkpoint is there already, or others make none, none is made.
            self._publish(place.top.kind, save=not (let_in or place.tier))
        if received is not None:
            self._news.joined(received, **({} if let_in else {"joined_s": time.time() - started}))

    def _take_place(self, place: Restored) -> None:
        parts = place.parts | self._parts.of_main(place.main)
        self._position.tops = place.top.index
        self._checkpoints.joined(place.top, saved=bool(place.tier))
        self._beginning.joining = False
        self._parts.restore(parts)
        for index, grad in parts.get("swift.gradients", {}).items():
            assert self._updates.replicated is not None
            self._updates.replicated.parameters[index].grad = grad
        self._buckets.eligible = parts.get("swift.eligible", 0)
        images, outside = parts.get("swift.images", False), parts.get("swift.outside", False)
        self._updates.resume(self.tops, images=images, outside=outside)
        inject.set_step(self.tops)
        self._progress.top(self.tops)


_job: Job | None = None


def current_job() -> Job | None:
    """The job of this process; None when it was not started by ``swiftrun``."""
    global _job
    if _job is None and worker_env.launched():
        _job = Job(wire(worker_env.env()))
        atexit.register(_job._news.memory)
    return _job


def install() -> Job | None:
    """Make every gloo group created from now on one that survives failures. Outside ``swiftrun`` this does nothing
    and returns None.
    """
    job = current_job()
    if job is not None:
        install_backend(job._runtime)
    return job
