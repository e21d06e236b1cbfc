"""How ranks that form a generation meet: they connect, and move logged results and state for replacements."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shared_core.encoding.plain import dumps, loads, pieces
from shared_core.errors import CorruptFile, GenerationAbandoned, NotConnected, RecoveryFailed, SwiftError
from shared_core.faults import inject
from shared_core.protocol.cut import Cut, Offer
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.mirroring import REPLICATED
from shared_core.protocol.plan import Plan
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.waiting import Wait, ranks_text
from shared_core.worker.comm.generations import MAX_ATTEMPTS, attempts
from shared_core.worker.comm.gloo import InnerGroup, finish
from shared_core.worker.messages.group_log import Signature, read_signature
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.copies import StateCopies
from shared_core.worker.recovery.transfer import layout, nbytes, receive, receive_spans, room, send, send_spans
from shared_core.worker.spans import Span, divided
from shared_core.worker.state.checksums import checksum
from shared_core.worker.state.ddp_buckets import BUCKETS
from shared_core.worker.state.local_state import BoundaryPosition
from shared_core.worker.state.publications import SharedMemoryPublisher, from_plain, plain
from shared_core.worker.state.replicated import pack
from shared_core.worker.state.updates import Updates


class Donor:
    """This worker as the exchange sees it. Recovery threads call."""

    def __init__(
        self, env: WorkerEnv, publisher: SharedMemoryPublisher, updates: Updates, position: BoundaryPosition
    ) -> None:
        self._env, self._publisher, self._updates, self._position = env, publisher, updates, position
        self._leaving = ExitStack()

    @property
    def version(self) -> int:
        return self._updates.state_version

    @property
    def keeps(self) -> dict[str, Any]:
        """Fields of a frontier: which states this worker has."""
        outside = self._updates.outside
        return {"boundary": outside.boundary, "kept": outside.boundaries.indices, "outside": outside.active}

    @contextmanager
    def frozen(
        self, min_version: int, boundary: int, *, wait: bool = True
    ) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """The state at step boundary ``boundary``, or at a moment when no update runs and at least ``min_version``
        steps are in it; no update begins inside. Such a moment is waited for, ``wait_timeout_s`` at most, unless
        ``wait`` is False. See :meth:`Updates.frozen`.
        """
        timeout_s = self._env.config.detection.wait_timeout_s if wait else 0.0
        with self._updates.frozen(min_version, timeout_s, boundary) as exported:
            yield exported

    def stays_with(self, version: int) -> bool:
        """Whether this replacement is a copy of the worker that left, and has the state of this version itself."""
        return self._updates.stays_with(version)

    def places(self, count: int) -> list[torch.Tensor]:
        """A replacement's parameters, detached views that alias them, into which those of its donor are received: it
        has no state of its own yet. Empty if the donor has another number of them.
        """
        state = self._updates.replicated
        return [] if state is None or len(state.parameters) != count else [p.detach() for p in state.parameters]

    def offer(self) -> Offer:
        """Say what this worker has. It passes no boundary and makes no update until :meth:`withdraw`."""
        self._leaving.close()
        self._leaving.enter_context(self._publisher.publishing)
        self._leaving.enter_context(self._updates.gate.held())
        self._publisher.sync()
        boundaries = tuple(
            (boundary.index, boundary.version, boundary.kind) for boundary in self._publisher.boundaries()
        )
        # A replacement that is still behind has parameters that no step boundary knows.
        has_state = not self._position.joining and self._updates.exact
        return Offer(self._env.rank, self._env.slot, boundaries, self._updates.state_version if has_state else None)

    def withdraw(self) -> None:
        self._leaving.close()

    def drain_for_resize(self, cut: Cut) -> None:
        """Write the replicated state at the cut, for those that follow. Raises RecoveryFailed."""
        with self._updates.at_version(cut.version, cut.boundary) as (description, tensors):
            self._publisher.put(REPLICATED, b"", pieces((description, list(tensors))))


#: So many give at most, and only where the state has at least so many bytes.
_GIVERS, _SEVERAL = 3, 64 << 20
#: Tensors are divided at multiples of so many bytes.
_UNIT = 64 << 10
#: Gloo normally lets go of receive buffers at once. Where it does not, a replacement cannot use its parameters again.
_STUCK_S = 2.0


def helpers(donor: int, replicas: Collection[int], replacements: Collection[int]) -> list[int]:
    """Ranks among ``replicas`` that may give state together with ``donor``: the next ones after it, at most ``_GIVERS``
    with it. ``replacements`` have nothing to give.
    """
    able = sorted(set(replicas).difference(replacements, [donor]))
    later = [rank for rank in able if rank > donor]
    return (later + able)[: min(_GIVERS - 1, len(able))]


class Giving:
    """Gives state, and takes it, by :mod:`shared_core.worker.recovery.transfer`, and raises what that raises. Ranks are
    global; the groups' indices are looked up here.
    """

    def __init__(self, rank: int, donor: Donor, copies: StateCopies) -> None:
        self._rank, self._donor, self._copies = rank, donor, copies

    def others(self, plan: Plan, replacement: int, boundary: StepBoundary, members: Collection[int]) -> list[int]:
        """Which of ``members`` may give ``replacement`` its state, beside its donor."""
        replicas = set(boundary.replicas or members).intersection(members)
        return helpers(plan.donors[replacement], replicas, plan.boundaries)

    def give(self, inner: InnerGroup, replacement: int, boundary: StepBoundary) -> int:
        """As donor, no update being made meanwhile. Returns the bytes that were sent. Raises RecoveryFailed."""
        place = inner.members.index(replacement)
        with self._donor.frozen(boundary.version, boundary.index) as (description, tensors):
            copied = self._copies.close(replacement, boundary, description)
            head = {"description": description, "layout": layout(tensors), "copied": copied}
            send(inner, place, head, [])
            wanted, _ = receive(inner, place, "to say what it is to be sent")
            return _send(inner, place, tensors, wanted)

    def help(self, inner: InnerGroup, replacement: int, boundary: StepBoundary) -> int:
        """As another one, no update being made meanwhile. Returns the bytes sent. Raises RecoveryFailed."""
        place = inner.members.index(replacement)
        wanted, _ = receive(inner, place, "to say what it is to be sent")
        if not wanted["spans"]:
            return 0
        with ExitStack() as stack:
            try:
                description, tensors = stack.enter_context(
                    self._donor.frozen(boundary.version, boundary.index, wait=False)
                )
                gives = _digest(description, layout(tensors)) == wanted["digest"]
            except RecoveryFailed:
                gives = False
            send(inner, place, {"gives": gives}, [])
            return _send(inner, place, tensors, wanted) if gives else 0

    def take(self, inner: InnerGroup, donor: int, others: Sequence[int]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """As replacement. Returns the description of the state and its tensors, on the CPU. The first of them are this
        worker's parameters, written in place, where shape and dtype are the same. There are none, and the description
        says ``here``, where the state has come while the others trained. Raises StillWriting if the group was cut, and
        something may still be written into the parameters.
        """
        at = inner.members.index
        head, _ = receive(inner, at(donor))
        description, described = head["description"], head["layout"]
        here = self._donor.stays_with(description["version"])
        if here or self._copies.in_place(head["copied"], description["states"]):
            for rank in (*others, donor):
                send(inner, at(rank), {"digest": 0, "spans": []}, [])
            return description | {"here": True}, []
        tensors = room(described, self._donor.places(description["parameters"]))
        sizes = [each.nbytes for each in tensors]
        several = sum(sizes) >= _SEVERAL
        mine, *shares = divided(sizes, 1 + len(others) if several else 1, _UNIT)
        digest, spans = _digest(description, described), {donor: mine}
        asked = dict(zip(others, shares or [[] for _ in others], strict=True))
        for rank, share in asked.items():
            send(inner, at(rank), {"digest": digest, "spans": _rows(share)}, [])
        for rank, share in asked.items():
            if share:
                answer, _ = receive(inner, at(rank), "to say whether it gives its share of the state")
                spans[rank if answer["gives"] else donor] = share if answer["gives"] else spans[donor] + share
        send(inner, at(donor), {"spans": _rows(spans[donor])}, [])
        receive_spans(inner, tensors, {at(rank): each for rank, each in spans.items()}, _STUCK_S)
        return description, tensors


def _send(inner: InnerGroup, place: int, tensors: Sequence[torch.Tensor], wanted: dict[str, Any]) -> int:
    spans = [Span(*row) for row in wanted["spans"]]
    inject.point("recovery.giving")
    send_spans(inner, place, tensors, spans)
    return sum(span.size for span in spans)


def _rows(spans: Sequence[Span]) -> list[list[int]]:
    return [[span.tensor, span.start, span.stop] for span in spans]


def _digest(description: dict[str, Any], described: list[list[Any]]) -> int:
    return checksum(pack([description, described]))


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
        try:
            return attempts(lambda attempt: self._meet(plan, generation, attempt, members))
        except NotConnected as error:
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
            inner = runtime.generations.new_inner(runtime.world, generation, attempt)
        else:
            inner = runtime.generations.side_group(
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
                if runtime.changed.wait_for(given_up, 2.0):
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
    """Keep here what the other has kept. Returns what it had published at the step boundary, by name."""
    parts, kept = loads(packed)
    for key, value in from_plain(kept):
        publisher.records.add(key, value)
    return parts  # type: ignore[no-any-return]
