"""Data-parallel steps that continue without a failed worker: its peers compute its share of each global batch.

Any worker can compute the share of a logical rank. Each computes its own and those it hosts; a survivor group sums the
gradients. After a failure the survivors compute what is missing in the same step and sum again. Whoever has the sum
already gives it to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared_core.errors import SurvivorGroupBroken, Unsupported
from shared_core.faults import inject
from shared_core.loaders.randomness import RawRandom, restore_raw, seed_random
from shared_core.loaders.seeded import place_seed
from shared_core.reroute.messages import MessageChannel, MessageKey, MessageKind, through_failures
from shared_core.reroute.summing import (
    SumRule,
    flat_gradients,
    hand_over,
    like_flat,
    reduce_in_order,
    set_mean_gradients,
)
from shared_core.schedule.schedule import PlannedWorker, Topology
from shared_core.worker.messages.group_log import BufferPool
from shared_core.worker.recovery.survivor_groups import SurvivorGroup, WaitFor

if TYPE_CHECKING:
    from shared_core.job import Job


@dataclass(frozen=True)
class Outcome:
    """What a share came to besides its gradients. Every worker gets the ``note`` of every share."""

    loss: float
    note: bytes = b""


@dataclass(frozen=True)
class _Sum:
    """The result of a step.

    Attributes:
        flat: gradients, summed over the logical ranks; then, for each parameter, how many shares had a gradient of it.
        table: loss and length of the note of each logical rank, float64 of shape (world, 2).
        notes: of the logical ranks, concatenated, uint8.
    """

    step: int
    flat: Tensor
    table: Tensor
    notes: Tensor

    def outcomes(self) -> list[Outcome]:
        notes, found = self.notes.numpy().tobytes(), []
        for loss, length in self.table.tolist():
            found.append(Outcome(loss, notes[: int(length)]))
            notes = notes[int(length) :]
        return found


class DataParallelSteps:
    """Runs the steps of one worker.

    Args:
        parameters: those that are trained, in the same order at all ranks.
        compute: forward and backward of a logical rank's share of a step: ``compute(rank, step)`` leaves gradients in
            ``.grad``. The result must depend on its arguments and the parameters alone.
        connect: makes the survivor group of the newest generation; blocks until all workers that are there have come.
        joining_ranks: failed ranks whose replacements wait to be admitted; blocks until all of them do if its argument
            is true.
        admit: admits those that it is given; all ranks call it at the same step boundary.
        ordered: shares are added by ascending logical rank, whoever has computed them. Otherwise a worker first adds
            those that it has computed.
        noted: called after a failure with the failed ranks and the number of the step.
    """

    def __init__(
        self,
        me: int,
        world: int,
        parameters: Sequence[torch.nn.Parameter],
        compute: Callable[[int, int], Outcome],
        connect: Callable[[], SurvivorGroup],
        joining_ranks: Callable[[bool], Sequence[int]],
        admit: Callable[[Sequence[int]], Any],
        *,
        ordered: bool,
        noted: Callable[[list[int], int], None] = lambda failed, step: None,
    ) -> None:
        self._me, self._world, self._parameters, self._compute = me, world, parameters, compute
        self._connect, self._joining_ranks, self._admit = connect, joining_ranks, admit
        self._ordered, self._noted = ordered, noted
        self._channel: MessageChannel | None = None
        self._sum: _Sum | None = None
        self._agreed = self._waits = self._ended = False
        self._closed = self._came = -1
        self._idle: list[int] = []
        self._step = 0
        self._pool, self._taken = BufferPool(), list[Tensor]()

    # -- what the loop calls -----------------------------------------------------------------------

    def run(self, step: int) -> list[Outcome]:
        """Leave the mean of all logical ranks' gradients of ``step`` in ``.grad``, through failures.

        ``step`` is one more than the last step of all workers. Returns one outcome for each logical rank. Raises
        Unsupported for sparse gradients.
        """
        self._step = step
        shares: dict[int, Tensor] = {}
        outcomes: dict[int, Outcome] = {}

        def attempt() -> _Sum:
            while self._sum is None or self._sum.step != step:
                if self._agree():
                    before, self._sum = self._sum, self._reduce(shares, outcomes)
                    # Whoever lacked the sum before has asked for it before adding to this one.
                    self._taken += [before.flat] if before else []
            return self._sum

        found = through_failures(attempt, self._leave)
        self._pool.give(self._taken)
        self._pool.next_boundary()
        self._taken = []
        inject.point("reroute.step")
        set_mean_gradients(found.flat, self._parameters, self._world)
        return found.outcomes()

    def wait_for_all(self, step: int) -> None:
        """Admit replacements until all ranks are there. All ranks call it before :meth:`run` of this step."""
        self._step = step

        def attempt() -> None:
            while self._closed != step:
                self._agree(waits=True)

        through_failures(attempt, self._leave)

    def come(self) -> None:
        """An admitted replacement without the last updates joins the step that others begin; they compute its share."""
        try:
            if self._agree(idle=True):
                self._came = self._step
        except SurvivorGroupBroken:
            self._leave()

    def settle(self, step: int) -> None:
        """At the end of the program: return when all workers have finished the step before ``step``."""
        self._step = step

        def attempt() -> None:
            while not self._ended:
                self._agree(ends=True)

        through_failures(attempt, self._leave)

    def _leave(self) -> None:
        self._channel = None

    # -- agreeing ----------------------------------------------------------------------------------

    def _agree(self, *, waits: bool = False, ends: bool = False, idle: bool = False) -> bool:
        """Whether all workers of the survivor group compute the same step now; if not, something was done about it.

        They exchange their places on a new survivor group, while a rank is missing, and while they wait for all.
        """
        survivor_group = self._connect()
        if self._channel is None or self._channel.survivor_group is not survivor_group:
            self._channel, self._agreed = MessageChannel(survivor_group, Topology(self._world, 1, 1), {}, {}), False
            # Something may still be read from, or written to, what was used on the survivor group before.
            self._pool, self._taken = BufferPool(), []
            if failed := sorted({*range(self._world)} - {*survivor_group.ranks, *survivor_group.finished}):
                self._noted(failed, self._step)
        if ends and survivor_group.finished:
            self._ended = True  # who has left the program had come here before, as all others had
            return True
        away = len(survivor_group.ranks) + len(survivor_group.finished) < self._world
        if self._agreed and (self._came == self._step or not (away or waits or ends)):
            self._came = -1
            return True
        waits = waits or (self._waits and away)
        asks = away and not ends and not idle and self._closed != self._step and self._me == survivor_group.ranks[0]
        views = survivor_group.exchange(
            {
                "step": self._step,
                "waits": waits,
                "closed": self._closed == self._step,
                "ends": ends,
                "idle": idle,
                "joining": list(self._joining_ranks(waits)) if asks else [],
            }
        )
        self._idle = [rank for rank in survivor_group.ranks if views[rank]["idle"]]
        computing = [rank for rank in survivor_group.ranks if rank not in self._idle]
        newest = max((views[rank]["step"] for rank in computing), default=-1)
        behind = [rank for rank in computing if views[rank]["step"] < newest]
        if behind:
            if not idle:
                self._share_sum(computing, newest - 1, behind)
            return False
        if not computing:
            return False  # those that gave them their state failed
        if idle:
            self._step = newest
        self._waits = any(view["waits"] for view in views.values())
        closed = any(view["closed"] for view in views.values()) or (self._waits and not away)
        if closed:
            # What follows the waiting has begun somewhere: a replacement would begin it alone.
            self._closed, self._waits = self._step, False
        elif not self._idle and (joining_ranks := views[survivor_group.ranks[0]]["joining"]):
            self._admit(joining_ranks)
            return False
        self._ended = any(view["ends"] for view in views.values())
        self._agreed = True
        return not self._waits

    def _share_sum(self, ranks: Sequence[int], step: int, behind: Sequence[int]) -> None:
        """The lowest rank that has the sum of a step sends it to those who have not."""
        assert self._channel is not None
        channel, source = self._channel, next(rank for rank in ranks if rank not in behind)
        mine = self._sum if self._me == source else None
        assert mine is None or mine.step == step

        def handed(kind: MessageKind, held: Tensor | None, like: Tensor) -> Tensor | None:
            return hand_over(channel, MessageKey(step, kind, 0, 0, 1), self._me, source, behind, held, like)

        flat = handed(MessageKind.SUM, mine.flat if mine else None, like_flat(self._parameters))
        table = handed(MessageKind.LOSSES, mine.table if mine else None, _empty_table(self._world))
        if mine is not None and mine.notes.numel():
            handed(MessageKind.NOTES, mine.notes, mine.notes)
        if flat is not None and table is not None:
            key = MessageKey(step, MessageKind.NOTES, 0, 0, 1)
            self._sum = _Sum(step, flat, table, self._notes_from(key, _length(table, range(self._world)), source))

    def _notes_from(self, key: MessageKey, length: int, rank: int) -> Tensor:
        assert self._channel is not None
        notes = torch.empty(length, dtype=torch.uint8)
        return self._channel.fetch_like(key, [notes], rank)[0] if length else notes

    # -- a step ------------------------------------------------------------------------------------

    def _reduce(self, shares: dict[int, Tensor], outcomes: dict[int, Outcome]) -> _Sum:
        assert self._channel is not None
        channel, survivor_group, step = self._channel, self._channel.survivor_group, self._step
        computing = [rank for rank in survivor_group.ranks if rank not in self._idle]
        hosted = hosts(self._world, computing)
        homes = [rank for rank, host in hosted.items() if host == self._me]
        for rank in homes:
            if survivor_group.broken():
                raise SurvivorGroupBroken
            if rank not in shares:
                outcomes[rank], shares[rank] = self._share(rank)
        inject.point("reroute.reduce")
        table = _empty_table(self._world)
        for rank in homes:
            table[rank] = torch.tensor([outcomes[rank].loss, len(outcomes[rank].note)], dtype=torch.float64)
        for rank in survivor_group.ranks:
            if rank != self._me:
                channel.send(MessageKey(step, MessageKind.LOSSES, 0, self._me), [table], rank)
                channel.post_like(MessageKey(step, MessageKind.LOSSES, 0, rank), [table], rank)
        mine = {PlannedWorker(rank, 0): shares[rank] for rank in homes}
        peers, me = {PlannedWorker(rank, 0): rank for rank in survivor_group.ranks}, PlannedWorker(self._me, 0)
        holders = {PlannedWorker(rank, 0): PlannedWorker(host, 0) for rank, host in hosted.items()}
        if not self._ordered:
            mine = {me: _added(mine.values())} if mine else {}
            holders = {PlannedWorker(rank, 0): PlannedWorker(rank, 0) for rank in computing}
        like = None if mine else like_flat(self._parameters)
        flat = reduce_in_order(channel, step, 0, me, holders, mine, peers, SumRule(), like, self._pool)
        self._idle = []
        for rank in survivor_group.ranks:
            if rank != self._me:
                (more,) = channel.fetch_like(MessageKey(step, MessageKind.LOSSES, 0, rank), [table], rank)
                table = torch.where(more.isnan(), table, more)
        notes = {
            rank: torch.frombuffer(bytearray(outcomes[rank].note), dtype=torch.uint8)
            for rank in homes
            if outcomes[rank].note
        }
        return _Sum(step, flat, table, self._gather(table, notes, hosted))

    def _gather(self, table: Tensor, mine: Mapping[int, Tensor], hosted: Mapping[int, int]) -> Tensor:
        assert self._channel is not None
        if not _length(table, range(self._world)):
            return torch.empty(0, dtype=torch.uint8)
        notes = dict(mine)
        for rank, note in mine.items():
            for peer in self._channel.survivor_group.ranks:
                if peer != self._me:
                    self._channel.send(MessageKey(self._step, MessageKind.NOTES, 0, rank), [note], peer)
        for rank, host in hosted.items():
            if host != self._me:
                notes[rank] = self._notes_from(
                    MessageKey(self._step, MessageKind.NOTES, 0, rank), _length(table, [rank]), host
                )
        return torch.cat([notes[rank] for rank in range(self._world) if rank in notes])

    def _share(self, rank: int) -> tuple[Outcome, Tensor]:
        for parameter in self._parameters:
            parameter.grad = None
        outcome = self._compute(rank, self._step)
        flat = flat_gradients(self._parameters, self._pool)
        self._taken.append(flat)
        for parameter in self._parameters:
            parameter.grad = None
        return outcome, flat


def steps_of(
    job: Job, parameters: Sequence[torch.nn.Parameter], compute: Callable[[int, int], Outcome]
) -> DataParallelSteps:
    """The steps of a job's workers; see :class:`DataParallelSteps` for ``compute``."""
    return DataParallelSteps(
        job.rank,
        job.world_size,
        parameters,
        compute,
        job.survivor_groups.survivor_group,
        lambda wait: job.survivor_groups.joining_ranks(wait=WaitFor.FOR_ALL if wait else WaitFor.NOT_AT_ALL),
        job.survivor_groups.admit,
        ordered=job.config.reroute.reduction == "ordered",
        noted=lambda failed, step: job.reporter.emit("rerouted", failed=failed, step=step),
    )


