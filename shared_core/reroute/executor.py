"""Runs the plan of a step at one worker, and continues inside the step when another fails.

All messages of a step go over a survivor group. After a failure the survivors tell how far they are, compute the same
new plan, and send again what its readers still need. Nothing that a survivor has computed is thrown away: neither
activations nor gradients, which are kept apart by home pipeline where sums must be exact (``ordered``). Between two
steps survivors may move to other stages; see :mod:`shared_core.reroute.moving`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shared_core.errors import ConfigError, InvalidSchedule, RecoveryFailed
from shared_core.reroute.evaluating import Evaluating, Losses
from shared_core.reroute.history import PlanHistory, StepProgress, change_entry, progresses, summed_stages, text_of
from shared_core.reroute.keeping import DataAway, Keeping, data_until
from shared_core.reroute.messages import MessageChannel, MessageKind, through_failures
from shared_core.reroute.moving import Due, Role, Roles, as_plain, from_plain, next_change, tell
from shared_core.reroute.places import StagePlaces, WorkerPlace
from shared_core.reroute.planning import Plans
from shared_core.reroute.reports import Measuring
from shared_core.reroute.row_runner import Finishing, RowRunner
from shared_core.reroute.step import FormerParameters, HomeModel, Item, StageModel, Step, StepOptions, StepResult
from shared_core.schedule.problem import survivors
from shared_core.schedule.schedule import PlannedWorker, Topology
from shared_core.worker.recovery.survivor_groups import SurvivorGroup


class Executor:
    """Runs the steps of one worker.

    Args:
        home: the place that belongs to this worker; it may compute at another.
        connect: makes the survivor group of the newest generation; blocks until all workers that are there have come.
        joining_ranks: whether a replacement waits to be admitted; asked at one worker only.
        noted: called with a kind and plain facts: ``rerouted`` after each change of plan, ``took_over`` when the first
            forward of another worker's micro-batch begins after it, ``moved`` when workers have moved.

    ``step``: number of the next step.
    """

    def __init__(
        self,
        home: PlannedWorker,
        places: StagePlaces,
        model: HomeModel,
        connect: Callable[[], SurvivorGroup],
        joining_ranks: Callable[[], bool],
        planner: Plans,
        options: StepOptions,
        noted: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None,
    ) -> None:
        self._places, self._topology, self._model = places, places.topology, model
        self._connect, self._noted, self._joining_ranks, self._options = connect, noted, joining_ranks, options
        self._planner, self._history = planner, PlanHistory(planner)
        self._steps: dict[int, Step] = {}
        self._channel: MessageChannel | None = None
        self._roles = Roles(home, model, places, self._role)
        at_home = StagePlaces(places.topology, places.home_rank)  # who has moved evaluates at its own place
        self.evaluations = Evaluating(WorkerPlace(home, at_home), model)
        self._me = home
        self._due: Due | None = None
        self._sent_bytes = 0
        self._settled = -1
        self._until: int | None = None
        self.step = 0

    def _role(self, place: WorkerPlace, model: StageModel) -> Role:
        measuring = Measuring(place, self._planner, self._history)  # durations are of the place at which they are taken
        former, keeping = FormerParameters(model), Keeping(place)
        finishing = Finishing(
            place, model, former, self._history, self._steps, self._joining_ranks, self._options, measuring
        )
        runner = RowRunner(place, model, former, self._options, finishing, keeping, measuring, self._noted)
        return Role(place, model, measuring, finishing, keeping, runner, {})

    # -- what the engine calls ---------------------------------------------------------------------

    @property
    def failed(self) -> frozenset[PlannedWorker]:
        """Places at which nobody computes, as of the present plan."""
        return self._history.failed

    def move_to(self, step: int) -> None:
        """Set the number of the next step; a replacement calls this when it joins a running job."""
        self.step = step

    def run(self) -> StepResult:
        """Train on the next global batch, through failures.

        RecoveryFailed if it cannot be made; DataAway if replacements have to be admitted first: then call it again.
        """
        through_failures(self._move, self.leave)
        self._roles.now.measuring.begin(self.step)
        begun = self._steps.get(self.step)
        mine = self._steps[self.step] = Step(self.step)
        for old in [number for number in self._steps if number < self.step - 1]:
            del self._steps[old]
        self._roles.now.finishing.forget_before(self.step - 1)
        if begun is not None:  # it is begun again: its data are drawn
            mine.items.update({place: item for place, item in begun.items.items() if place[0] == self._me.pipeline})
            mine.reader = begun.reader
        elif self._me.stage in (0, self._topology.stages - 1):
            for index, item in enumerate(self._model.items()):
                mine.items[self._me.pipeline, index] = item
            mine.reader = self._model.reader
        through_failures(lambda: self._carry_on(mine), self.leave)
        self.step += 1
        assert mine.result is not None
        return mine.result

    def _carry_on(self, step: Step) -> None:
        changed = self._channel is None or self._channel.survivor_group.broken()
        if changed:
            self._change()
        if self._until is not None and step.number >= self._until:
            raise DataAway
        plan, role = self._history.begin(step.number), self._roles.now
        if not changed:  # else the data are sent already
            role.keeping.give(step, plan)
        if step.result is None:
            role.measuring.report(step.number)
        role.runner.run(step, plan)
        role.finishing.finish(step)
        assert self._channel is not None
        if self._roles.away:
            self._roles.follow(self._channel, step, self.failed)
        activations = [tensors for key, tensors in step.made.items() if key.kind is MessageKind.ACTIVATION]
        self._sent_bytes = max((sum(t.nbytes for t in tensors) for tensors in activations), default=0)
        role.measuring.agree(self._channel, step.number, activations)

    def begin_evaluation(self, boundary: int, micro_batches: int, items: Sequence[Item]) -> None:
        self.evaluations.begin(boundary, micro_batches, items, self._model.reader if items else None)

    def evaluate(self) -> Losses:
        """Make the evaluation that was begun, through failures; raises as :meth:`run`."""

        def attempt() -> Losses:
            if (known := self.evaluations.known()) is not None:
                return known  # the others do not come to a survivor group for it
            if self._channel is None or self._channel.survivor_group.broken():
                self._change()
            assert self._channel is not None
            return self.evaluations.run(self._channel, self._places.gone(self.failed))

        return through_failures(attempt, self.leave)

    def settle(self) -> None:
        """Return when all workers have finished the last step; RecoveryFailed if that cannot be."""

        def attempt() -> None:
            if self._channel is None or self._channel.survivor_group.broken():
                self._change()
            # Who has come out of the exchange below does not come to another; the change says as much.
            if self._settled == self.step:
                return
            assert self._channel is not None
            if (
                not self._channel.survivor_group.finished
            ):  # who has left the program had come here before, as all others had
                self._channel.survivor_group.exchange(self.step)  # nobody comes here before it has finished the step

        through_failures(attempt, self.leave)

    @property
    def connected(self) -> bool:
        """Whether there is a survivor group; a replacement that has just been admitted has none."""
        return self._channel is not None

    @property
    def survivor_group(self) -> SurvivorGroup:
        """The survivor group in use; valid after :meth:`settle`."""
        assert self._channel is not None
        return self._channel.survivor_group

    @property
    def gradients(self) -> torch.Tensor | None:
        """Flat gradients of the last step: summed over the pipelines, not clipped, no copy. None before the first."""
        last = self._steps.get(self.step - 1)
        return None if last is None else last.home if self._roles.away else last.reduced

    def leave(self) -> None:
        """Drop the survivor group, which is broken or about to change: replacements are admitted now."""
        self._channel = None

    # -- losses ------------------------------------------------------------------------------------

    def _change(self) -> None:
        """Form the survivor group of the newest generation, and agree on how to continue."""
        survivor_group = self._connect()
        if survivor_group.finished:
            self._channel = MessageChannel(survivor_group, self._topology, self._roles.now.shapes, {})
            self._settled = self.step
            return
        moves = self._places.still(self._places.moves, survivor_group.ranks)
        ready = self._planner.lies_ready(self._places.vacant_after(moves, survivor_group.ranks))
        views: dict[int, Any] = dict(survivor_group.exchange(self._tell() | {"ready": ready}))
        self._roles.now.measuring.learn(views)
        started = time.perf_counter()
        missed = {entry["number"]: entry for view in views.values() for entry in view["entries"]}
        for _, entry in sorted(missed.items()):
            # A replacement has nothing to do with changes in steps before its own.
            older = self._history.number < 0 and any(at[0] < self.step for at in entry["at"].values())
            if entry["number"] > self._history.number and not older:
                self._apply(entry)
        known = max(views.values(), key=lambda view: int(view["base"]))
        self._roles.take(self._places.still(from_plain(known["moves"]), survivor_group.ranks), self._steps)
        workers, vacant = self._places.workers(), self._places.vacant(survivor_group.ranks)
        changed = {rank: self._history.changed_since(view["base"]) for rank, view in views.items()}
        gone = self._places.gone(vacant)
        _refuse(self._topology, gone)
        self._until = data_until(self._topology, gone, views)
        at, summed = progresses(workers, views, changed), summed_stages(workers, views)
        self._apply(change_entry(2 * survivor_group.number, vacant, views, at, summed, self._until))
        self._settled = self.step if all(one[0] >= self.step for one in at.values()) else -1
        self._channel = self._roles.meet(survivor_group, views, self._steps)
        self.evaluations.learn({rank: view["evaluating"] for rank, view in views.items()})
        self._roles.now.learn(self._steps, views)
        self._send_again(views)
        self._due = next_change(self._places, self._planner, self.failed, views, max(one[0] for one in at.values()))
        planned_s, history = time.perf_counter() - started, self._history
        if vacant:
            predicted = {"extra_s": history.extra, "rest_s": history.rest}
            failed = [list(worker) for worker in sorted(vacant)]
            self._noted("rerouted", {"failed": failed, "step": self.step, "planned_s": planned_s} | predicted)
        for number in sorted(self._steps.keys() & history.steps.keys()):
            if number < self.step:  # it is over here, but others may need something of it again
                self._roles.now.runner.run(self._steps[number], history.steps[number])

    def _behind(self) -> dict[int, int]:
        """By step that is over here: the place in its row from which others still need something."""
        me, plans = self._roles.now.place.me, self._history.steps
        over = [self._steps[number] for number in self._steps.keys() & plans.keys() if number < self.step]
        return {one.number: one.at for one in over if one.at < len(plans[one.number].plan.schedule.rows.get(me, ()))}

    # -- moves -------------------------------------------------------------------------------------

    def _move(self) -> None:
        if self._channel is None or self._due is None or self._due.step != self.step:
            return
        survivor_group, moves, began = self._channel.survivor_group, self._due.moves, time.perf_counter()
        # Nobody comes here before it has finished the step before.
        told = survivor_group.exchange(self._roles.offer(moves, survivor_group.ranks))
        wrong = self._roles.prepare(self._channel, self.step, moves, told)
        vacant = self._places.vacant_after(moves, survivor_group.ranks)
        views = survivor_group.exchange(
            self._roles.shapes()
            | {"wrong": wrong, "ready": self._planner.lies_ready(vacant), "steps": {}, "reads": _reads(self._steps)}
        )
        # All that is needed is there: whoever is still in the exchange when somebody fails learns of the moves later.
        self._due, found = None, [view["wrong"] for view in views.values() if view["wrong"]]
        if not found:
            self._roles.take(moves, self._steps)
            workers, here = self._places.workers(), StepProgress(self.step, 0, {}).to_plain()
            at = {text_of(workers[rank]): here for rank in survivor_group.ranks}
            self._apply(change_entry(2 * survivor_group.number + 1, vacant, views, at))
            self._channel = self._roles.meet(survivor_group, views, {})
        if self._places.home_rank(self._me) == survivor_group.ranks[0]:
            moved = sum(view["state"]["bytes"] for view in told.values() if view["state"] is not None)
            facts = {"moves": as_plain(moves), "step": self.step, "took_s": time.perf_counter() - began}
            self._noted("moved", facts | ({"why_not": found[0]} if found else {"bytes_moved": moved}))

    # -- what is told after a failure -----------------------------------------------------------------

    def _tell(self) -> dict[str, Any]:
        step = self._steps.get(self.step)
        mine = {
            "base": self._history.number,
            "entries": self._history.entries,
            "at": StepProgress(self.step, step.at if step is not None else 0, self._behind()).to_plain(),
            "moves": as_plain(self._places.moves),
            "moving": tell(self._model, self._options.moves, self._sent_bytes),
            "evaluating": self.evaluations.view(),
            "reads": _reads(self._steps),
            "steps": self._roles.now.facts(self._steps),
        }
        return self._roles.now.measuring.view() | self._roles.shapes() | mine

    def _apply(self, entry: Mapping[str, Any]) -> None:
        try:
            fresh = self._history.change(entry)
        except (ConfigError, InvalidSchedule) as error:
            raise RecoveryFailed(str(error)) from error
        for number in fresh & self._steps.keys():
            self._steps[number].at = 0

    def _send_again(self, views: Mapping[int, Any]) -> None:
        assert self._channel is not None
        role, having = self._roles.now, self._roles.feed_again(self._steps, views, self.failed)
        open_steps = self._history.changed_since(2 * self._channel.survivor_group.number - 1)
        for number in sorted(open_steps & self._steps.keys()):
            step, plan = self._steps[number], self._history.steps[number]
            for key, parts in step.made.items():
                role.runner.deliver(plan, key, parts)
            role.keeping.give(step, plan)
            ranks = having[number]
            waiting = {rank for rank, view in views.items() if rank not in ranks and view["at"][0] <= number}
            role.finishing.pass_on_sums(step, ranks, waiting)


def _reads(steps: Mapping[int, Step]) -> bool:
    return any(step.reader is not None for step in steps.values())


def _refuse(topology: Topology, gone: frozenset[PlannedWorker]) -> None:
    """Raise RecoveryFailed where all workers of a stage have failed."""
    try:
        survivors(topology, gone)  # replacements get no state from who has moved there
    except ConfigError as error:
        raise RecoveryFailed(str(error)) from error
