"""Checkpoints at step boundaries, so that a job whose workers are all gone starts again where it was (``restart``).

At a step boundary each rank hands a snapshot to :mod:`shared_core.checkpoint`: rank-local state at once, parameters and
optimizer state while forward and backward run, which change nothing of them; the next update waits at the fence until
they are copied. A process of the machine writes them to storage, and notes what is committed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from shared_core.checkpoint import lineage
from shared_core.checkpoint.snapshots import Snapshots
from shared_core.checkpoint.spool import FOLDER, Spool, Target
from shared_core.checkpoint.storage import check_place
from shared_core.encoding.plain import dumps
from shared_core.errors import ConfigError, CorruptFile, DamagedRecord, RecoveryFailed, SwiftError, WaitTimeout
from shared_core.events import console, console_once
from shared_core.faults import inject
from shared_core.kinds import whole_of_environment
from shared_core.loaders.reshard import REST, loader_states, order_name, pack_indices, rest_of, used
from shared_core.protocol import progress_file
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.protocol.worker_messages import EARLY_SIGNALS, ENDING, SAVED
from shared_core.waiting import Wait
from shared_core.worker import link
from shared_core.worker.checkpoints import recovery_line, resharding
from shared_core.worker.checkpoints.due import Decisions, FileEntries, StoreEntries
from shared_core.worker.checkpoints.origins import Origins, RunIdentity
from shared_core.worker.checkpoints.pricing import Pricing
from shared_core.worker.checkpoints.recovery_line import Line, Restored, ends_before
from shared_core.worker.recovery.context import Context
from shared_core.worker.state.publications import SharedMemoryPublisher, plain
from shared_core.worker.state.replicated import VALUE, Replicated
from shared_core.worker.state.updates import Updates

#: Longest wait for a checkpoint where each is waited for, in seconds.
_AWAIT_S = 60.0


class Checkpoints:
    """Takes and reads the checkpoints of one rank. Each rank writes a part of its own; the first of each set of
    replicas also writes the replicated state.

    Attributes:
        newest_boundary: step boundary of the newest checkpoint that this rank knows to be committed; 0 for none.
        due_boundary: the newest step boundary at which a checkpoint was due, whether or not it came to be.
        pricing: rank 0 only, and only where a policy decides; else None.
    """

    def __init__(self, context: Context, updates: Updates, presses: Callable[[], bool]) -> None:
        env, self._runtime, self._job_store = context.env, context.runtime, context.store
        self._env, self._fatal_actions, self._events = env, context.fatal_actions, context.events
        self._updates, self._presses, config = updates, presses, env.config
        self._dir = config.checkpoint.dir
        self._every = config.checkpoint.every_steps if config.checkpoint.chosen_policy == "fixed" else 0
        self.newest_boundary = self.due_boundary = 0
        self._fixed = ""
        self._spool = Spool(env.job_dir / FOLDER, env.restart)
        self._snapshots: Snapshots | None = None
        self._decisions: Decisions | None = None
        self.pricing: Pricing | None = None
        self._beginning = ""
        self._level = 0
        self._identity = RunIdentity(env, self._store, context.fatal_actions)
        self.own = OwnLines(env, self._spool, self._identity)
        self.look_at_failed_worker()
        self._origins: Origins | None = None
        if self._dir is None:
            return
        if not env.restart and not env.incarnation:  # storage that fails later costs no running job
            check_place("checkpoint.dir", self._dir)  # a script may have said it
        self._origins = Origins(env, self._dir, self._spool, self._store, lambda: self._identity.session)
        leave_signals_to_the_agent()
        if config.checkpoint.chosen_policy != "none":
            several = len(env.machines) > 1
            path = env.job_dir / f"attempt{env.restart}" / "due"
            self._decisions = Decisions(StoreEntries(self._store) if several else FileEntries(path))
            self._snapshots = _snapshots(env, self._spool, self._dir)
            if env.rank == 0 and config.checkpoint.chosen_policy != "fixed":
                self.pricing = Pricing(config, env.world_size, env.command.key)
        if env.rank == 0:
            link.at_end(self._mark_ended)

    def _store(self) -> Any:
        return self._job_store.below()

    def look_at_failed_worker(self) -> None:
        """A replacement passes step boundaries again, and decides only beyond those of the failed worker."""
        env = self._env
        progress = progress_file.read_progress(env.rank_dir / "progress") if env.incarnation else None
        self._level = progress[0] if progress is not None else 0

    # -- writing -----------------------------------------------------------------------------------

    def at_boundary(self, boundary: StepBoundary, parts: dict[str, Any], publisher: SharedMemoryPublisher) -> None:
        """Make a checkpoint if one is due at this step boundary, which has been published. The last one of a job that
        is about to end is waited for. On one machine this then never returns: the agent ends the process.
        """
        self._say_how_it_begins()
        if self._decisions is None:
            return
        self._look()
        if self._env.rank == 0:
            self._decide(boundary)
        due, last = self._decisions.due(boundary.version)
        due = due or (self._every > 0 and boundary.index % self._every == 0)
        if not due:
            return
        self.due_boundary = boundary.index
        if not self.own.failed_worker_made(boundary.index):
            taken = self._take(boundary, parts, publisher)
            if last or not self._env.config.checkpoint.background:
                self._await(boundary, taken)
        if last:
            self._part_with(boundary)

    def due_at(self, index: int, version: int) -> bool:
        """Whether a checkpoint will be made at this step boundary, the next one to be published, with this version."""
        if self._decisions is None:
            return False
        return (self._every > 0 and index % self._every == 0) or self._decisions.is_due(version)

    @property
    def can_go_back(self) -> bool:
        """Whether this run has a checkpoint, perhaps one that is being written."""
        return self.due_boundary > 0 or self._identity.continues

    def fence(self) -> None:
        """Return when the tensors that are being copied for a checkpoint may be changed. Call before each update."""
        if self._snapshots is not None:
            self._snapshots.fence()

    def near(self, index: int) -> bool:
        """In rank 0: whether a checkpoint may be made at this step boundary, the next one, or soon after it."""
        if self._decisions is None:
            return False
        return (self._every > 0 and index % self._every == 0) or self._decisions.pending >= self._updates.version

    def joined(self, boundary: StepBoundary, *, saved: bool) -> None:
        """This worker begins at a step boundary; ``saved``: there is a checkpoint of it."""
        self.due_boundary = boundary.index if saved else 0
        if self._dir is not None and self._env.incarnation:
            self._identity.hear()
        if self._decisions is not None:
            self._decisions.joined(boundary.version)

    def rolled_back(self) -> None:
        if self.pricing is not None:
            self.pricing.rolled_back()

    def _decide(self, boundary: StepBoundary) -> None:
        """Rank 0 only: append to the list of due checkpoints, before any collective of this batch."""
        assert self._decisions is not None and self._snapshots is not None
        if boundary.index <= self._level:
            return
        if self._is_ending():
            self._decisions.add(boundary.version, last=True)
            return
        if self.pricing is not None:
            self.pricing.name = self._identity.run
            trained = self._updates.replicated
            optimizers = trained.optimizers if trained is not None else ()
            self.pricing.step(boundary.index, self._snapshots.waited_s, boundary.version, optimizers)
        if self._decisions.pending > boundary.version:
            return
        due = self.pricing is not None and self.pricing.due(boundary.index)
        if not due and self._presses():
            due = True
            console_once(
                "log budget",
                f"log.budget_bytes={self._env.config.log.budget_bytes}: checkpoints are made more often than "
                "checkpoint.policy asks for, to make room for logged messages",
            )
        if due:
            self._decisions.add(boundary.version)

    def _is_ending(self) -> bool:
        told = (self._env.job_dir / ENDING).exists()
        if len(self._env.machines) > 1:
            told = told or self._store().check([ENDING])
        if told:
            self._level = 1 << 62  # nothing more is decided
        return told

    def _take(self, boundary: StepBoundary, parts: dict[str, Any], publisher: SharedMemoryPublisher) -> bool:
        assert self._snapshots is not None
        inject.point("checkpoint.write")
        started = time.perf_counter()
        if not boundary.replicas:
            _note_orders(parts, publisher)
        rank = self._env.rank
        taken = False
        try:
            local = {
                "boundary": asdict(boundary),
                "parts": parts,
                "ends": ends_before(publisher, boundary.entry),
                "records": plain(publisher.records.read()),
                resharding.FIXED: self._fixed,
            }
            images = {}
            if rank == min(boundary.replicas, default=0):
                with self._updates.frozen(boundary.version, 60.0, boundary.index) as (description, tensors):
                    if not self._updates.exact or description.get("version", boundary.version) != boundary.version:
                        return False  # a replacement that is still behind: the parameters of this boundary are gone
                for place in self._updates.outside.local:  # the script may change them while they are being read
                    tensors[place] = tensors[place].clone()
                images[recovery_line.replicated_part(boundary)] = named(self._updates.replicated, description, tensors)
            self._snapshots.into(self._identity.folder)
            taken = self._snapshots.take(
                boundary.index, {recovery_line.local_part(rank): dumps(local)}, images, self._identity.meta(boundary)
            )
        except (SwiftError, OSError) as error:
            generation = self._runtime.generation
            console(f"rank {rank}: no checkpoint at step boundary {boundary.index}: {error}")
            self._events.emit("warning", rank=rank, generation=generation, message=str(error))
        if self.pricing is not None:
            self.pricing.begun(boundary.index, time.perf_counter() - started, taken)
        return taken

    # -- what the writer says ----------------------------------------------------------------------

    def _look(self) -> None:
        status = self._spool.news()
        if status is None:
            return
        committed = status.committed
        if committed.get("session") == self._identity.session:
            self.newest_boundary = max(self.newest_boundary, int(committed["step"]))
        if self.pricing is not None:
            self.pricing.heed(self.newest_boundary, status.failed)

    def _await(self, boundary: StepBoundary, taken: bool) -> bool:
        """Whether the checkpoint gets committed within ``_AWAIT_S``. A failure ends the wait: a part may never come."""
        if not taken or self._snapshots is None:
            return False
        self._snapshots.fence()
        runtime = self._runtime
        generation, limit_s, done = runtime.generation, min(self._env.config.detection.wait_timeout_s, _AWAIT_S), False
        what, ends = f"the checkpoint at step boundary {boundary.index} to be committed", "it continues without it"
        speaks = lambda: self._env.rank == 0  # noqa: E731 (all ranks wait for the same)
        wait = Wait("rank 0", what, limit_s, bound="detection.wait_timeout_s, at most 60 s", ends=ends, speaks=speaks)
        with suppress(WaitTimeout):
            while not done and runtime.latest == generation:
                wait.look()
                done = self._spool.wait_committed(boundary.index, 0.05)
                if not done and self._spool.status().failed >= boundary.index:
                    break
        self._look()
        return done

    def _part_with(self, boundary: StepBoundary) -> None:
        """The last checkpoint is made, or cannot be: tell the agent, then wait to be killed. On several machines this
        returns: the others may continue.
        """
        if self._env.rank == 0:
            done = self.newest_boundary >= boundary.index
            if done and self.pricing is not None:
                self.pricing.ended("stopped")
            self._job_store.tell(SAVED, {"boundary": boundary.index, "done": done})
        if len(self._env.machines) < 2:
            while True:
                threading.Event().wait()

    def keep_number(self, reason: str) -> None:
        """Checkpoints made from now on serve no other number of workers; the reason is shown to the user."""
        self._fixed = reason

    def _mark_ended(self) -> None:
        if self.pricing is not None:
            self.pricing.ended("completed")
        if not self.due_boundary and not self._identity.continues:
            return
        try:
            lineage.mark_ended(self._identity.folder, self.newest_boundary)
        except (OSError, SwiftError) as error:
            if not self.newest_boundary:
                return  # nothing was ever written
            console(f"the end of this run cannot be noted in {self._dir}: {error}")

    # -- reading -----------------------------------------------------------------------------------

    def newest(self) -> Restored | None:
        """What this attempt starts from; None for nothing. All ranks call this and get the same one.

        It is the newest checkpoint that all ranks can read: of earlier attempts, of a job of the same command that did
        not end well, or the one of ``checkpoint.resume_from``. Raises Unsupported if all there are were made by other
        numbers of workers and this number cannot continue from them; if there is none at ``checkpoint.resume_from``.
        """
        if self._origins is None:
            return None
        runtime = self._runtime
        # At the start nobody failed: a script comes here when it does, as without this product.
        limit_s = runtime.groups.longest_s(runtime.world) if runtime.world is not None else None
        try:
            loaded = self._origins.choose(limit_s)
        except (WaitTimeout, DamagedRecord) as error:
            self._fatal_actions.give_up(error)
        if loaded is None:
            self.start_from_scratch()
            return None
        line = loaded.line
        assert line is not None
        self._identity.take_up(line, self._origins.told)
        if line.adopts:
            self._beginning = self._origins.adopted(line)
        if self.pricing is not None:
            self.pricing.went_back = True
        return loaded

    def start_from_scratch(self) -> None:
        """Find out what checkpoints this attempt leaves behind, to say so when training begins."""
        self._beginning = self._origins.left_behind() if self._origins is not None else ""

    def _say_how_it_begins(self) -> None:
        if self._beginning:
            console(self._beginning)
            self._beginning = ""
        if self._dir is None and self._env.config.checkpoint.resume_from and not self._env.incarnation:
            raise ConfigError("checkpoint.resume_from needs checkpoint.dir: say where this job's own checkpoints go")


def named(
    replicated: Replicated | None, description: Mapping[str, Any], tensors: list[torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The replicated state as an image: tensors by name (not copied), and JSON texts of all else.

    Parameters have their fully qualified names, without the ``module.`` of ``DistributedDataParallel``; optimizer state
    is ``optimizer.N.KEY.PARAMETER``, ``N`` the optimizer's place. Raises RecoveryFailed if there are more or fewer
    tensors than names.
    """
    count = int(description["parameters"])
    names = recovery_line.parameter_names(replicated)[:count] if replicated is not None else []
    for number, place, entries in description["states"]:
        names += [f"optimizer.{number}.{key}.{names[place]}" for key, kind, _ in entries if kind != VALUE]
    if len(names) != len(tensors):
        raise RecoveryFailed(f"{len(tensors)} tensors of the replicated state have {len(names)} names")
    return dict(zip(names, tensors, strict=True)), {
        recovery_line.DESCRIPTION: json.dumps(dict(description) | {"images": []}),
        recovery_line.NAMES: json.dumps(names),
    }


