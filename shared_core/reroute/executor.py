"""Runs the plan of a step at one worker, and goes on inside the step when another is lost.

Everything that a step says to other workers goes over a lane, which joins those that are there. After a loss all of
them tell how far they are, come to the same new plan, and send again what its readers still need. Nothing that a
survivor has computed is thrown away: not its activations, not its gradients, which are kept apart by home pipeline
where sums must come out bit for bit (``ordered``). Between two steps survivors may move to other stages; see
:mod:`shared_core.reroute.moving`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shared_core.errors import ConfigError, InvalidSchedule, RecoveryFailed, Unsupported
from shared_core.reroute.finishing import Finishing
from shared_core.reroute.history import PlanHistory
from shared_core.reroute.measuring import Measuring
from shared_core.reroute.messages import MessageChannel, MessageKind
from shared_core.reroute.moving import Following, Role, Roles
from shared_core.reroute.places import Places, WorkerPlace
from shared_core.reroute.planning import Plans
from shared_core.reroute.row_runner import RowRunner
from shared_core.reroute.spreading import Due, as_plain, due, from_plain, tell
from shared_core.reroute.step import HomeModel, Options, StageModel, Step, StepResult
from shared_core.reroute.through_losses import through_losses
from shared_core.schedule.routing import survivors
from shared_core.schedule.schedule import Worker
from shared_core.worker.recovery.lane import Lane


class Executor:
    """Runs steps at one worker.

    Args:
        home: the place of this worker.
        places: where all are.
        model: its stage.
        connect: makes the lane of the newest generation; blocks until all workers that are there have come.
        knocking: whether all that are lost have a newcomer that waits; asked at one worker only.
        planner: makes the plans.
        options: see :class:`Options`.
        noted: called with the kind of what has happened, and plain facts: ``rerouted`` after each change of plan,
            ``took_over`` when the first forward of another worker's micro-batch begins after it, ``moved`` when workers
            have moved.

    Attributes:
        step: number of the next step.
    """

    def __init__(
        self,
        home: Worker,
        places: Places,
        model: HomeModel,
        connect: Callable[[], Lane],
        knocking: Callable[[], bool],
        planner: Plans,
        options: Options,
        noted: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None,
    ) -> None:
        self._places, self._topology, self._model = places, places.topology, model
        self._connect, self._noted, self._knocking, self._options = connect, noted, knocking, options
        self._planner, self._history = planner, PlanHistory(planner)
        self._steps: dict[int, Step] = {}
        self._channel: MessageChannel | None = None
        self._measuring = Measuring(WorkerPlace(home, home, places), planner)
        self._me = home
        self._roles = Roles(home, model, places, self._role)
        self._following = Following(home, model, places)
        self._due: Due | None = None
        self._sent_bytes = 0
        self._settled = False
        self.step = 0

    def _role(self, place: WorkerPlace, model: StageModel) -> Role:
        finishing = Finishing(place, model, self._history, self._steps, self._knocking, self._options, self._measuring)
        runner = RowRunner(place, model, self._options, finishing, self._measuring, self._noted)
        return Role(place, model, finishing, runner, {})

    # -- what the engine calls ---------------------------------------------------------------------

    @property
    def lost(self) -> frozenset[Worker]:
        """Places at which nobody computes, as of the present plan."""
        return self._history.lost

    def move_to(self, step: int) -> None:
        """The next step has this number; this worker may be taking its place in a running job."""
        self.step = step

    def run(self) -> StepResult:
        """Train on the next global batch, through losses.

        Raises:
            RecoveryFailed: nobody can compute what was lost.
        """
        self._measuring.begin(self.step)
        through_losses(self._move, self.leave)
        mine = self._steps[self.step] = Step(self.step)
        for old in [number for number in self._steps if number < self.step - 1]:
            del self._steps[old]
        self._roles.now.finishing.forget_before(self.step - 1)
        home = self._me
        if home.stage in (0, self._topology.stages - 1):
            for index, item in enumerate(self._model.items()):
                mine.items[home.pipeline, index] = item
        through_losses(lambda: self._go_on(mine), self.leave)
        self.step += 1
        assert mine.result is not None
        return mine.result

    def _go_on(self, step: Step) -> None:
        """Run what is left of a step."""
        changed = self._channel is None or self._channel.lane.broken()
        if changed:
            self._change()
        plan, role = self._history.begin(step.number), self._roles.now
        if not changed:  # else the data are sent already
            role.runner.send_items(step, plan)
        role.runner.run(step, plan)
        role.finishing.finish(step)
        assert self._channel is not None
        if self._roles.away:
            self._following.follow(self._channel, step, self.lost)
        activations = [tensors for key, tensors in step.made.items() if key.kind is MessageKind.ACTIVATION]
        self._sent_bytes = max((sum(t.nbytes for t in tensors) for tensors in activations), default=0)
        self._measuring.agree(self._channel, step.number, activations)

    def settle(self) -> None:
        """Return when all workers have finished the last step.

        Raises:
            RecoveryFailed: nobody can compute what was lost.
        """

        def attempt() -> None:
            if self._channel is None or self._channel.lane.broken():
                self._change()
                # Who has come out of the exchange below does not come to another; the change says as much.
                if self._settled:
                    return
            assert self._channel is not None
            if not self._channel.lane.finished:  # who has left the program had come here before, as all others had
                self._channel.lane.exchange(self.step)  # nobody comes here before it has finished the step

        through_losses(attempt, self.leave)

    @property
    def connected(self) -> bool:
        """Whether there is a lane; a newcomer that has just been let in has none."""
        return self._channel is not None

    @property
    def lane(self) -> Lane:
        """The lane in use; after :meth:`settle`."""
        assert self._channel is not None
        return self._channel.lane

    @property
    def gradients(self) -> torch.Tensor | None:
        """Of the last step, one after the other: summed, not clipped. None before the first."""
        last = self._steps.get(self.step - 1)
        return None if last is None else last.home if self._roles.away else last.reduced

    def leave(self) -> None:
        """The lane is of no more use: newcomers are let in now."""
        self._channel = None

    # -- losses ------------------------------------------------------------------------------------

    def _change(self) -> None:
        """Form the lane of the newest generation, and agree on how to go on.

        Raises:
            LaneBroken: somebody else was lost meanwhile.
            RecoveryFailed: nobody can compute what was lost.
        """
        lane = self._connect()
        if lane.finished:
            self._channel, self._settled = MessageChannel(lane, self._topology, self._roles.now.shapes, {}), True
            return
        moves = self._places.still(self._places.moves, lane.ranks)
        ready = self._planner.lies_ready(self._places.vacant_after(moves, lane.ranks))
        views: dict[int, Any] = dict(lane.exchange(self._tell() | {"ready": ready}))
        self._measuring.learn(views)
        started = time.perf_counter()
        missed = {entry["generation"]: entry for view in views.values() for entry in view["entries"]}
        for _, entry in sorted(missed.items()):
            if entry["generation"] > self._history.generation and not self._is_older(entry):
                self._apply(entry)
        known = max(views.values(), key=lambda view: int(view["base"]))
        self._roles.take(self._places.still(from_plain(known["moves"]), lane.ranks), self._steps)
        workers, vacant = self._places.workers(), self._places.vacant(lane.ranks)
        at = {}
        for rank in lane.ranks:
            step, place = views[rank]["at"]
            if step in self._history.changed_since(views[rank]["base"]):
                place = 0  # it has just learned of a change that others had made before
            at[_name(workers[rank])] = [step, place]
        ready = all(view["ready"] for view in views.values())
        lost = [list(worker) for worker in sorted(vacant)]
        self._refuse(self._places.gone(vacant))
        self._apply({"generation": 2 * lane.generation, "lost": lost, "ready": ready, "at": at})
        self._settled = all(step >= self.step for step, _ in at.values())
        self._channel = self._roles.meet(lane, views)
        self._learn(views)
        self._send_again(views)
        self._due = self._next_change(views, max(step for step, _ in at.values()))
        planned_s, history = time.perf_counter() - started, self._history
        if lost:
            predicted = {"extra_s": history.extra, "rest_s": history.rest}
            self._noted("rerouted", {"lost": lost, "step": self.step, "planned_s": planned_s} | predicted)

    # -- moves -------------------------------------------------------------------------------------

    def _next_change(self, views: Mapping[int, Any], newest: int) -> Due | None:
        """See :func:`~shared_core.reroute.moving.due`."""
        planner, gone = self._planner, self._places.gone(self.lost)
        homes = {self._places.home_rank(worker): worker for worker in self._topology.workers()}
        facts = {homes[rank]: view["moving"] for rank, view in views.items()}
        moved = self._places.moves
        return due(self._topology, planner.variant, planner.ordered, planner.times, gone, moved, facts, newest)

    def _move(self) -> None:
        """Before a step: if a change of places is due, make it."""
        if self._channel is None or self._due is None or self._due.step != self.step:
            return
        lane, moves, began = self._channel.lane, self._due.moves, time.perf_counter()
        # Nobody comes here before it has finished the step before.
        told = lane.exchange(self._roles.offer(moves, lane.ranks))
        wrong = self._roles.prepare(self._channel, self.step, moves, told)
        vacant = self._places.vacant_after(moves, lane.ranks)
        views = lane.exchange(self._roles.shapes() | {"wrong": wrong, "ready": self._planner.lies_ready(vacant)})
        # All that is needed is there: whoever is still in the exchange when somebody is lost learns of the moves later.
        self._due, found = None, [view["wrong"] for view in views.values() if view["wrong"]]
        moved = {"moves": as_plain(moves), "step": self.step}
        if not found:
            self._roles.take(moves, self._steps)
            at = {_name(place): [self.step, 0] for rank, place in self._places.workers().items() if rank in lane.ranks}
            ready, lost = all(view["ready"] for view in views.values()), [list(worker) for worker in sorted(vacant)]
            self._apply({"generation": 2 * lane.generation + 1, "lost": lost, "ready": ready, "at": at})
            self._channel = self._roles.meet(lane, views)
        if self._places.home_rank(self._me) == lane.ranks[0]:
            nbytes = sum(view["state"]["bytes"] for view in told.values() if view["state"] is not None)
            why = {"why_not": found[0]} if found else {"bytes_moved": nbytes}
            self._noted("moved", moved | why | {"took_s": time.perf_counter() - began})

    # -- what is told after a loss -----------------------------------------------------------------

    def _tell(self) -> dict[str, Any]:
        """How far this worker is."""
        step = self._steps.get(self.step)
        mine = {
            "base": self._history.generation,
            "entries": self._history.entries,
            "at": [self.step, step.at if step is not None else 0],
            "moves": as_plain(self._places.moves),
            "moving": tell(self._model, self._options.moves, self._sent_bytes),
            "steps": {str(number): one.facts() for number, one in self._steps.items()},
        }
        return self._measuring.view() | self._roles.shapes() | mine

    def _is_older(self, entry: Mapping[str, Any]) -> bool:
        """Whether a change was made before this worker took its place: of steps that it has nothing to do with."""
        return self._history.generation < 0 and any(step < self.step for step, _ in entry["at"].values())

    def _apply(self, entry: Mapping[str, Any]) -> None:
        try:
            fresh = self._history.change(entry)
        except (ConfigError, InvalidSchedule, Unsupported) as error:
            raise RecoveryFailed(str(error)) from error
        for number in fresh & self._steps.keys():
            self._steps[number].at = 0

    def _refuse(self, gone: frozenset[Worker]) -> None:
        """Raises RecoveryFailed where a stage has lost all its workers, or a pipeline its data."""
        for d in range(self._topology.pipelines):
            if {Worker(d, 0), Worker(d, self._topology.stages - 1)} <= gone:
                raise RecoveryFailed(f"the data of pipeline {d} went with its first and its last stage")
        try:
            survivors(self._topology, gone)  # newcomers get no state from who has moved there
        except ConfigError as error:
            raise RecoveryFailed(str(error)) from error

    def _learn(self, views: Mapping[int, Any]) -> None:
        """Take over norms, losses and results that others know."""
        for view in views.values():
            for number, facts in view["steps"].items():
                if (step := self._steps.get(int(number))) is not None:
                    step.learn(facts, self._topology, self._roles.now.place.last)
                    for stage in facts["norms"]:
                        self._roles.now.finishing.norm_is_known(int(number), int(stage))

    def _send_again(self, views: Mapping[int, Any]) -> None:
        """Send what readers still need and may not have got."""
        assert self._channel is not None
        role = self._roles.now
        peers, homes = self._ranks_of(role.place.me.stage), self._ranks_of(self._me.stage)
        having = {
            number: {rank for rank, view in views.items() if view["steps"].get(str(number), {}).get("reduced")}
            for number in self._steps
        }
        for number, step in self._steps.items():
            if having[number] & peers and min(having[number] & peers) == self._places.rank(role.place.me):
                lacking = [
                    move.source
                    for move in self._places.moves
                    if not views[self._places.home_rank(move.source)]["steps"]
                    .get(str(number), {})
                    .get("followed", True)
                ]
                role.finishing.feed(step, lacking)
        self._following.learn({number: ranks & homes for number, ranks in having.items()})
        open_steps = self._history.changed_since(2 * self._channel.lane.generation - 1)
        for number in sorted(open_steps & self._steps.keys()):
            step, plan = self._steps[number], self._history.steps[number]
            for key, parts in step.made.items():
                role.runner.deliver(plan, key, parts)
            role.runner.send_items(step, plan)
            ranks = having[number]
            waiting = {rank for rank, view in views.items() if rank not in ranks and view["at"][0] <= number}
            role.finishing.pass_on_sums(step, ranks, waiting)

    def _ranks_of(self, stage: int) -> set[int]:
        """Who computes at a stage."""
        workers = (Worker(d, stage) for d in range(self._topology.pipelines))
        return {self._places.rank(worker) for worker in workers if worker not in self.lost}


def _name(worker: Worker) -> str:
    return f"{worker.pipeline}:{worker.stage}"
