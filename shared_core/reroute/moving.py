"""Survivors that compute at the place of a lost worker of another stage (ReCycle's failure normalisation).

Two losses in one stage cost far more than one loss in each of two stages. So a survivor of a stage that can do without
it gets the state of the poorer stage from a replica, and computes there. It goes on to make the updates of its own
stage, with sums that its peers there give it: what its script sees is always what it would see without a loss, its
stage does not lose a replica, and it is home again as soon as it computes there again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import ReplicaMismatch, Unsupported
from shared_core.faults import inject
from shared_core.reroute.finishing import Finishing, set_gradients
from shared_core.reroute.messages import MessageChannel, MessageKey, MessageKind, Shapes
from shared_core.reroute.places import Places, WorkerPlace
from shared_core.reroute.room import spare_bytes
from shared_core.reroute.row_runner import RowRunner
from shared_core.reroute.step import HomeModel, StageModel, Step
from shared_core.schedule.normalise import Move, iteration_cost, normalise, patience
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import Topology, Worker
from shared_core.schedule.timing import Times

#: Who moves needs so many times the bytes of the other stage's state: for its gradients, and while they come.
_ROOM = 2


@dataclass
class Role:
    """What runs a worker's share of the steps at one place.

    Attributes:
        place: where.
        model: its layers.
        finishing: ends steps.
        runner: runs rows.
        shapes: what is known of messages to there.
    """

    place: WorkerPlace
    model: StageModel
    finishing: Finishing
    runner: RowRunner
    shapes: dict[MessageKind, Shapes]


@dataclass(frozen=True)
class Due:
    """A change of who computes where.

    Attributes:
        step: before which it is made.
        moves: all of them, those included that are made already.
    """

    step: int
    moves: tuple[Move, ...]


def due(
    topology: Topology,
    variant: Variant,
    ordered: bool,
    times: Times | None,
    gone: frozenset[Worker],
    moved: Sequence[Move],
    facts: Mapping[Worker, Mapping[str, int | None]],
    newest: int,
) -> Due | None:
    """Which change of who computes where is to be made, and when; a pure function of what all survivors have told.

    It is made where it pays, after as many steps as it takes to lose what it costs: nobody knows how long the losses
    last. It costs the copies, and a step's time, because all stand at the same batch top.

    Args:
        topology: shape of the job.
        variant: of plans.
        ordered: all micro-batches of a lost worker go to one peer.
        times: measured durations in seconds; None until there are some.
        gone: places whose workers are lost.
        moved: moves that are made already.
        facts: what each worker has told, by the place that belongs to it; see :func:`tell`.
        newest: newest step that anybody may have begun.
    """
    sizes = {worker.stage: told["state_bytes"] for worker, told in facts.items()}
    if times is None or not gone or len(sizes) < topology.stages or any(size is None for size in sizes.values()):
        return None
    state = [sizes[stage] or 0 for stage in range(topology.stages)]
    sent = max(told["sent_bytes"] or 0 for told in facts.values())
    copies = [size * times.communication / sent if sent else 0.0 for size in state]
    able = {worker for worker, told in facts.items() if (told["spare_bytes"] or 0) >= _ROOM * max(state)}
    found = normalise(
        topology, gone, times=times, variant=variant, moving=copies, ordered=ordered, able=able, moved=moved
    )
    if set(found.moves) == set(moved):
        return None
    vacant = (gone - {move.target for move in moved}) | {move.source for move in moved}
    before = iteration_cost(topology, vacant, times, variant, ordered)
    new = sum(copies[move.target.stage] for move in found.moves if move not in moved)
    steps = patience(before, found.cost, new + before)
    return None if steps is None else Due(newest + 1 + steps, found.moves)


def tell(model: HomeModel, allowed: bool, sent_bytes: int) -> dict[str, int | None]:
    """What a worker tells the others for :func:`due`, plain data.

    Args:
        model: of the stage to which it belongs.
        allowed: workers may move.
        sent_bytes: of an activation that it has sent; 0 if it sends none.
    """
    size = model.state_bytes if allowed else None
    return {"state_bytes": size, "sent_bytes": sent_bytes, "spare_bytes": spare_bytes() if size is not None else 0}


class Moving:
    """Moves one worker, and helps others to move.

    Args:
        home: of this worker.
        model: of its stage.
        places: where all are.
        make: makes the role of this worker at another place.
    """

    def __init__(
        self, home: Worker, model: HomeModel, places: Places, make: Callable[[Worker, StageModel], Role]
    ) -> None:
        self._home, self._model, self._places, self._make = home, model, places, make
        self._state: Tensor | None = None
        #: What this worker is, or will be, at another place.
        self.guest: Role | None = None

    def offer(self, moves: Sequence[Move], ranks: Sequence[int]) -> dict[str, Any]:
        """What this worker tells right before a change; plain data. All have ended the same step."""
        stages = {move.target.stage for move in self._new(moves)}
        gives = any(self._giver(stage, ranks) == self._places.home_rank(self._home) for stage in stages)
        state = self._model.export() if gives and self._home.stage in stages else None
        self._state = None if state is None else state[1]
        return {
            "terms": self._model.terms(),
            "state": None if state is None else state[0] | {"bytes": state[1].numel()},
        }

    def prepare(self, channel: MessageChannel, step: int, moves: Sequence[Move], told: Mapping[int, Any]) -> str:
        """Give state, or get it and build the layers.

        Returns:
            Why this worker cannot move; empty if nothing is in the way.

        Raises:
            LaneBroken: somebody was lost.
        """
        if len({view["terms"] for view in told.values()}) > 1:
            return "the hyper-parameters of the stages differ"
        wrong, mine = "", self._places.home_rank(self._home)
        for move in self._new(moves):
            giver = self._giver(move.target.stage, channel.lane.ranks)
            key = MessageKey(step, MessageKind.STATE, move.target.stage, move.source.pipeline)
            if giver == mine:
                inject.point("reroute.give")
                assert self._state is not None
                channel.send(key, [self._state], self._places.home_rank(move.source))
            if move.source == self._home:
                inject.point("reroute.move")
                description = told[giver]["state"]
                like = torch.empty(description["bytes"], dtype=torch.uint8)
                (state,) = channel.fetch_like(key, [like], giver)
                try:
                    self.guest = self._make(move.target, self._model.build(move.target.stage, description, state))
                except (Unsupported, ReplicaMismatch) as error:
                    wrong = str(error)
        return wrong

    def forget(self) -> None:
        """This worker is home again."""
        self.guest = None

    def _new(self, moves: Sequence[Move]) -> list[Move]:
        return [move for move in moves if move not in self._places.moves]

    def _giver(self, stage: int, ranks: Sequence[int]) -> int:
        """Rank of who gives the state of a stage: the first of those that belong to it."""
        return min(
            rank
            for worker in self._places.topology.workers()
            if worker.stage == stage and (rank := self._places.home_rank(worker)) in ranks
        )


class Following:
    """Has a worker that computes elsewhere make the updates of its own stage.

    Args:
        home: its place.
        model: of its stage.
        places: where all are.
    """

    def __init__(self, home: Worker, model: StageModel, places: Places) -> None:
        self._home, self._model, self._places = home, model, places
        self._givers: dict[int, int] = {}

    def learn(self, having: Mapping[int, set[int]]) -> None:
        """There is a new lane.

        Args:
            having: by step, ranks that had the sum of this worker's stage before it: the first of them gives it.
        """
        self._givers = {step: min(ranks) for step, ranks in having.items() if ranks}

    def follow(self, channel: MessageChannel, step: Step, vacant: frozenset[Worker]) -> None:
        """Make the update of a step, which has ended at the place where this worker computes.

        Raises:
            LaneBroken: somebody was lost meanwhile; another call goes on where this one was.
        """
        parameters = self._model.parameters
        if step.home is None:
            peers = [Worker(d, self._home.stage) for d in range(self._places.topology.pipelines)]
            first = self._places.rank(min(worker for worker in peers if worker not in vacant))
            key = MessageKey(step.number, MessageKind.FOLLOW, self._home.stage, self._home.pipeline)
            size = sum(parameter.numel() for parameter in parameters)
            like = torch.empty(size, dtype=parameters[0].dtype if parameters else torch.float32)
            (step.home,) = channel.fetch_like(key, [like], self._givers.get(step.number, first))
        if not step.followed:
            assert step.verdict is not None
            set_gradients(self._model, step.home)
            self._model.update(step.verdict, False)
            step.followed = True


def swap_sums(steps: Mapping[int, Step], away: bool) -> None:
    """Between two steps, a worker moves or comes home: what it keeps of steps that have ended is of the stage at which
    it computes.

    Args:
        steps: ended ones.
        away: it moves.
    """
    for step in steps.values():
        step.made.clear()
        if away:
            step.home, step.followed = step.reduced, True
        else:
            step.reduced = step.home


def as_plain(moves: Sequence[Move]) -> list[list[list[int]]]:
    """Moves as plain data."""
    return [[list(move.source), list(move.target)] for move in moves]


def from_plain(data: Any) -> tuple[Move, ...]:
    """Inverse of :func:`as_plain`."""
    return tuple(Move(Worker(*source), Worker(*target)) for source, target in data)


def flat_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """All bytes of tensors, one after the other."""
    parts = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def from_bytes(flat: Tensor, layout: Sequence[tuple[Sequence[int], str]]) -> list[Tensor]:
    """Inverse of :func:`flat_bytes`, from (shape, type) of each tensor; copies, so that none keeps all."""
    made, at = [], 0
    for shape, name in layout:
        dtype = getattr(torch, name)
        size = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
        made.append(flat[at : at + size].clone().view(dtype).reshape(tuple(shape)))
        at += size
    return made
