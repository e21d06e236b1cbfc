"""Checkpoints of a script in plain PyTorch, without ``swiftrun``: one process, or data parallel under torchrun.

It measures what a checkpoint costs and decides when the next one pays; the script names what it trains and nothing
else. Nobody replaces a failed worker here: the next start of the script continues from the newest checkpoint, in the
middle of an epoch, with the bits of a run that was not interrupted.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.optim import Optimizer

from shared_core.checkpoint import image, lineage, store
from shared_core.checkpoint.command import Command
from shared_core.checkpoint.run_lock import WAIT_S, RunLock
from shared_core.checkpoint.snapshots import Snapshots
from shared_core.checkpoint.spool import FOLDER, Spool, Target
from shared_core.checkpoint.storage import absolute, open_storage
from shared_core.checkpoint.verdict import verdict
from shared_core.codec import Count, decode, text
from shared_core.config import CheckpointOptions, SwiftConfig, full_names
from shared_core.encoding.plain import dumps, loads
from shared_core.errors import ConfigError, Unsupported, WaitTimeout
from shared_core.events import console
from shared_core.job import Job, current_job
from shared_core.kinds import whole_of_environment
from shared_core.launcher.persisting import Persisting
from shared_core.loop import LoopProgress, TrainingLoop
from shared_core.sharing import SharedStep
from shared_core.system.jobdir import JobDir
from shared_core.waiting import Wait, wait_for
from shared_core.worker.checkpoints.checkpoints import named
from shared_core.worker.checkpoints.due import Decisions, FileEntries, StoreEntries
from shared_core.worker.checkpoints.pricing import Pricing
from shared_core.worker.checkpoints.recovery_line import DESCRIPTION, NAMES
from shared_core.worker.state.attached import Attached
from shared_core.worker.state.external_mutation import ChangeWatch, UnoptimizedParameters
from shared_core.worker.state.local_state import Capture, Restore, StateParts
from shared_core.worker.state.replicated import Replicated

#: File of parameters and optimizer state; all ranks have the same.
_REPLICATED = "replicated0.safetensors"
#: Number of checkpointers that this process has made; all ranks make them in the same order.
_made = 0


class Checkpointer(TrainingLoop):
    """Checkpoints when they pay, written while training continues, and the loop that continues from them.

    Example::

        checkpointer = shared_core.Checkpointer("checkpoints", model, optimizer, scheduler)
        for epoch in checkpointer.epochs(10):
            sampler.set_epoch(epoch)
            for step, batch in checkpointer.steps(loader):
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                checkpointer.note_loss(loss)  # optional: only the policies value (with a price) and coci look at it

    With several processes create the process group first, and put ``DistributedDataParallel`` around the models: all
    ranks must have the same parameters. SIGTERM, which clouds and schedulers send before they take a machine away,
    makes a last checkpoint and ends the process with status 143. It is enough that one rank gets it: all end.

    Args:
        folder: for checkpoints: a path, or a URL that fsspec knows. Shared by all machines.
        objects: models, optimizers (at least one), loaders, and whatever else has ``state_dict`` (schedulers, scalers,
            averages).
        options: of :class:`~shared_core.config.CheckpointOptions`, such as ``policy`` or ``keep``: ``resume="never"``
            starts from scratch, ``resume_from=FOLDER`` begins with a checkpoint of another command.

    Raises:
        ConfigError: for a wrong option, without an optimizer, or under ``swiftrun``, which makes checkpoints itself.
        Unsupported: for models whose parameters are spread over ranks.
    """

    def __init__(self, folder: str | os.PathLike[str], *objects: Any, **options: Any) -> None:
        if current_job() is not None:
            raise ConfigError(
                "under swiftrun the job makes checkpoints itself: use shared_core.attach() and the option "
                "checkpoint.dir, or start the script with python or torchrun"
            )
        where = os.fspath(folder)
        config = SwiftConfig.from_dict(
            {"checkpoint.resume": "always", "checkpoint.dir": where} | _of_checkpoints(options)
        )
        models = [each for each in objects if isinstance(each, nn.Module)]
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        if not optimizers:
            raise ConfigError(
                "a Checkpointer needs the optimizer: a checkpoint is made between two of its steps; pass it the "
                "torch.optim.Optimizer itself, not a wrapper"
            )
        self._alone = OneProcess(config, models, optimizers)
        progress = LoopProgress()
        progress.begin(cast(Job, self._alone), config)  # it has all of a job that a loop asks for
        super().__init__(progress, models)
        for each in objects:
            if isinstance(each, torch.utils.data.DataLoader):
                progress.loaders.attach(each)
            elif not isinstance(each, (nn.Module, Optimizer)):
                self.register(each)

    def epochs(self, count: int, start: int = 0) -> Iterator[int]:
        """Numbers from ``start`` up to ``count``; after a restart from the one in which the checkpoint was made."""
        yield from super().epochs(count, start)
        self._alone.complete = True

    def shared_steps(self, *args: Any, **options: Any) -> Iterator[SharedStep]:
        """Not here.

        Raises:
            Unsupported: always.
        """
        raise Unsupported("shared_steps() needs swiftrun; with a Checkpointer write 'for step, batch in steps(loader)'")

    def close(self) -> None:
        """Wait until the newest checkpoint is committed, and remove what lies in memory; so does the process' end."""
        self._alone.close()