def _note_orders(parts: dict[str, Any], publisher: SharedMemoryPublisher) -> None:
    """Add to the states of loaders, in place, the rest of their pass: the publications that hold it will be gone."""
    for _, state in loader_states(parts):
        if not state["live"] or REST in state:  # it has not continued since it was restored
            continue
        last = state["iterations"][-1]
        if last["dealt"]:
            if "indices" not in state:
                state["indices"] = publisher.orders.read(order_name(state))
            state[REST] = rest_of(pack_indices(state["indices"]), used(state))
        elif last["order"] and used(state):
            state[REST] = rest_of(publisher.orders.read_packed(order_name(state)), used(state))


def _snapshots(env: WorkerEnv, spool: Spool, where: str) -> Snapshots:
    nproc = whole_of_environment("LOCAL_WORLD_SIZE", 1)
    first = env.rank - env.rank % nproc
    target = Target(where, env.config.checkpoint.keep, env.config.checkpoint.quota_bytes)
    return Snapshots(spool, env.rank, env.world_size, range(first, min(first + nproc, env.world_size)), target, console)


def leave_signals_to_the_agent() -> None:
    """Ignore the signals that SLURM sends to every process of a step: the agent gets them and ends the workers itself.

    A handler that the program has set stays. So does SIGTERM's default outside SLURM, where it is sent to one worker.
    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (*EARLY_SIGNALS, *((signal.SIGTERM,) if "SLURM_JOB_ID" in os.environ else ())):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)


class OwnLines:
    """Checkpoints that the present attempt has made: recovery lines of its replacements."""

    def __init__(self, env: WorkerEnv, spool: Spool, identity: RunIdentity) -> None:
        self._env, self._spool, self._identity = env, spool, identity
        self._of_failed_worker: set[int] | None = None

    def boundaries(self) -> list[StepBoundary]:
        """Step boundaries at which this rank's state can be read, oldest first. Reads all; damaged ones are told."""
        found: dict[int, StepBoundary] = {}
        for line in self._all():
            if line.step in found:
                continue
            try:
                found[line.step] = replace(recovery_line.load(line, self._env.rank).boundary, saved=True)
            except CorruptFile as error:
                console(f"rank {self._env.rank}: a checkpoint is passed over: {error}")
        return [boundary for _, boundary in sorted(found.items())]

    def at(self, index: int) -> Restored:
        """The checkpoint at a step boundary; raises CorruptFile if it cannot be read, or is gone."""
        for line in self._all():
            if line.step == index:
                return recovery_line.load(line, self._env.rank)
        where = self._env.config.checkpoint.dir
        raise CorruptFile(f"rank {self._env.rank}: the checkpoint at step boundary {index} is gone from {where}")

    def failed_worker_made(self, step: int) -> bool:
        """Whether an earlier incarnation of this rank made it. Reads the list once, at the first call."""
        if not self._env.incarnation:
            return False
        if self._of_failed_worker is None:
            self._of_failed_worker = {each.step for each in self._all()}
        return step in self._of_failed_worker

    def _all(self) -> list[Line]:
        # Operations are counted from the start of an attempt: logs go with its own checkpoints.
        env = self._env
        if env.config.checkpoint.dir is None:
            return []
        found = recovery_line.in_memory(self._spool, env.rank, env.world_size)
        found += recovery_line.in_storage(lineage.read(self._identity.folder, env.command.key), env.world_size)
        return [each for each in found if each.session == self._identity.session]
