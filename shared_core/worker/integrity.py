"""Replicas are compared while they train (``state.verify_every``): at the end of a backward pass, before DDP gives the
program its sums, and before a checkpoint. At the first place a worker is also compared with its copy, which has
computed the same batch (``state.recompute_every``).

A bit that flips in a parameter or in optimizer state stays flipped until the next update, so a comparison behind the
last use of the parameters and before the update sees all that can have entered a gradient. Where every update is
preceded by one, the damage is in the sums of this backward and nowhere else: the minority is replaced, its replacement
computes its gradients again, and all sum again. Where updates lie between two comparisons, the damage may have entered
every replica by the gradients: then all go back to a checkpoint, which was compared before it was made.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from shared_core.config import SwiftConfig
from shared_core.errors import ReplicaMismatch, Unsupported
from shared_core.events import console_once
from shared_core.faults import inject
from shared_core.waiting import ranks_text
from shared_core.worker.checkpoints.checkpoints import Checkpoints
from shared_core.worker.comm.group import SwiftProcessGroup
from shared_core.worker.comm.op import Op
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.replicas import minority
from shared_core.worker.second_run import AGREES, DIFFERS, UNKNOWN, SecondRun, why_no_copy
from shared_core.worker.state.checksums import checksum
from shared_core.worker.state.local_state import BoundaryPosition
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.updates import Updates


def flip(replicated: Replicated, kind: str, bit: int) -> None:
    """Flip one bit, numbered by ``bit`` as :func:`shared_core.faults.inject.flip_bit` does, of all parameters (``kind``
    ``flip.parameter``), or of all tensors of optimizers (``flip.optimizer``).
    """
    description, tensors = replicated.export()
    count = description["parameters"]
    inject.flip_bit(tensors[:count] if kind == "flip.parameter" else tensors[count:], bit)


def refuse_comparing(
    config: SwiftConfig,
    modules: Sequence[DistributedDataParallel],
    replicated: Replicated,
    summed: Collection[int],
    *,
    whole: bool,
    operates: bool,
) -> None:
    """Raises Unsupported where replicas, or a worker and its copy, cannot be compared before gradients are used.

    Args:
        summed: identities of the parameters whose gradients DDP sums.
        whole: each rank trains the whole model.
        operates: the backend ``swift`` reduces them, and not one of torch's own.
    """
    why = ""
    if not whole:
        why = "here each rank trains a part of the model"
    elif not replicated.stepped() <= set(summed):
        why = "an optimizer steps parameters that DistributedDataParallel does not keep alike on all ranks"
    elif any(ddp.static_graph for ddp in modules):
        why = "DistributedDataParallel with static_graph=True reduces gradients later than others"
    elif config.state.overlapped_update:
        why = "with state.overlapped_update gradients are used before all are there"
    elif not operates:
        why = "here torch's own backend reduces them, out of sight"
    if why:
        option = "verify_every compares replicas" if config.state.verify_every else "recompute_every compares gradients"
        raise Unsupported(f"state.{option} before their gradients are used, and {why}")


class StateCheck:
    """Compares the replicated state of all ranks, and what each has computed with what its copy has. All call the same
    methods at the same places of the program.
    """

    def __init__(
        self,
        context: Context,
        updates: Updates,
        position: BoundaryPosition,
        checkpoints: Callable[[], Checkpoints],
    ) -> None:
        self._forked_at = self._compared_at = -1
        self.begin(context)
        self._every, self._again = context.env.config.state.verify_every, context.env.config.state.recompute_every
        self._updates, self._position, self._checkpoints = updates, position, checkpoints
        self._graph, self._reductions, self._buckets = -1, 0, list[Op]()
        self._pending = False

    def begin(self, context: Context) -> None:
        """Be that of the worker that ``context`` describes; again in a forked copy of the process."""
        self._env, self._runtime = context.env, context.runtime
        self._store, self._fatal_actions, self._events = context.store, context.fatal_actions, context.events
        self._second_run: SecondRun | None = None  # those of the process that was forked are not this one's

    @property
    def in_copy(self) -> bool:
        """Whether this process is a copy, which computes a batch again."""
        return self._second_run is not None and self._second_run.copy

    def _due(self, every: int, version: int) -> bool:
        return every > 0 and version % every == 0 and self._position.boundaries > 0

    def _due_again(self, version: int) -> bool:
        """Whether a worker and its copy are still to be compared at this update."""
        return version > 0 and version != self._compared_at and self._due(self._again, version)

    def after_boundary(self) -> None:
        """A step boundary was published, and nothing of the batch has run: fork what computes the batch again. Raises
        Unsupported where a copy can never do so.
        """
        version = self._updates.version
        if self._second_run is not None:
            if self._forked_at == version:
                return  # gradients are accumulated over several batches
            self._second_run.end()  # no gradients were reduced since
            self._second_run = None
        if not self._due_again(version):
            return
        why, first, self._forked_at = why_no_copy(self._env.job_dir), self._forked_at < 0, version
        if why and first:
            raise Unsupported(f"state.recompute_every has a copy of each worker compute a batch again, and {why}")
        try:
            self._second_run = None if why else SecondRun(self._runtime)
        except OSError as error:
            why = f"no copy could be made ({error})"
        if why:
            self._tell(why)

    def before_bucket(self) -> None:
        """A gradient is about to be reduced, in a backward pass; on its thread."""
        version = self._updates.version
        if not (self._due_again(version) or self._due(self._every, version)) or self._position.joining:
            return
        graph = torch._C._current_graph_task_id()
        if graph != self._graph:
            self._graph, self._reductions = graph, 0
            self._buckets.clear()
            # DDP queues its own callback, which hands the sums on, when its last bucket is under way.
            Variable._execution_engine.queue_callback(lambda: self._after_backward(version))
        self._reductions += 1

    def bucket(self, op: Op) -> None:
        if self._graph != -1:
            self._buckets.append(op)

    def before_boundary(self, pending: bool) -> None:
        """A step boundary is about to be published, ``pending`` with gradients that belong to the next update. Compares
        if a checkpoint will be made there.
        """
        self._pending = pending
        version = self._updates.version
        if self._every and version and self._checkpoints().due_at(self._position.boundaries, version):
            self._compare(self._every == 1 and not pending, ())

    def _after_backward(self, version: int) -> None:
        self._graph, buckets = -1, list(self._buckets)
        self._buckets.clear()
        alone = self._reductions == len(buckets) and version == self._updates.version
        contained = alone and not self._pending and self._can_reduce_again(buckets)
        if self._due_again(version):
            self._compared_at = version
            self._compare_computations(contained, buckets)
        if self._due(self._every, version):
            self._compare(self._every == 1 and contained, buckets)

    def _compare_computations(self, contained: bool, buckets: Sequence[Op]) -> None:
        """Return with ``buckets`` reduced from what each rank has computed as its copy has. Blocks. ``contained``:
        nothing else of this batch was given to others.
        """
        mine, text = AGREES, ""
        if self._second_run is not None:
            mine, text = self._second_run.verdict()
            self._second_run = None
            self._events.emit("computed_again", rank=self._env.rank, update=self._updates.version, found=mine, why=text)
        told = [said for (said,) in self._gathered(torch.tensor([mine]))]
        if mine == AGREES and text:
            self._tell(text)
        update = self._updates.version
        if UNKNOWN in told:
            if mine == UNKNOWN:
                self._fatal_actions.give_up(
                    ReplicaMismatch(
                        f"corruption: rank {self._env.rank} and its copy have computed other gradients from the same "
                        f"batch at update {update}, and nobody knows which are right ({text}). Either training is not "
                        "deterministic here (an unseeded random number, a clock, an operation without a fixed order: "
                        "torch.use_deterministic_algorithms(True) names it), or this machine computes wrongly"
                    )
                )
            self._fatal_actions.await_end()
        wrong = [rank for rank, said in enumerate(told) if said == DIFFERS]
        if not wrong:
            return
        who = f"{ranks_text(wrong)} computed gradients at update {update} that two copies of the worker did not"
        if not contained:
            self._go_back(who)
        # Not told[rank]: that may be a failed worker's, whose replacement gets here by the log.
        if mine == DIFFERS:
            self._leave(who)
        self._reduce_again(buckets)

    def _tell(self, why: str) -> None:
        """For people, once: the batch has no second computation, or one that proves nothing."""
        rank, update = self._env.rank, self._updates.version
        console_once(f"recompute {rank}", f"rank {rank}: state.recompute_every at update {update}: {why}")

    def _can_reduce_again(self, buckets: Sequence[Op]) -> bool:
        replicated, runtime = self._updates.replicated, self._runtime
        dtypes = {p.dtype for p in replicated.parameters if p.is_cpu} if replicated is not None else set()
        # Others are compressed by a hook of DDP's, or copied to a device, as soon as they are reduced. The integers
        # say which parameters were used.
        plain = all(op.again is not None and op.results[0].dtype in dtypes | {torch.int32} for op in buckets)
        with runtime.lock:
            logs = [group.log.entries.values() for group in runtime.groups.all()]
            exchanged = [each.signature[2] for log in logs for each in log if each.boundary == runtime.boundary]
        # Bytes are pickles, which have no checksum: damaged parameters may be in them.
        return plain and not any("torch.uint8" in dtypes for dtypes in exchanged)

    def _compare(self, contained: bool, buckets: Sequence[Op]) -> None:
        """Return with the replicated state as most replicas have it, and ``buckets`` reduced from that. Blocks.
        ``contained``: damage can be in these buckets only.
        """
        state = self._updates.replicated
        if state is None:
            return
        found = state.summed(self._updates.outside.local)
        sums = [checksum(data) for _, _, data in found]
        mine = _integers([len(sums), checksum(_integers(sums))])
        told = self._gathered(mine)
        verdict = minority(told)
        if verdict is None:
            return
        wrong, what = verdict[0], "the number of tensors in the state"
        if len({count for count, _ in told}) == 1 and (detail := minority(self._gathered(_integers(sums)))) is not None:
            place, key, _ = found[detail[1]]
            what = f"{key} of parameter {state.names[place]}" if key else f"parameter {state.names[place]}"
        right = [rank for rank in range(len(told)) if rank not in wrong]
        who = f"{ranks_text(wrong)} against {ranks_text(right)}" if wrong else "no majority among " + ranks_text(right)
        text = f"replicas differ in {what} at update {self._updates.version} ({who})"
        if not wrong or not contained:
            self._go_back(text)
        # Not told[rank]: that may be a failed worker's, whose replacement gets here by the log.
        if self._updates.exact and mine.tolist() != told[right[0]]:
            self._leave(text)
        self._reduce_again(buckets)

    def _gathered(self, row: torch.Tensor) -> list[list[int]]:
        """The rows of all ranks. A replacement's is another than the failed worker's, so they have no checksum."""
        rows = [torch.empty_like(row) for _ in range(self._env.world_size)]
        with self._runtime.unchecked():
            dist.all_gather(rows, row)
        return [each.tolist() for each in rows]

    def _reduce_again(self, buckets: Sequence[Op]) -> None:
        group = dist.group.WORLD
        assert isinstance(group, SwiftProcessGroup)
        for op in buckets:
            op.future.wait()
        for work in [group.reduce_again(op) for op in buckets]:
            work.wait()

    def _leave(self, text: str) -> NoReturn:
        self._store.tell_damage({"rank": self._env.rank, "pid": os.getpid(), "what": text})
        self._fatal_actions.await_end()

    def _go_back(self, text: str) -> NoReturn:
        """All start again from a checkpoint. Without one the job ends. One rank says so."""
        if self._env.rank == 0:
            if self._checkpoints().can_go_back:
                self._fatal_actions.fall_back(f"corruption: {text}; gradients may have carried it to all ranks")
            self._fatal_actions.give_up(
                ReplicaMismatch(
                    f"corruption: {text}. It may have entered the gradients of all ranks, and there is no checkpoint "
                    "to go back to: set checkpoint.dir, or state.verify_every=1, with which three or more replicas "
                    "replace the wrong one. The likeliest cause is faulty memory; the next, a script that changes "
                    "parameters on one rank alone"
                )
            )
        self._fatal_actions.await_end()


def _integers(values: Sequence[int]) -> torch.Tensor:
    """Unsigned 64-bit numbers as int64."""
    return torch.frombuffer(bytearray(array("Q", values or [0])), dtype=torch.int64)