def _of_checkpoints(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by full name; those of the section ``checkpoint`` may be given without it."""
    known = {each.name for each in fields(CheckpointOptions)}
    return full_names({f"checkpoint.{name}" if name in known else name: value for name, value in options.items()})


class _Ranks:
    """What the processes of one checkpointer say to each other, through the store of the default group."""

    def __init__(self, rank: int, world_size: int, limit_s: float) -> None:
        global _made
        _made += 1
        self._rank, self._world_size, self._limit_s, self._number = rank, world_size, limit_s, _made

    def store(self) -> Any:
        from torch.distributed.distributed_c10d import _get_default_store

        return PrefixStore(f"swift_checkpointer/{self._number}", _get_default_store())

    def said(self, key: str, what: str) -> str:
        """The text under a key, once another process has set it; ``what`` it is, for people."""
        client = self.store()
        wait_for(client, {0: key}, lambda: False, self._limit_s, self._rank, what)
        return text(client.get(key), key)

    def agreed(self, key: str, mine: str) -> str:
        if self._world_size == 1:
            return mine
        if self._rank == 0:
            self.store().set(key, mine)
        return self.said(key, f"to say its {key}")


class OneProcess:
    """What a training loop needs of a job where nobody replaces failed workers: step boundaries with checkpoints.

    Args:
        optimizers: at least one; steps of the first are counted.

    Attributes:
        joining: this process begins with a checkpoint whose place it has not reached yet.
        loss: of the newest batch, if the script says it.
    """

    reroutes = added = False
    origin = "checkpoint"
    orders = None

    def __init__(self, config: SwiftConfig, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        assert config.checkpoint.dir is not None
        self.config, self._where = config, config.checkpoint.dir
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.complete = self.joining = False
        self.loss: torch.Tensor | float | None = None
        self.boundaries = self.version = 0
        self._boundary_version = -1
        self._owed = False
        self._parts = StateParts()
        self.variables = self._parts.variables
        self._found: dict[str, Any] | None = None
        self.replicated = Replicated(models, optimizers)
        if any(hasattr(parameter, "device_mesh") for parameter in self.replicated.parameters):
            raise Unsupported("parameters are spread over ranks (DTensor); a Checkpointer saves those of rank 0 only")
        attached = Attached(models, self.replicated)
        self.register("buffers", attached.buffers, attached.restore_buffers)
        self.register("modes", attached.modes, attached.restore_modes)
        self.register("hyperparameters", attached.groups, attached.restore_groups)
        wrapped = [each for each in models if isinstance(each, nn.parallel.DistributedDataParallel)]
        self._unoptimized = UnoptimizedParameters(self.replicated, {id(p) for ddp in wrapped for p in ddp.parameters()})
        #: The script changes state outside updates: a snapshot cannot be copied while it continues.
        self._outside, self._watch = self._unoptimized.own, ChangeWatch(self.replicated)
        self.register(
            "unoptimized", lambda: self._unoptimized.capture() if self._outside else {}, self._unoptimized.restore
        )
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._before_update())
            optimizer.register_step_post_hook(lambda *_: self._watch.note())
        optimizers[0].register_step_post_hook(lambda *_: self._updated())
        self._command = Command.of(os.path.abspath(sys.argv[0]), sys.argv[1:])
        self._open()
        self._resume()

    # -- what the loop calls -------------------------------------------------------------------------------------------

    def register(self, name: str, capture: Capture, restore: Restore) -> None:
        self._parts.register(name, capture, restore)

    def note_loss(self, loss: torch.Tensor | float) -> None:
        self.loss = loss

    @property
    def checkpoints(self) -> OneProcess:
        return self

    entries = checkpoints

    # What a loop says for replacements, which have to find the place of another worker, is of no meaning here.

    def note_reachable(self, reachable: bool) -> None:
        pass

    def between(self, phase: int, epoch: int | None, pass_: int) -> None:
        pass

    def continues(self) -> None:
        pass

    def keep_boundaries(self) -> None:
        self._outside = True

    def peek(self, name: str) -> Any:
        """What the checkpoint has of a part; None without a checkpoint."""
        return self._found["parts"].get(name) if self._found is not None else None

    def fall_back(self, reason: str) -> None:
        """The place of the checkpoint cannot be reached. Always raises ConfigError."""
        raise ConfigError(f"{reason}; or start from scratch with resume='never'")

    def step_boundary(self) -> bool:
        """A batch begins; True if the state was just restored to what it was here.

        Raises:
            SystemExit: 143, after the last checkpoint, if SIGTERM has come.
        """
        self._persist()
        if self.joining:
            self._restore()
            return True
        self.boundaries += 1
        self._see()
        self._look()
        self._decide()
        due, last = self._decisions.due(self.version)
        every = self.config.checkpoint.every_steps if self.config.checkpoint.chosen_policy == "fixed" else 0
        self._owed = self._owed or due or (every > 0 and self.boundaries % every == 0)
        # Between two updates gradients are pending, which belong to no checkpoint: it is made after the next one.
        updated, self._boundary_version = self.version != self._boundary_version, self.version
        if self._owed and updated:
            self._owed = False
            self._take()
        if last:
            self._part()
        return False

    # -- setting up ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._ranks = _Ranks(self.rank, self.world_size, self.config.detection.wait_timeout_s)
        local_rank = whole_of_environment("LOCAL_RANK", 0) if self.world_size > 1 else 0
        local_size = whole_of_environment("LOCAL_WORLD_SIZE", self.world_size)
        first = self.rank - local_rank
        self._local = range(first, min(first + local_size, self.world_size))
        self._job_dir = JobDir(logging=False) if local_rank == 0 else None
        if self._job_dir is not None:
            path = self._job_dir.path
            if self.world_size > 1:
                self._ranks.store().set(f"folder/{first}", str(path))
        else:
            path = Path(self._ranks.said(f"folder/{first}", "the job's folder on this machine"))
        several = len(self._local) < self.world_size
        self._decisions = Decisions(StoreEntries(self._ranks.store) if several else FileEntries(path / "due"))
        self._spool = Spool(path / FOLDER)
        target = Target(self._where, self.config.checkpoint.keep, self.config.checkpoint.quota_bytes)
        self._snapshots = Snapshots(self._spool, self.rank, self.world_size, self._local, target, console)
        self._persisting = Persisting(path, None, 60.0, console) if local_rank == 0 else None
        measured = self.rank == 0 and self.config.checkpoint.chosen_policy not in ("fixed", "none")
        self._pricing = Pricing(self.config, self.world_size, self._command.key) if measured else None
        mine = lineage.next_run(self._where, self._command) if self.rank == 0 else ""
        self._run = self._session = self._ranks.agreed("session", mine)
        self._adopted, self._ending, self._told = "", False, 0
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        atexit.register(self.close)

    # -- continuing ---------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Find the checkpoint to begin with, if there is one; rank 0 decides."""
        chosen: list[tuple[str, int, bool]] = []
        told = absolute(self.config.checkpoint.resume_from) if self.config.checkpoint.resume_from else ""
        if self.rank == 0:
            continues = self.config.continues
            found = choose(self._where, self._command, self.world_size, continues=continues, told=told)
            if found is not None and not found[1]:
                folder = lineage.folder_of(self._where, self._command, found[0].run)
                self._lock = RunLock(open_storage(folder), self._session)
                self._lock.take(WAIT_S)
                self._spool.claim(folder, self._session)
            chosen = [(found[0].storage.root, found[0].step, found[1])] if found is not None else []
        chosen = decode(self._ranks.agreed("begins", json.dumps(chosen)), list[tuple[str, Count, bool]], "begins")
        if not chosen:
            return
        ((where, step, adopts),) = chosen
        saved = store.load_manifest(open_storage(where), step)
        self._found = loads(store.read_part(saved, f"rank{self.rank}"))
        self._run, self._adopted = str(saved.meta["run"]), str(saved.meta.get("adopted", ""))
        if adopts:
            self._run, self._adopted = self._session, told
        self.joining = True
        by_name, metadata = image.load(store.read_part(saved, _REPLICATED))
        names = json.loads(metadata[NAMES])
        self.replicated.load(json.loads(metadata[DESCRIPTION]), [by_name[name] for name in names])
        if self.rank == 0:
            whose = f", of '{saved.command.short}'" if adopts else ""
            console(f"continuing from the checkpoint at step boundary {step} in {saved.path.parent}{whose}")

    def _restore(self) -> None:
        assert self._found is not None
        found, self._found, self.joining = self._found, None, False
        self.boundaries, self.version = found["boundary"], found["version"]
        self._parts.restore(found["parts"])
        self._boundary_version = self.version
        self._decisions.joined(self.version)
        if self._pricing is not None and found["pricing"] is not None:
            self._pricing.restore(found["pricing"])
            self._pricing.rolled_back()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _before_update(self) -> None:
        self._see()
        self._snapshots.fence()

    def _see(self) -> None:
        self._outside = self._outside or self._watch.changed() is not None

    def _updated(self) -> None:
        self.version += 1

    def _persist(self) -> None:
        if self._persisting is not None:
            self._persisting.look(self.rank)

    def _decide(self) -> None:
        if self._told_to_end():  # at any rank: no other makes the next update without it
            self._decisions.add(self.version, last=True)
        elif self._pricing is not None:
            if self.loss is not None:
                self._pricing.loss(self.boundaries, self.loss)
                self.loss = None
            self._pricing.step(self.boundaries, self._snapshots.waited_s, self.version, self.replicated.optimizers)
            if self._decisions.pending <= self.version and self._pricing.due(self.boundaries):
                self._decisions.add(self.version)

    def _take(self) -> None:
        started = time.perf_counter()
        local = {
            "boundary": self.boundaries,
            "version": self.version,
            "parts": self._parts.capture(),
            "pricing": self._pricing.capture() if self._pricing is not None else None,
        }
        images = {}
        if self.rank == 0:
            images[_REPLICATED] = named(self.replicated, *self.replicated.export())
        meta = lineage.meta_of(
            self.boundaries,
            self.version,
            session=self._session,
            run=self._run,
            command=self._command,
            world_size=self.world_size,
            continues=self.config.continues,
            adopted=self._adopted,
        )
        self._snapshots.into(self._folder)
        taken = self._snapshots.take(self.boundaries, {f"rank{self.rank}": dumps(local)}, images, meta)
        if self._outside:
            self._snapshots.fence()
        if self._pricing is not None:
            self._pricing.name = self._run
            self._pricing.begun(self.boundaries, time.perf_counter() - started, taken)
        if not self.config.checkpoint.background:
            self._flush()

    def _look(self) -> None:
        if self._pricing is not None and (status := self._spool.news()) is not None:
            mine = status.committed.get("session") == self._session
            self._pricing.heed(int(status.committed["step"]) if mine else 0, status.failed)

    def _flush(self) -> None:
        """Wait until the newest one is committed or given up, and keep the writer running meanwhile."""
        what, ends = f"the checkpoint at step boundary {self.boundaries} to be committed", "it continues without it"
        wait = Wait("rank 0", what, self.config.detection.wait_timeout_s, ends=ends, speaks=lambda: self.rank == 0)
        while self._told < 2:
            try:
                wait.look()
            except WaitTimeout:
                break
            self._persist()
            if self._snapshots.flush(0.2) or self._spool.status().failed >= self.boundaries:
                break

    # -- the end -------------------------------------------------------------------------------------------------------

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._told, self._ending = self._told + 1, True

    def _told_to_end(self) -> bool:
        told, self._ending = self._ending, False
        return told

    def _part(self) -> None:
        """The last checkpoint is taken: end when it is committed, or when the process is told so again."""
        self._told = max(self._told, 1)  # it may be another rank that was
        self._flush()
        self.close()
        raise SystemExit(128 + signal.SIGTERM)

    def close(self) -> None:
        """Let the writer finish, and remove what lies in memory; a second call does nothing."""
        job_dir, self._job_dir = self._job_dir, None
        with suppress(Exception):  # at exit, of whatever state the script left behind
            self._snapshots.fence()
        whole = True
        if self._persisting is not None:
            self._persisting.look(self.rank)
            deadline = time.monotonic() + self.config.detection.wait_timeout_s
            whole = self._persisting.finish(deadline, time.sleep, lambda: self._told > 1)
            self._persisting = None
        if self.complete and self.rank == 0 and sys.exc_info()[0] is None:
            self._mark_ended()
        if self.rank == 0 and job_dir is not None and (self._told or not whole):
            console(verdict(self._where, self._command, self._spool, self.boundaries, continues=self.config.continues))
        if job_dir is not None:
            job_dir.remove()

    @property
    def _folder(self) -> str:
        return lineage.folder_of(self._where, self._command, self._run)

    def _mark_ended(self) -> None:
        with suppress(OSError):
            lineage.mark_ended(self._folder, self.boundaries)
        if self._pricing is not None:
            self._pricing.ended("completed")
        self.complete = False


def choose(
    where: str, command: Command, world_size: int, *, continues: bool, told: str
) -> tuple[store.Checkpoint, bool] | None:
    """The newest whole checkpoint that serves, and whether it is of another command.

    None if there is none; then the user is told what is left behind.

    Args:
        world_size: number of the script's processes; a checkpoint of another number is passed over.
        told: where the checkpoint lies that it was told to begin with; empty for none.

    Raises:
        ConfigError: no checkpoint at ``told`` is whole.
        NoUsableCheckpoint: there are some of its own, and it can use none of them.
    """
    there = lineage.Contents()
    if continues:
        there = lineage.read(where, command.key)
    own = lineage.candidates(there, command.key)
    own = [each for each in own if not told or each.meta.get("adopted") == told]
    adoptable, passed = lineage.to_adopt(told) if told else ([], there.unusable(command.key))
    found = lineage.first_whole(each for each in (*own, *adoptable) if _fits(each, world_size))
    lineage.tell_passed(passed, found)
    if found is not None:
        return found, found not in own
    if told:
        raise ConfigError(f"resume_from: there is no whole checkpoint of {world_size} ranks at {told}")
    if number := len(own) + sum(bool(each.run) for each in passed):
        raise lineage.none_usable(where, number)
    said = lineage.left_behind(where, command.key, "resume_from", continues=continues, again="resume='always'")
    if said:
        console(said)
    return None


def _fits(found: store.Checkpoint, world_size: int) -> bool:
    theirs = found.meta.get("world_size")
    if theirs != world_size:
        where = found.path
        console(f"checkpoint {where} is passed over: it is of {theirs} ranks, this job has {world_size}")
    return bool(theirs == world_size)
