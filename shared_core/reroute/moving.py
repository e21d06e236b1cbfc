"""Survivors that compute at the place of a failed worker of another stage (ReCycle's failure normalisation).

Two failures in one stage cost far more than one failure in each of two stages. So a survivor of a stage that can spare
it gets the state of the poorer stage from a replica, and computes there. It still makes the updates of its own stage,
with sums that its peers there give it: its script sees what it would see without a failure, its stage keeps the
replica, and it can return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import ReplicaMismatch, Unsupported
from shared_core.faults import inject
from shared_core.reroute.keeping import Keeping
from shared_core.reroute.messages import MessageChannel, MessageKey, MessageKind, Shapes
from shared_core.reroute.places import StagePlaces, WorkerPlace
from shared_core.reroute.planning import Plans
from shared_core.reroute.reports import Measuring
from shared_core.reroute.row_runner import Finishing, RowRunner
from shared_core.reroute.step import HomeModel, StageModel, Step
from shared_core.reroute.times import second_updates, spare_bytes
from shared_core.schedule.normalise import Move, iteration_cost, normalise, steps_to_wait
from shared_core.schedule.schedule import PlannedWorker
from shared_core.worker.recovery.survivor_groups import SurvivorGroup

# -- when survivors move, and which: a pure function of what all have told --------------------------------------------


#: Multiple of the bytes of the other stage's state that a mover needs: for its gradients, and while they come.
_ROOM = 2


@dataclass(frozen=True)
class Due:
    """A change of who computes where: the step before which it is made, and all moves, those made already included."""

    step: int
    moves: tuple[Move, ...]


def next_change(
    places: StagePlaces, planner: Plans, vacant: frozenset[PlannedWorker], views: Mapping[int, Any], newest: int
) -> Due | None:
    """Which change of who computes where is to be made, and when; None for no change.

    It is made where it pays, after as many steps as it takes to lose what it costs: nobody knows how long the failures
    last. It costs the copies, and a step's time, because all stand at the same step boundary. Who moves makes two
    updates in each step.

    Args:
        views: what all have told, by rank, with what :func:`tell` says as ``moving``.
        newest: newest step that anybody may have begun.
    """
    topology, times, ordered = places.topology, planner.times, planner.ordered
    gone, moved = places.gone(vacant), places.moves
    homes = {places.home_rank(worker): worker for worker in topology.workers()}
    facts = {homes[rank]: view["moving"] for rank, view in views.items()}
    sizes = {worker.stage: told["state_bytes"] for worker, told in facts.items()}
    if times is None or not gone or len(sizes) < topology.stages or any(size is None for size in sizes.values()):
        return None
    state = [sizes[stage] or 0 for stage in range(topology.stages)]
    sent = max(told["sent_bytes"] or 0 for told in facts.values())
    copies = [size * times.communication / sent if sent else 0.0 for size in state]
    able = {worker for worker, told in facts.items() if (told["spare_bytes"] or 0) >= _ROOM * max(state)}
    found = normalise(
        topology, gone, times=times, variant=planner.variant, moving=copies, ordered=ordered, able=able, moved=moved
    )
    if set(found.moves) == set(moved):
        return None
    now_vacant = (gone - {move.target for move in moved}) | {move.source for move in moved}
    second, later = (max(second_updates(times, some).values(), default=0.0) for some in (moved, found.moves))
    before = iteration_cost(topology, now_vacant, times, planner.variant, ordered) + second
    new = sum(copies[move.target.stage] for move in found.moves if move not in moved)
    steps = steps_to_wait(before, found.cost + later, new + before)
    return None if steps is None else Due(newest + 1 + steps, found.moves)


def tell(model: HomeModel, allowed: bool, sent_bytes: int) -> dict[str, int | None]:
    """What a worker tells for :func:`next_change`; ``sent_bytes`` of an activation that it sends, 0 for none."""
    size = model.state_bytes if allowed else None
    return {"state_bytes": size, "sent_bytes": sent_bytes, "spare_bytes": spare_bytes() if size is not None else 0}


def as_plain(moves: Sequence[Move]) -> list[list[list[int]]]:
    return [[list(move.source), list(move.target)] for move in moves]


def from_plain(data: Any) -> tuple[Move, ...]:
    return tuple(Move(PlannedWorker(*source), PlannedWorker(*target)) for source, target in data)


# -- how they move ----------------------------------------------------------------------------------------------------


@dataclass
class Role:
    """What runs a worker's share of the steps at one place. ``shapes`` are those of messages to this place."""

    place: WorkerPlace
    model: StageModel
    measuring: Measuring
    finishing: Finishing
    keeping: Keeping
    runner: RowRunner
    shapes: dict[MessageKind, Shapes]

    def facts(self, steps: Mapping[int, Step]) -> dict[str, Any]:
        return {str(number): step.facts() | {"data": self.keeping.held(step)} for number, step in steps.items()}

    def learn(self, steps: Mapping[int, Step], views: Mapping[int, Any]) -> None:
        """Take over norms, losses and results of ``steps`` that others have told, by rank."""
        for view in views.values():
            for number, facts in view["steps"].items():
                if (step := steps.get(int(number))) is not None:
                    step.learn(facts, self.place.topology, self.place.last)
                    for stage in facts["norms"]:
                        self.finishing.norm_is_known(int(number), int(stage))


