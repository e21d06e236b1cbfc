"""Runs the plan of a step at one worker, and goes on inside the step when another is lost.

Everything that a step says to other workers goes over a lane, which joins those that are there. After a loss all of
them tell how far they are, come to the same new plan, and send again what its readers still need. Nothing that a
survivor has computed is thrown away: not its activations, not its gradients, which are kept apart by home pipeline
where sums must come out bit for bit (``ordered``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shared_core.errors import ConfigError, InvalidSchedule, RecoveryFailed, Unsupported
from shared_core.reroute.evaluating import Evaluating, Losses
from shared_core.reroute.finishing import Finishing
from shared_core.reroute.history import PlanHistory
from shared_core.reroute.keeping import DataAway, Keeping, first_without_data
from shared_core.reroute.measuring import Measuring
from shared_core.reroute.messages import MessageChannel, MessageKind, Shapes
from shared_core.reroute.planning import Plans
from shared_core.reroute.row_runner import RowRunner
from shared_core.reroute.step import Item, Options, StageModel, Step, StepResult, WorkerPlace
from shared_core.reroute.through_losses import through_losses
from shared_core.schedule.schedule import Worker
from shared_core.worker.recovery.lane import Lane


class Executor:
    """Runs steps at one worker.

    Args:
        place: of this worker.
        model: its stage.
        connect: makes the lane of the newest generation; blocks until all workers that are there have come.
        knocking: whether all that are lost have a newcomer that waits; asked at one worker only.
        planner: makes the plans.
        options: see :class:`Options`.
        noted: called with the kind of what has happened, and plain facts: ``rerouted`` after each change of plan,
            ``took_over`` when the first forward of another worker's micro-batch begins after it.

    Attributes:
        step: number of the next step.
    """

    def __init__(
        self,
        place: WorkerPlace,
        model: StageModel,
        connect: Callable[[], Lane],
        knocking: Callable[[], bool],
        planner: Plans,
        options: Options,
        noted: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None,
    ) -> None:
        self._place, self._model = place, model
        self._topology, self._me, self._rank = place.topology, place.me, place.rank_of
        self._connect, self._noted = connect, noted
        self._planner, self._history = planner, PlanHistory(planner)
        self._shapes: dict[MessageKind, Shapes] = {}
        self._steps: dict[int, Step] = {}
        self._channel: MessageChannel | None = None
        self._measuring = Measuring(place, planner)
        self._finishing = Finishing(place, model, self._history, self._steps, knocking, options, self._measuring)
        self._keeping = Keeping(place)
        self._evaluating = Evaluating(place, model)
        self._runner = RowRunner(place, model, options, self._finishing, self._keeping, self._measuring, noted)
        self._settled = -1
        self._until: int | None = None
        self.step = 0

    # -- what the engine calls ---------------------------------------------------------------------

    @property
    def lost(self) -> frozenset[Worker]:
        """Workers that are not there, as of the present plan."""
        return self._history.lost

    def move_to(self, step: int) -> None:
        """The next step has this number; this worker may be taking its place in a running job."""
        self.step = step

    def run(self) -> StepResult:
        """Train on the next global batch, through losses.

        Raises:
            RecoveryFailed: nobody can compute what was lost.
            DataAway: newcomers have to be let in first, before the step; then call it again.
        """
        self._measuring.begin(self.step)
        begun = self._steps.get(self.step)
        mine = self._steps[self.step] = Step(self.step)
        for old in [number for number in self._steps if number < self.step - 1]:
            del self._steps[old]
        self._finishing.forget_before(self.step - 1)
        first, last = self._me.stage == 0, self._me.stage == self._topology.stages - 1
        if begun is not None:  # it is begun again: its data are drawn
            mine.items.update({place: item for place, item in begun.items.items() if place[0] == self._me.pipeline})
        elif first or last:
            for index, item in enumerate(self._model.items()):
                mine.items[self._me.pipeline, index] = item
        through_losses(lambda: self._go_on(mine), self.leave)
        self.step += 1
        assert mine.result is not None
        return mine.result

    def _go_on(self, step: Step) -> None:
        """Run what is left of a step."""
        changed = self._channel is None or self._channel.lane.broken()
        if changed:
            self._change()
        if self._until is not None and step.number >= self._until:
            raise DataAway
        plan = self._history.begin(step.number)
        if not changed:  # else the data are sent already
            self._keeping.give(step, plan)
        self._runner.run(step, plan)
        self._finishing.finish(step)
        assert self._channel is not None
        activations = [tensors for key, tensors in step.made.items() if key.kind is MessageKind.ACTIVATION]
        self._measuring.agree(self._channel, step.number, activations)

    def begin_evaluation(self, top: int, micro_batches: int, items: Sequence[Item]) -> None:
        """See :meth:`Evaluating.begin`."""
        self._evaluating.begin(top, micro_batches, items)

    def evaluate(self) -> Losses:
        """Make the evaluation that was begun, through losses.

        Raises:
            RecoveryFailed: nobody can compute what was lost.
            DataAway: newcomers have to be let in first; then call it again.
        """

        def attempt() -> Losses:
            if (known := self._evaluating.known()) is not None:
                return known  # the others do not come to a lane for it
            if self._channel is None or self._channel.lane.broken():
                self._change()
            assert self._channel is not None
            return self._evaluating.run(self._channel, self._history.lost)

        return through_losses(attempt, self.leave)

    def settle(self) -> None:
        """Return when all workers have finished the last step.

        Raises:
            RecoveryFailed: nobody can compute what was lost.
        """

        def attempt() -> None:
            if self._channel is None or self._channel.lane.broken():
                self._change()
            # Who has come out of the exchange below does not come to another; the change says as much.
            if self._settled == self.step:
                return
            assert self._channel is not None
            if not self._channel.lane.finished:  # who has left the program had come here before, as all others had
                self._channel.lane.exchange(self.step)  # nobody comes here before it has finished the step

        through_losses(attempt, self.leave)

    @property
    def evaluations(self) -> Evaluating:
        """What has come of evaluations."""
        return self._evaluating

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
        return None if last is None else last.reduced

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
            self._channel, self._settled = MessageChannel(lane, self._topology, self._shapes, {}), self.step
            return
        workers = self._place.workers()
        lost = [list(worker) for rank, worker in sorted(workers.items()) if rank not in lane.ranks]
        ready = self._planner.lies_ready(frozenset(Worker(*each) for each in lost))
        views: dict[int, Any] = dict(lane.exchange(self._tell() | {"ready": ready}))
        self._measuring.learn(views)
        started = time.perf_counter()
        missed = {entry["generation"]: entry for view in views.values() for entry in view["entries"]}
        for _, entry in sorted(missed.items()):
            if entry["generation"] > self._history.generation and not self._is_older(entry):
                self._apply(entry)
        at = {}
        for rank in lane.ranks:
            step, place = views[rank]["at"]
            if step in self._history.changed_since(views[rank]["base"]):
                place = 0  # it has just learned of a change that others had made before
            at[_name(workers[rank])] = [step, place]
        ready = all(view["ready"] for view in views.values())
        self._until = self._first_without_data(lost, views)
        self._apply({"generation": lane.generation, "lost": lost, "ready": ready, "at": at, "until": self._until})
        self._settled = self.step if all(step >= self.step for step, _ in at.values()) else -1
        knows = {rank: {MessageKind(kind) for kind in view["shapes"]} for rank, view in views.items()}
        self._channel = MessageChannel(lane, self._topology, self._shapes, knows)
        self._finishing.connect(self._channel)
        self._runner.connect(self._channel)
        self._keeping.connect(self._channel, self._steps, views)
        self._evaluating.learn({rank: view["evaluating"] for rank, view in views.items()})
        self._learn(views)
        self._send_again(views)
        planned_s, history = time.perf_counter() - started, self._history
        if lost:
            predicted = {"extra_s": history.extra, "rest_s": history.rest}
            self._noted("rerouted", {"lost": lost, "step": self.step, "planned_s": planned_s} | predicted)

    def _tell(self) -> dict[str, Any]:
        """How far this worker is."""
        step = self._steps.get(self.step)
        return self._measuring.view() | {
            "base": self._history.generation,
            "entries": self._history.entries,
            "at": [self.step, step.at if step is not None else 0],
            "shapes": [int(what) for what in self._shapes],
            "evaluating": self._evaluating.view(),
            "steps": {
                str(number): {
                    "reduced": one.reduced is not None,
                    "data": self._keeping.held(one),
                    "norms": {str(stage): _hex(norm) for stage, norm in one.norms.items()},
                    "losses": [[*place, loss.hex()] for place, loss in one.losses.items()],
                    "result": [value.hex() for value in one.result.to_tensor().tolist()] if one.result else None,
                }
                for number, one in self._steps.items()
            },
        }

    def _is_older(self, entry: Mapping[str, Any]) -> bool:
        """Whether a change was made before this worker took its place: of steps that it has nothing to do with."""
        return self._history.generation < 0 and any(step < self.step for step, _ in entry["at"].values())

    def _first_without_data(self, lost: Sequence[Sequence[int]], views: Mapping[int, Any]) -> int | None:
        """The first step whose data went with both ends of a pipeline.

        Raises:
            RecoveryFailed: a worker has made a part of it that cannot be made again.
        """
        held: dict[int, set[tuple[int, int]]] = {}
        for view in views.values():
            for number, facts in view["steps"].items():
                held.setdefault(int(number), set()).update((d, kind) for d, kind in facts["data"])
        oldest = min(view["at"][0] for view in views.values())
        until = first_without_data(self._topology, [Worker(*each) for each in lost], held, oldest)
        for rank, view in views.items():
            reduced = view["steps"].get(str(until), {}).get("reduced")
            if until is not None and (view["at"][0] > until or reduced):
                raise RecoveryFailed(
                    f"data of step {until} went with the first and the last stage of a pipeline and all that kept "
                    f"them, and rank {rank} has summed gradients of that step"
                )
        return until

    def _apply(self, entry: Mapping[str, Any]) -> None:
        try:
            fresh = self._history.change(entry)
        except (ConfigError, InvalidSchedule, Unsupported) as error:
            raise RecoveryFailed(str(error)) from error
        for number in fresh & self._steps.keys():
            self._steps[number].at = 0

    def _learn(self, views: Mapping[int, Any]) -> None:
        """Take over norms, losses and results that others know."""
        last = self._place.last
        for view in views.values():
            for number, facts in view["steps"].items():
                step = self._steps.get(int(number))
                if step is None:
                    continue
                for stage, norm in facts["norms"].items():
                    step.norms.setdefault(int(stage), None if norm is None else float.fromhex(norm))
                for d, j, loss in facts["losses"] if last else ():
                    step.losses.setdefault((d, j), float.fromhex(loss))
                if facts["result"] is not None and step.result is None:
                    values = torch.tensor([float.fromhex(each) for each in facts["result"]], dtype=torch.float64)
                    step.result = StepResult.from_tensor(values, self._topology)
                for stage in facts["norms"]:
                    self._finishing.norm_is_known(int(number), int(stage))

    def _send_again(self, views: Mapping[int, Any]) -> None:
        """Send what readers still need and may not have got."""
        assert self._channel is not None
        open_steps = self._history.changed_since(self._channel.lane.generation - 1)
        for number in sorted(open_steps & self._steps.keys()):
            step, plan = self._steps[number], self._history.steps[number]
            for key, parts in step.made.items():
                self._runner.deliver(plan, key, parts)
            self._keeping.give(step, plan)
            facts = {rank: view["steps"].get(str(number), {}) for rank, view in views.items()}
            having = {rank for rank, fact in facts.items() if fact.get("reduced")}
            waiting = {rank for rank, view in views.items() if rank not in having and view["at"][0] <= number}
            self._finishing.pass_on_sums(step, having, waiting)


def _name(worker: Worker) -> str:
    return f"{worker.pipeline}:{worker.stage}"


def _hex(value: float | None) -> str | None:
    return None if value is None else value.hex()
