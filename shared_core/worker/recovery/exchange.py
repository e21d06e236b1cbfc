"""How ranks that form a generation meet: they connect, and move logged results and state for replacements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shared_core.encoding.plain import dumps, loads
from shared_core.errors import CorruptFile, GenerationAbandoned, NotConnected, RecoveryFailed, SwiftError
from shared_core.faults import inject
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.plan import Plan
from shared_core.waiting import Wait, ranks_text
from shared_core.worker.comm.connections import MAX_ATTEMPTS
from shared_core.worker.comm.gloo import InnerGroup, finish
from shared_core.worker.messages.group_log import Signature, read_signature
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.copies import StateCopies
from shared_core.worker.recovery.donor import Donor
from shared_core.worker.recovery.giving import Giving
from shared_core.worker.recovery.transfer import nbytes, receive, send
from shared_core.worker.state.ddp_buckets import BUCKETS
from shared_core.worker.state.publications import SharedMemoryPublisher
from shared_core.worker.state.records import from_plain, plain

#: Results to serve: per group and sequence number, what was called and what it gave.
Replay = dict[str, dict[int, tuple[Signature, list[torch.Tensor]]]]


@dataclass(frozen=True)
class Replaying:
    """Replacements without a replica run on from a checkpoint, or from the beginning.

    Attributes:
        complete: optimizer steps that all survivors have made: messages of earlier ones are all in logs.
        boundaries: step boundaries at which the replacements start, in their order; 0 is the beginning.
    """

    generation: int
    replacements: tuple[int, ...]
    survivors: tuple[int, ...]
    complete: int
    boundaries: tuple[int, ...]


@dataclass
class Received:
    """What a rank got, staged until the generation is agreed.

    Attributes:
        boundary: where a replacement starts; None for the beginning, and in survivors.
        description: of the replicated state; None for the one that the replacement begins with.
        tensors: of the replicated state, on the CPU. The first ones may be this worker's parameters themselves.
        nbytes: that this rank has sent and received.
        replayed: logged operations that it was given.
        local: the donor's rank-local state, uint8, of which this replacement becomes a copy.
    """

    boundary: StepBoundary | None = None
    description: dict[str, Any] | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    generation: int = 0
    nbytes: int = 0
    replayed: int = 0
    replay: Replay = field(default_factory=dict)
    replaying: Replaying | None = None
    local: torch.Tensor | None = None
    seconds: float = 0.0


class Exchange:
    """Connects all ranks and moves what a plan says, on all of them or on none."""

    def __init__(self, context: Context, publisher: SharedMemoryPublisher, donor: Donor, copies: StateCopies) -> None:
        self._rank, self._world_size = context.env.rank, context.env.world_size
        self._runtime, self._lifecycle, self._publisher = context.runtime, context.lifecycle, publisher
        self._giving = Giving(self._rank, donor, copies)
        self._inner: InnerGroup | None = None
        self._received = Received()

    def take(self) -> Received:
        """What the newest attempt has moved, which is not kept here any longer."""
        received, self._received = self._received, Received()
        return received

    def sever(self) -> None:
        """A further failure is known: cut what is being connected. Call it under the runtime's lock."""
        if self._inner is not None:
            self._inner.sever()

    def connect(self, plan: Plan, generation: int, members: Sequence[int] | None = None) -> InnerGroup:
        """Connect the job's default group and move what the plan says, in up to ``MAX_ATTEMPTS`` attempts. Blocks until
        a barrier of all members has passed. ``members``: a side group of these ranks is connected instead, for this
        alone.

        Raises:
            GenerationAbandoned: if somebody failed meanwhile.
            RecoveryFailed: if it cannot be done.
            WaitTimeout: if a member does not come, or does not move its part.
        """
        attempt = 0
        while True:
            try:
                return self._meet(plan, generation, attempt, members)
            except NotConnected as error:
                attempt += 1
                if attempt == MAX_ATTEMPTS:
                    raise RecoveryFailed(
                        f"rank {self._rank}: no connection in {MAX_ATTEMPTS} attempts, although all processes run "
                        f"({error}). Check the network, and firewalls between the machines"
                    ) from error
            except CorruptFile as error:
                raise RecoveryFailed(f"the log on disk cannot be read: {error}") from error

    def _meet(self, plan: Plan, generation: int, attempt: int, members: Sequence[int] | None) -> InnerGroup:
        """One attempt. Raises NotConnected if it broke off although nobody failed."""
        runtime = self._runtime

        def given_up() -> bool:
            return self._lifecycle.ended(generation)

        if members is None:
            assert runtime.world is not None
            inner = runtime.connections.new_inner(runtime.world, generation, attempt)
        else:
            inner = runtime.connections.side_group(
                f"round{len(members)}.{attempt}", members, generation, attempt=attempt
            )
        self._received = Received(boundary=plan.boundaries.get(self._rank), generation=generation)
        try:
            with runtime.lock:
                if given_up():
                    raise GenerationAbandoned("connected too late")
                self._inner = inner
            inject.point("recovery.connected")
            self._move(inner, plan, self._received)
            inject.point("recovery.exchanged")
            last = inner.pg.barrier(dist.BarrierOptions())
            finish(last, given_up, "the last barrier", self._exchanged(plan, inner.members))
        except RuntimeError as error:
            inner.discard()
            if isinstance(error, (SwiftError, inject.FaultInjected)):
                raise
            with runtime.lock:
                # A broken connection mostly means a failure, which is announced in a moment.
                if self._lifecycle.wait(given_up, 2.0):
                    raise GenerationAbandoned(str(error)) from error
            raise NotConnected(str(error)) from error
        finally:
            with runtime.lock:
                self._inner = None
        return inner

    def _exchanged(self, plan: Plan, members: Sequence[int]) -> Wait:
        everyone = set(members)
        busy = {*plan.donors, *plan.donors.values()}
        busy |= {rank for each in plan.transfers for rank in (each.source, each.destination)}
        whom = ranks_text(busy - {self._rank} or everyone - {self._rank})
        return Wait(
            f"rank {self._rank}",
            f"{whom} to move state and logged messages in the recovery",
            self._runtime.wait_timeout_s,
            speaks=lambda: self._rank == min(everyone - busy, default=min(busy, default=0)),
            advice="One of them may hang, or the network is too slow: raise detection.wait_timeout_s.",
        )

    def _move(self, inner: InnerGroup, plan: Plan, received: Received) -> None:
        """Logs and state, in an order all ranks share."""
        self._move_logs(inner, plan, received)
        for replacement, donor in sorted(plan.donors.items()):
            boundary = plan.boundaries[replacement]
            if boundary is None:
                continue  # starts from the beginning: computes its state itself
            others = self._giving.others(plan, replacement, boundary, inner.members)
            if self._rank == donor:
                received.nbytes += self._giving.give(inner, replacement, boundary)
                if plan.copies:
                    packed = pack_rank(self._publisher, boundary.index, self._runtime.groups)
                    send(
                        inner,
                        inner.members.index(replacement),
                        {},
                        [torch.frombuffer(bytearray(packed), dtype=torch.uint8)],
                    )
            elif self._rank in others:
                received.nbytes += self._giving.help(inner, replacement, boundary)
            elif self._rank == replacement:
                received.description, received.tensors = self._giving.take(inner, donor, others)
                received.nbytes += nbytes(received.tensors)
                if plan.copies:
                    _, (received.local,) = receive(inner, inner.members.index(donor))

    def _move_logs(self, inner: InnerGroup, plan: Plan, received: Received) -> None:
        for transfer in plan.transfers:
            if self._rank == transfer.source:
                rows, tensors = self._logged(transfer.entries)
                send(inner, transfer.destination, {"rows": rows}, tensors)
                received.nbytes += nbytes(tensors)
            elif self._rank == transfer.destination:
                head, tensors = receive(inner, transfer.source)
                received.nbytes += nbytes(tensors)
                at = 0
                for name, seq, sig, count in head["rows"]:
                    received.replay.setdefault(name, {})[seq] = (read_signature(sig), tensors[at : at + count])
                    at += count
                received.replayed += len(head["rows"])

    def _logged(self, entries: dict[str, list[int]]) -> tuple[list[list[Any]], list[torch.Tensor]]:
        rows: list[list[Any]] = []
        tensors: list[torch.Tensor] = []
        for name, seqs in entries.items():
            for seq in seqs:
                sig, results = self._runtime.results.logged(self._runtime.groups[name], seq)
                rows.append([name, seq, sig, len(results)])
                tensors += results
        return rows, tensors


def pack_rank(publisher: SharedMemoryPublisher, boundary: int, groups: Collection[str]) -> bytes:
    """Rank-local state of one rank as another begins with it, which becomes its copy (``on_failure="reroute"``): what
    it has published at a step boundary, and the newest of each record that it keeps for its replacements;
    not results of operations of ``groups``, which are not for others.
    """
    newest = {
        (key.kind, key.name): (key, value)
        for key, value in publisher.records.read()
        if key.kind != BUCKETS and key.kind not in groups
    }
    return dumps((publisher.read_boundary(boundary), plain(list(newest.values()))))


def unpack_rank(publisher: SharedMemoryPublisher, packed: bytes) -> dict[str, Any]:
    """Keep in the copy's publisher what the other has kept. Returns what it had published at the step boundary,
    by name.
    """
    parts, kept = loads(packed)
    for key, value in from_plain(kept):
        publisher.records.add(key, value)
    return parts  # type: ignore[no-any-return]