class Roles:
    """At which place one worker computes, ``now`` or at ``home``; moves it, and helps others to move."""

    def __init__(
        self,
        home: PlannedWorker,
        model: HomeModel,
        places: StagePlaces,
        make: Callable[[WorkerPlace, StageModel], Role],
    ) -> None:
        self._home, self._model, self._places, self._make = home, model, places, make
        self.home = self.now = make(WorkerPlace(home, places), model)
        self._givers: dict[int, int] = {}
        self._hosted: dict[PlannedWorker, Role] = {}  # by place: the one that is run, and one that is made ready
        self._state: Tensor | None = None

    @property
    def away(self) -> bool:
        return self.now is not self.home

    def take(self, moves: Sequence[Move], steps: Mapping[int, Step]) -> None:
        """From now on these workers, and no others, compute elsewhere. If this one moves, its ``steps`` have ended."""
        self._places.move(moves)
        place = next((move.target for move in moves if move.source == self._home), self._home)
        before = self.now.place.me
        if place == before:
            return
        for step in steps.values():
            step.go(from_home=before == self._home, comes_home=place == self._home)
        self.now = self.home if place == self._home else self._hosted[place]
        self._hosted = {} if place == self._home else {place: self.now}

    def shapes(self) -> dict[str, Any]:
        """Of which messages this worker knows the shapes, by place; plain data."""
        roles = (self.home, *self._hosted.values())
        return {"shapes": [[list(role.place.me), [int(what) for what in role.shapes]] for role in roles]}

    def meet(
        self, survivor_group: SurvivorGroup, views: Mapping[int, Any], steps: Mapping[int, Step]
    ) -> MessageChannel:
        """A channel over a new survivor group, which all parts of the present role then use."""
        at = self._places.workers()
        knows = {
            rank: {
                MessageKind(kind)
                for place, kinds in view["shapes"]
                if PlannedWorker(*place) == at[rank]
                for kind in kinds
            }
            for rank, view in views.items()
        }
        channel = MessageChannel(survivor_group, self._places.topology, self.now.shapes, knows)
        self.now.measuring.connect(channel)
        self.now.finishing.connect(channel)
        self.now.runner.connect(channel)
        self.now.keeping.connect(channel, steps, views)
        return channel

    def feed_again(
        self, steps: Mapping[int, Step], views: Mapping[int, Any], vacant: frozenset[PlannedWorker]
    ) -> dict[int, set[int]]:
        """On a new survivor group, send sums to the workers that moved. Returns the ranks that have sums, by step."""
        having = {
            number: {rank for rank, view in views.items() if view["steps"].get(str(number), {}).get("reduced")}
            for number in steps
        }
        here, home = (
            {self._places.rank(w) for w in self._places.topology.workers() if w.stage == stage and w not in vacant}
            for stage in (self.now.place.me.stage, self._home.stage)
        )
        for number, step in steps.items():
            if having[number] & here and min(having[number] & here) == self._places.rank(self.now.place.me):
                for move in self._places.moves:
                    facts = views[self._places.home_rank(move.source)]["steps"].get(str(number), {})
                    if not facts.get("followed", True):
                        self.now.finishing.feed(step, [move.source])
        # The lowest rank that has the sum of this worker's stage gives it.
        self._givers = {number: min(ranks & home) for number, ranks in having.items() if ranks & home}
        return having

    def offer(self, moves: Sequence[Move], ranks: Sequence[int]) -> dict[str, Any]:
        """What this worker tells right before a change; plain data. All have ended the same step."""
        inject.point("reroute.move")
        stages = {move.target.stage for move in self._new(moves)}
        gives = any(self._giver(stage, ranks) == self._places.home_rank(self._home) for stage in stages)
        state = self._model.export() if gives and self._home.stage in stages else None
        self._state = None if state is None else state[1]
        return {
            "terms": self._model.terms(),
            "state": None if state is None else state[0] | {"bytes": state[1].numel()},
        }

    def prepare(self, channel: MessageChannel, step: int, moves: Sequence[Move], told: Mapping[int, Any]) -> str:
        """Give state, or get it and build the layers. Returns why this worker cannot move; empty if it can."""
        if len({view["terms"] for view in told.values()}) > 1:
            return "the hyper-parameters of the stages differ"
        wrong, mine = "", self._places.home_rank(self._home)
        for move in self._new(moves):
            giver = self._giver(move.target.stage, channel.survivor_group.ranks)
            key = MessageKey(step, MessageKind.STATE, move.target.stage, move.source.pipeline)
            if giver == mine:
                inject.point("reroute.give")
                assert self._state is not None
                channel.send(key, [self._state], self._places.home_rank(move.source))
            if move.source == self._home:
                description = told[giver]["state"]
                like = torch.empty(description["bytes"], dtype=torch.uint8)
                (state,) = channel.fetch_like(key, [like], giver)
                try:
                    model = self._model.build(move.target.stage, description, state)
                    place = WorkerPlace(move.target, self._places)
                    self._hosted[move.target] = self._make(place, model)
                except (Unsupported, ReplicaMismatch) as error:
                    wrong = str(error)
        inject.point("reroute.move")
        return wrong

    def follow(self, channel: MessageChannel, step: Step, vacant: frozenset[PlannedWorker]) -> None:
        """In a worker that has moved, make its home stage's update of a step that has ended; after SurvivorGroupBroken
        another call continues.
        """
        parameters = self._model.parameters
        if step.home is None:
            peers = [PlannedWorker(d, self._home.stage) for d in range(self._places.topology.pipelines)]
            first = self._places.rank(min(worker for worker in peers if worker not in vacant))
            key = MessageKey(step.number, MessageKind.FOLLOW, self._home.stage, self._home.pipeline)
            size = sum(parameter.numel() for parameter in parameters)
            like = torch.empty(size, dtype=parameters[0].dtype if parameters else torch.float32)
            (step.home,) = channel.fetch_like(key, [like], self._givers.get(step.number, first))
        if not step.followed:
            assert step.verdict is not None
            self._model.set_gradients(step.home)
            self._model.update(step.verdict, False)
            step.followed = True

    def _new(self, moves: Sequence[Move]) -> list[Move]:
        return [move for move in moves if move not in self._places.moves]

    def _giver(self, stage: int, ranks: Sequence[int]) -> int:
        """Rank that gives the state of a stage: the lowest of those that belong to it."""
        return min(
            rank
            for worker in self._places.topology.workers()
            if worker.stage == stage and (rank := self._places.home_rank(worker)) in ranks
        )


def flat_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of the tensors' bytes, concatenated, uint8."""
    parts = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def from_bytes(flat: Tensor, layout: Sequence[tuple[Sequence[int], str]]) -> list[Tensor]:
    """Inverse of :func:`flat_bytes`, from (shape, name of the dtype) of each tensor; copies, so that none keeps all."""
    made, at = [], 0
    for shape, name in layout:
        dtype = getattr(torch, name)
        size = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
        made.append(flat[at : at + size].clone().view(dtype).reshape(tuple(shape)))
        at += size
    return made