def hosts(world: int, present: Sequence[int]) -> dict[int, int]:
    """Who computes each logical rank's share: itself if ``present``, else the next of the ranks that compute fewest."""
    hosted = {rank: rank for rank in present}
    load = dict.fromkeys(present, 1)
    for rank in range(world):
        if rank not in load:
            host = min(present, key=lambda peer: (load[peer], (peer - rank) % world))
            hosted[rank] = host
            load[host] += 1
    return dict(sorted(hosted.items()))


def _added(shares: Iterable[Tensor]) -> Tensor:
    first, *others = shares
    if not others:
        return first
    total = first.clone()
    for share in others:
        total += share
    return total


def _empty_table(world: int) -> Tensor:
    return torch.full((world, 2), math.nan, dtype=torch.float64)


def _length(table: Tensor, ranks: Iterable[int]) -> int:
    return sum(int(table[rank, 1]) for rank in ranks)


# -- a share that does not depend on who computes it ------------------------------------------------------------------


#: What a step's random numbers are seeded with besides its place; data have other places.
_STEP = -2


class Shares:
    """The surroundings in which shares are computed.

    Args:
        job: of this worker, where others may have to compute its shares; else None.
        what: what asks for shares that any worker can compute, for messages.
        code: the user's code that computes them, for messages.

    Raises Unsupported for batch normalisation.
    """

    def __init__(self, job: Job | None, modules: Sequence[nn.Module], seed: int, what: str, code: str) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._job, self._seed, self._what, self._code = job, seed, what, code
        self._buffers = [each for module in modules for each in module.named_buffers()]
        for module in (m for each in modules for m in each.modules()):
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise Unsupported(
                    f"{what} cannot be used with batch normalisation, whose running statistics belong to one worker: "
                    "use GroupNorm or LayerNorm, or on_failure='replace' with an ordinary training loop"
                )

    @contextmanager
    def share(self, *place: int) -> Iterator[None]:
        """Compute a share in here. Afterwards the random generators are as before, unless an error comes out.

        The random numbers depend on ``place``. Raises Unsupported if a buffer was changed, or collectives were issued.
        """
        before, versions, issued = RawRandom(), [buffer._version for _, buffer in self._buffers], self._issued()
        seed_random(place_seed(self._seed, _STEP, *place))
        yield
        restore_raw(before)
        changed = [
            name for (name, buffer), version in zip(self._buffers, versions, strict=True) if buffer._version != version
        ]
        if changed:
            raise Unsupported(
                f"the forward pass changes the buffer {changed[0]!r}, which would then depend on who computes whose "
                f"share: {self._what} cannot be used with this model. Use on_failure='replace' with an ordinary "
                "training loop"
            )
        if self._issued() != issued:
            raise Unsupported(
                f"rank {self._rank}: {self._code} talks to other workers, but after a failure some call it more often "
                "than others: move collectives (gathered metrics, synchronised logs) out of it"
            )

    def _issued(self) -> int:
        if self._job is None:
            return 0
        runtime = self._job.runtime
        with runtime.lock:
            return sum(group.next for group in runtime.groups.values())


def start_alike(modules: Sequence[nn.Module]) -> None:
    """Broadcast rank 0's parameters and buffers in place, as ``DistributedDataParallel`` does. A collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in (t for module in modules for t in (*module.parameters(), *module.buffers())):
            dist.broadcast(tensor.data, 0)
