"""Runs the plan of a step at one worker, and goes on inside the step when another is lost.

Everything that a step says to other workers goes over a lane, which joins those that are there. After a loss all of
them tell how far they are, come to the same new plan, and send again what its readers still need. Nothing that a
survivor has computed is thrown away: not its activations, not its gradients, which are kept apart by home pipeline
where sums must come out bit for bit (``ordered``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import ConfigError, InvalidSchedule, LaneBroken, RecoveryFailed, Unsupported
from shared_core.reroute.ahead import EQUAL, agree, from_dict, to_dict
from shared_core.reroute.history import History, Planner, StepPlan
from shared_core.reroute.mail import Key, Lane, Mail, Parts, Shapes, What
from shared_core.reroute.profile import COMMUNICATION, Profile
from shared_core.reroute.schedule import Action, Kind, Topology, Worker
from shared_core.reroute.split import StageBackward
from shared_core.reroute.step import (
    Accumulating,
    Options,
    Result,
    StageModel,
    Step,
    detached,
    differentiable,
    merge,
    table_of,
)
from shared_core.reroute.summing import flatten, reduce_in_order, unflatten
from shared_core.testing import inject

#: Steps after whose last all workers go by measured times.
MEASURED = 3
#: Messages that a worker begins to receive before it needs them.
_AHEAD = 3
_POINTS = {
    Kind.F: "reroute.forward",
    Kind.B: "reroute.backward",
    Kind.I: "reroute.backward_input",
    Kind.W: "reroute.backward_weight",
    Kind.OPT: "reroute.reduce",
}


class Executor:
    """Runs steps at one worker.

    Args:
        topology: shape of the job.
        me: this worker's place.
        rank_of: rank of each place.
        model: its stage.
        connect: makes the lane of the newest generation; blocks until all workers that are there have come.
        knocking: whether all that are lost have a newcomer that waits; asked at one worker only.
        planner: makes the plans.
        options: see :class:`Options`.
        noted: called with the kind of what has happened, and plain facts: ``rerouted`` after each change of plan,
            ``took_over`` when the first forward of another worker's micro-batch begins after it.

    Attributes:
        step: number of the next step; set it when this worker takes its place in a running job.
    """

    def __init__(
        self,
        topology: Topology,
        me: Worker,
        rank_of: Callable[[Worker], int],
        model: StageModel,
        connect: Callable[[], Lane],
        knocking: Callable[[], bool],
        planner: Planner,
        options: Options,
        noted: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None,
    ) -> None:
        self._topology, self._me, self._rank, self._model = topology, me, rank_of, model
        self._connect, self._knocking, self._options, self._noted = connect, knocking, options, noted
        self._planner, self._history = planner, History(planner)
        self._profile = Profile(skip=0)
        self._began: int | None = None
        self._watched = False
        self._shapes: dict[What, Shapes] = {}
        self._steps: dict[int, Step] = {}
        self._mail: Mail | None = None
        self._told: set[tuple[int, str]] = set()
        self._heard: set[tuple[int, Worker]] = set()
        self._settled = False
        self.step = 0

    # -- what the engine calls ---------------------------------------------------------------------

    @property
    def lost(self) -> frozenset[Worker]:
        """Workers that are not there, as of the present plan."""
        return self._history.lost

    def run(self) -> Result:
        """Train on the next global batch, through losses.

        Raises:
            RecoveryFailed: nobody can compute what was lost.
        """
        self._began = self.step if self._began is None else self._began
        mine = self._steps[self.step] = Step(self.step)
        for old in [number for number in self._steps if number < self.step - 1]:
            del self._steps[old]
        self._told = {(number, what) for number, what in self._told if number >= self.step - 1}
        self._heard = {(number, who) for number, who in self._heard if number >= self.step - 1}
        first, last = self._me.stage == 0, self._me.stage == self._topology.stages - 1
        if first or last:
            for index, item in enumerate(self._model.items()):
                mine.items[self._me.pipeline, index] = item
        begun = False
        while True:
            try:
                if self._mail is None or self._mail.lane.broken():
                    self._change()
                    begun = True
                plan = self._history.begin(self.step)
                if not begun:
                    begun = True
                    self._send_items(mine, plan)
                self._run_row(mine, plan)
                self._finish(mine)
                self._agree()
                break
            except LaneBroken:
                self._mail = None
        self.step += 1
        assert mine.result is not None
        return mine.result

    def settle(self) -> None:
        """Return when all workers have finished the last step.

        Raises:
            RecoveryFailed: nobody can compute what was lost.
        """
        while True:
            try:
                if self._mail is None or self._mail.lane.broken():
                    self._change()
                    # Who has come out of the exchange below does not come to another; the change says as much.
                    if self._settled:
                        return
                assert self._mail is not None
                if self._mail.lane.finished:
                    return  # who has left the program had come here before, as all others had
                self._mail.lane.exchange(self.step)
                return  # nobody comes here before it has finished the step
            except LaneBroken:
                self._mail = None

    @property
    def connected(self) -> bool:
        """Whether there is a lane; a newcomer that has just been let in has none."""
        return self._mail is not None

    @property
    def lane(self) -> Lane:
        """The lane in use; after :meth:`settle`."""
        assert self._mail is not None
        return self._mail.lane

    def leave(self) -> None:
        """The lane is of no more use: newcomers are let in now."""
        self._mail = None

    # -- losses ------------------------------------------------------------------------------------

    def _change(self) -> None:
        """Form the lane of the newest generation, and agree on how to go on.

        Raises:
            LaneBroken: somebody else was lost meanwhile.
            RecoveryFailed: nobody can compute what was lost.
        """
        lane = self._connect()
        if lane.finished:
            self._mail, self._settled = Mail(lane, self._topology, self._shapes, {}), True
            return
        workers = {self._rank(worker): worker for worker in self._topology.workers()}
        lost = [list(worker) for rank, worker in sorted(workers.items()) if rank not in lane.ranks]
        ready = self._planner.lies_ready(frozenset(Worker(*each) for each in lost))
        views: dict[int, Any] = dict(lane.exchange(self._tell() | {"ready": ready}))
        self._learn_times(views)
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
        self._apply({"generation": lane.generation, "lost": lost, "ready": ready, "at": at})
        self._settled = all(step >= self.step for step, _ in at.values())
        knows = {rank: {What(kind) for kind in view["shapes"]} for rank, view in views.items()}
        self._mail, self._told, self._heard = Mail(lane, self._topology, self._shapes, knows), set(), set()
        self._learn(views)
        self._send_again(views)
        planned_s, history = time.perf_counter() - started, self._history
        self._watched = True
        if lost:
            predicted = {"extra_s": history.extra, "rest_s": history.rest}
            self._noted("rerouted", {"lost": lost, "step": self.step, "planned_s": planned_s} | predicted)

    def _tell(self) -> dict[str, Any]:
        """How far this worker is."""
        step = self._steps.get(self.step)
        return {
            "base": self._history.generation,
            "entries": self._history.entries,
            "began": self._began,
            "times": None if self._planner.times is None else to_dict(self._planner.times),
            "at": [self.step, step.at if step is not None else 0],
            "shapes": [int(what) for what in self._shapes],
            "steps": {
                str(number): {
                    "reduced": one.reduced is not None,
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

    def _apply(self, entry: Mapping[str, Any]) -> None:
        lost = {Worker(*each) for each in entry["lost"]}
        for d in range(self._topology.pipelines):
            if {Worker(d, 0), Worker(d, self._topology.stages - 1)} <= lost:
                raise RecoveryFailed(f"the data of pipeline {d} went with its first and its last stage")
        try:
            fresh = self._history.change(entry)
        except (ConfigError, InvalidSchedule, Unsupported) as error:
            raise RecoveryFailed(str(error)) from error
        for number in fresh & self._steps.keys():
            self._steps[number].at = 0

    def _learn(self, views: Mapping[int, Any]) -> None:
        """Take over norms, losses and results that others know."""
        for view in views.values():
            for number, facts in view["steps"].items():
                step = self._steps.get(int(number))
                if step is None:
                    continue
                for stage, norm in facts["norms"].items():
                    step.norms.setdefault(int(stage), None if norm is None else float.fromhex(norm))
                for d, j, loss in facts["losses"] if self._last else ():
                    step.losses.setdefault((d, j), float.fromhex(loss))
                if facts["result"] is not None and step.result is None:
                    values = torch.tensor([float.fromhex(each) for each in facts["result"]], dtype=torch.float64)
                    step.result = Result.from_tensor(values, self._topology)
                for stage in facts["norms"]:
                    self._told.add((int(number), f"norm {stage}"))

    def _learn_times(self, views: Mapping[int, Any]) -> None:
        """Take over the times that others go by, or from which step on they measure."""
        self._began = min((v["began"] for v in views.values() if v["began"] is not None), default=None)
        known = next((view["times"] for view in views.values() if view["times"] is not None), None)
        if known is not None and self._planner.times is None:
            self._planner.adopt(from_dict(known))

    def _send_again(self, views: Mapping[int, Any]) -> None:
        """Send what readers still need and may not have got."""
        assert self._mail is not None
        open_steps = self._history.changed_since(self._mail.lane.generation - 1)
        for number in sorted(open_steps & self._steps.keys()):
            step, plan = self._steps[number], self._history.steps[number]
            for key, parts in step.made.items():
                self._deliver(plan, key, parts)
            self._send_items(step, plan)
            facts = {rank: view["steps"].get(str(number), {}) for rank, view in views.items()}
            peers = list(self._peers().values())
            having = sorted(rank for rank in peers if facts[rank].get("reduced"))
            if step.reduced is not None and having and having[0] == self._rank(self._me):
                for rank in peers:
                    waiting = views[rank]["at"][0] <= number
                    if waiting and not facts[rank].get("reduced"):
                        self._mail.send(Key(number, What.SUM, self._me.stage, 0, 1), [step.reduced], rank)
            if step.reduced is None and having:
                (step.reduced,) = self._mail.fetch_like(
                    Key(number, What.SUM, self._me.stage, 0, 1),
                    [torch.empty(sum(p.numel() for p in self._model.parameters), dtype=self._dtype)],
                    having[0],
                )

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self._model.parameters)).dtype if self._model.parameters else torch.float32

    # -- a row -------------------------------------------------------------------------------------

    def _run_row(self, step: Step, plan: StepPlan) -> None:
        assert self._mail is not None
        row = plan.plan.schedule.rows[self._me]
        self._tell_losses(step, row)
        while step.at < len(row):
            if self._mail.lane.broken():
                raise LaneBroken
            action = row[step.at]
            for coming in row[step.at : step.at + _AHEAD]:
                self._post(step, plan, coming)
            inject.point("reroute.action")
            inject.point(_POINTS[action.kind])
            made = self._act(step, plan, action)
            step.at += 1
            if made is not None:
                self._deliver(plan, made, step.made[made])  # it is done, also if a loss comes before it is sent
            self._tell_losses(step, row)

    def _act(self, step: Step, plan: StepPlan, action: Action) -> Key | None:
        """Everything that may have to wait comes before anything that changes this worker.

        Returns:
            The message that was made, if there is one.
        """
        if action.kind is Kind.OPT:
            self._reduce(step, plan)
            return None
        place = (action.pipeline, action.micro_batch)
        if action.kind is Kind.F:
            inputs, labels = self._inputs(step, plan, action), self._labels(step, plan, action)
            if self._watched and action.pipeline != self._me.pipeline:
                self._watched = False
                self._noted("took_over", {"step": step.number, "action": str(action)})
            began = time.perf_counter()
            leaves = tuple(t.detach().requires_grad_(action.stage > 0 and t.is_floating_point()) for t in inputs)
            outputs = self._model.forward(leaves, labels, *place)
            step.records[place] = StageBackward(differentiable(outputs, self._last), leaves), outputs
            self._measure(step, Kind.F, began)
            if self._last:
                step.losses[place] = float(outputs[1].detach())
                return None
            return self._keep(step, action, What.ACTIVATION, detached(outputs))
        if action.kind is Kind.W:
            self._backward_weight(step, action)
            return None
        record, outputs = step.records[place]
        gradients = None if self._last else self._gradients(step, plan, action, outputs)
        self._tell_read(step, plan)
        whole, began = action.kind is Kind.B, time.perf_counter()
        halves = whole and self._measures(step) and (action.micro_batch + step.number) % 2 == 1
        with self._accumulating(step, action.pipeline):
            found = record.backward(gradients) if whole and not halves else record.backward_input(gradients)
        if whole and not halves:
            del step.records[place]
        else:
            step.records[place] = record, ()
        self._measure(step, Kind.I if halves else action.kind, began)
        if halves:
            self._backward_weight(step, action)
        if action.stage == 0:
            return None
        return self._keep(step, action, What.GRADIENT, tuple(g for g in found if g is not None))

    def _backward_weight(self, step: Step, action: Action) -> None:
        began = time.perf_counter()
        record, _ = step.records.pop((action.pipeline, action.micro_batch))
        with self._accumulating(step, action.pipeline):
            record.backward_weight()
        self._measure(step, Kind.W, began)

    # -- durations ---------------------------------------------------------------------------------

    def _measures(self, step: Step) -> bool:
        """Whether durations are taken in a step: not in the first, in which allocators and caches warm up."""
        return self._planner.times is None and self._began is not None and step.number > self._began

    def _measure(self, step: Step, kind: Kind, began: float) -> None:
        if self._measures(step):
            self._profile.add(self._me.stage, kind, time.perf_counter() - began)

    def _agree(self) -> None:
        """At the end of the last step that is measured: all workers tell what they found, and go by the same times."""
        assert self._mail is not None and self._began is not None
        if self._planner.times is not None or self.step + 1 < self._began + MEASURED:
            return
        lane = self._mail.lane
        made = [parts for key, parts in self._steps[self.step].made.items() if key.what is What.ACTIVATION]
        self._ping(lane.exchange(bool(made)), made[:1])
        found = lane.exchange(self._profile.medians(self._me.stage))
        workers = {self._rank(worker): worker for worker in self._topology.workers()}
        times = agree(((workers[rank].stage, one) for rank, one in found.items()), self._topology.stages)
        self._planner.adopt(EQUAL if times is None else times)

    def _ping(self, sends: Mapping[int, bool], parts: Sequence[Parts]) -> None:
        """Measure how long activations take to the next stage: half of the way there and back, in turn."""
        assert self._mail is not None
        d, s = self._me
        there = {w.stage: self._rank(w) for w in self._topology.workers() if w.pipeline == d}
        for number in range(2):  # the first time connections and shapes are new
            ask, answer = (Key(self.step, What.PING, stage, d, number) for stage in (s, s - 1))
            if s > 0 and sends.get(there[s - 1]):
                got = self._mail.fetch(ask, there[s - 1])
                self._mail.send(answer, got, there[s - 1])
            if parts and there.get(s + 1) in sends:
                began, ask = time.perf_counter(), ask._replace(stage=s + 1)
                self._mail.send_shaped(ask, parts[0], there[s + 1])
                self._mail.fetch_like(answer._replace(stage=s), parts[0], there[s + 1])
                if number:
                    self._profile.add(s, COMMUNICATION, (time.perf_counter() - began) / 2)

    @property
    def _last(self) -> bool:
        return self._me.stage == self._topology.stages - 1

    def _accumulating(self, step: Step, home: int) -> Accumulating:
        return Accumulating(self._model.parameters, step.sums, home if self._options.ordered else -1)

    # -- messages ----------------------------------------------------------------------------------

    def _key(self, step: Step, what: What, stage: int, action: Action) -> Key:
        return Key(step.number, what, stage, action.pipeline, action.micro_batch)

    def _source(self, plan: StepPlan, action: Action, stage: int) -> Worker:
        return plan.plan.host(action.pipeline, stage, action.micro_batch)

    def _post(self, step: Step, plan: StepPlan, action: Action) -> None:
        """Begin to receive what an action needs, if its shape is known."""
        assert self._mail is not None
        if action.kind is Kind.F and action.stage > 0:
            source = self._source(plan, action, action.stage - 1)
            self._mail.post(self._key(step, What.ACTIVATION, action.stage, action), self._rank(source))
        elif action.kind in (Kind.B, Kind.I) and not self._last:
            record = step.records.get((action.pipeline, action.micro_batch))
            if record is not None:
                source = self._source(plan, action, action.stage + 1)
                key = self._key(step, What.GRADIENT, action.stage, action)
                self._mail.post_like(key, differentiable(record[1], False), self._rank(source))

    def _inputs(self, step: Step, plan: StepPlan, action: Action) -> Parts:
        assert self._mail is not None
        place = (action.pipeline, action.micro_batch)
        if action.stage > 0:
            source = self._source(plan, action, action.stage - 1)
            return self._mail.fetch(self._key(step, What.ACTIVATION, action.stage, action), self._rank(source))
        if place in step.items:
            return step.items[place][0]
        holder = Worker(action.pipeline, self._topology.stages - 1)
        inputs = self._mail.fetch(self._key(step, What.INPUTS, 0, action), self._rank(holder))
        step.items[place] = inputs, ()
        return inputs

    def _labels(self, step: Step, plan: StepPlan, action: Action) -> Parts | None:
        assert self._mail is not None
        if not self._last:
            return None
        place = (action.pipeline, action.micro_batch)
        if place not in step.items:
            holder = Worker(action.pipeline, 0)
            labels = self._mail.fetch(self._key(step, What.LABELS, action.stage, action), self._rank(holder))
            step.items[place] = (), labels
        return step.items[place][1]

    def _gradients(self, step: Step, plan: StepPlan, action: Action, outputs: Parts) -> Parts:
        assert self._mail is not None
        source = self._source(plan, action, action.stage + 1)
        key = self._key(step, What.GRADIENT, action.stage, action)
        return self._mail.fetch_like(key, differentiable(outputs, False), self._rank(source))

    def _keep(self, step: Step, action: Action, what: What, parts: Parts) -> Key:
        """Keep a message for its reader, and for readers that may need it again."""
        stage = action.stage + (1 if what is What.ACTIVATION else -1)
        key = self._key(step, what, stage, action)
        step.made[key] = parts
        return key

    def _deliver(self, plan: StepPlan, key: Key, parts: Parts) -> None:
        """Send a message to whoever has the action in its row that reads it."""
        assert self._mail is not None
        kind = Kind.F if key.what is What.ACTIVATION else Kind.B
        reader = plan.awaits(Action(key.stage, kind, key.micro_batch, key.pipeline))
        if reader is None:
            return
        if key.what is What.ACTIVATION:
            self._mail.send_shaped(key, parts, self._rank(reader))
        else:
            self._mail.send(key, parts, self._rank(reader))

    def _send_items(self, step: Step, plan: StepPlan) -> None:
        """Send the data of this pipeline's lost first or last stage to who computes it."""
        assert self._mail is not None
        topology, d = self._topology, self._me.pipeline
        ends = (0, topology.stages - 1)
        if self._me.stage not in ends or topology.stages == 1:
            return
        other = ends[1 - ends.index(self._me.stage)]
        if Worker(d, other) not in plan.plan.lost:
            return
        what = What.INPUTS if other == 0 else What.LABELS
        for j in range(topology.micro_batches):
            reader = plan.awaits(Action(other, Kind.F, j, d))
            if reader is not None and (d, j) in step.items:
                parts = step.items[d, j][0 if other == 0 else 1]
                self._mail.send_shaped(Key(step.number, what, other, d, j), parts, self._rank(reader))

    # -- the end of a step -------------------------------------------------------------------------

    def _peers(self) -> dict[int, int]:
        """Workers of this stage that are there: pipeline to rank."""
        stage = self._me.stage
        workers = [Worker(d, stage) for d in range(self._topology.pipelines)]
        return {worker.pipeline: self._rank(worker) for worker in workers if worker not in self._history.lost}

    def _tell_read(self, step: Step, plan: StepPlan) -> None:
        """With the last gradient of the step: tell the stage that has sent it. See :meth:`_await_read`."""
        assert self._mail is not None
        d, s = self._me
        if self._last or any(_goes_back(one) for one in plan.plan.schedule.rows[self._me][step.at + 1 :]):
            return
        for worker, row in plan.plan.schedule.rows.items():
            if worker.stage == s + 1 and row:
                self._mail.send(Key(step.number, What.READ, s, d), [torch.zeros(1)], self._rank(worker))

    def _await_read(self, step: Step, plan: StepPlan) -> None:
        """Wait until the stage before has all gradients of this one, before this one makes its update.

        A lost worker's could not be made again with the new parameters. It costs nothing: the stage before has to be
        through with them before it sends anything of the next step.
        """
        assert self._mail is not None
        for worker, row in plan.plan.schedule.rows.items():
            if worker.stage == self._me.stage - 1 and any(map(_goes_back, row)):
                key = Key(step.number, What.READ, worker.stage, worker.pipeline)
                self._mail.fetch_like(key, [torch.zeros(1)], self._rank(worker))

    def _reduce(self, step: Step, plan: StepPlan) -> None:
        self._await_read(step, plan)
        if step.reduced is not None:
            return
        assert self._mail is not None
        began, peers, stage = time.perf_counter(), self._peers(), self._me.stage
        if self._options.ordered:
            holders = {d: plan.plan.host(d, stage, 0).pipeline for d in range(self._topology.pipelines)}
        else:
            holders = {d: d for d in peers}
        homes = [home for home, holder in holders.items() if holder == self._me.pipeline]
        parameters = self._model.parameters
        none: list[Tensor | None] = [None] * len(parameters)
        mine = {home: flatten(step.sums.get(home if self._options.ordered else -1, none), parameters) for home in homes}
        scale = 1.0 / self._topology.pipelines if self._options.average else 1.0
        reduced = reduce_in_order(self._mail, step.number, stage, self._me.pipeline, holders, mine, peers, scale)
        # Who has the sum can do without the others, so it has their losses, too.
        for worker in self._tails() if self._last else ():
            self._hear(step, worker)
        step.reduced, step.reduce_s = reduced, time.perf_counter() - began

    def _finish(self, step: Step) -> None:
        """From summed gradients to the next step."""
        assert self._mail is not None and step.reduced is not None
        if not step.updated:
            self._set_gradients(step)
            step.norms[self._me.stage] = self._model.norm()
            self._tell_norm(step)
            if not (self._may_be_hasty(step) and self._clip(step) == 1.0):
                self._await_norms(step)
                step.verdict = self._clip(step)
            inject.point("reroute.step")
            step.tentative, began = step.verdict is None, time.perf_counter()
            self._model.update(1.0 if step.verdict is None else step.verdict, step.tentative)
            self._measure(step, Kind.OPT, began - step.reduce_s)
            step.updated = True
            step.sums.clear()
        self._gather_result(step)
        self._validate(step)

    def _set_gradients(self, step: Step) -> None:
        assert step.reduced is not None
        parameters = self._model.parameters
        for parameter, gradient in zip(parameters, unflatten(step.reduced, parameters), strict=True):
            parameter.grad = gradient

    def _clip(self, step: Step) -> float:
        """What gradients are multiplied by, as far as norms are known."""
        return self._model.clip([step.norms.get(stage) for stage in range(self._topology.stages)])

    def _may_be_hasty(self, step: Step) -> bool:
        """Whether to update before all norms are known: nothing had to be clipped in the step before."""
        if self._options.synchronous or step.norms[self._me.stage] is None:
            return False
        before = self._steps.get(step.number - 1)
        return before is not None and before.verdict == 1.0

    def _validate(self, step: Step) -> None:
        """See to it that the update was the right one, before the caller sees it."""
        if step.verdict is not None:
            return
        self._await_norms(step)
        verdict = self._clip(step)
        if verdict == 1.0:
            self._model.accept()
        else:
            self._set_gradients(step)
            self._model.update_again(verdict)
        step.verdict = verdict

    def _tell_norm(self, step: Step) -> None:
        """Tell the other stages this stage's norm, where updates must not be made, or not stay, without them."""
        assert self._mail is not None
        stage = self._me.stage
        told = (step.number, f"norm {stage}") in self._told
        if told or self._me.pipeline != min(self._peers()) or not self._needs_norms(step):
            return
        self._told.add((step.number, f"norm {stage}"))
        value = torch.tensor([_number(step.norms[stage])], dtype=torch.float64)
        for worker in self._topology.workers():
            if worker not in self._history.lost and worker.stage != stage:
                self._mail.send(Key(step.number, What.NORM, stage, 0), [value], self._rank(worker))

    def _needs_norms(self, step: Step) -> bool:
        return self._options.synchronous or step.norms[self._me.stage] is not None

    def _await_norms(self, step: Step) -> None:
        assert self._mail is not None
        if not self._needs_norms(step):
            return
        clips = step.norms[self._me.stage] is not None
        for other in range(self._topology.stages):
            if other in step.norms:
                continue
            there = [w for w in self._topology.workers() if w.stage == other and w not in self._history.lost]
            like = [torch.empty(1, dtype=torch.float64)]
            (value,) = self._mail.fetch_like(Key(step.number, What.NORM, other, 0), like, self._rank(min(there)))
            step.norms[other] = float(value) if clips else None

    def _tell_losses(self, step: Step, row: Sequence[Action]) -> None:
        """At a last stage, after its last forward: tell all others, who need all losses before they begin another step.

        They get them long before this worker has finished the step, so none of them waits for it.
        """
        told = (step.number, "losses") in self._told or step.result is not None
        if told or not self._last or any(action.kind is Kind.F for action in row[step.at :]):
            return
        assert self._mail is not None
        self._told.add((step.number, "losses"))
        if self._me == self._tails()[0] and self._history.lost and self._knocking():
            step.let_in = self._mail.lane.generation
        flag = torch.tensor([float(step.let_in)], dtype=torch.float64)
        table = torch.cat([flag, table_of(step.losses, self._topology)])
        key = Key(step.number, What.LOSSES, self._me.stage, self._me.pipeline)
        for worker in self._topology.workers():
            if worker not in self._history.lost and worker != self._me:
                self._mail.send(key, [table], self._rank(worker))

    def _tails(self) -> list[Worker]:
        """Workers of the last stage that are there."""
        stage, lost = self._topology.stages - 1, self._history.lost
        return sorted(w for w in self._topology.workers() if w.stage == stage and w not in lost)

    def _hear(self, step: Step, worker: Worker) -> None:
        """Wait for the losses that a worker of the last stage tells."""
        if worker == self._me or step.result is not None or (step.number, worker) in self._heard:
            return
        assert self._mail is not None
        like = torch.empty(1 + self._topology.pipelines * self._topology.micro_batches, dtype=torch.float64)
        key = Key(step.number, What.LOSSES, worker.stage, worker.pipeline)
        (table,) = self._mail.fetch_like(key, [like], self._rank(worker))
        self._heard.add((step.number, worker))
        merge(step.losses, table[1:], self._topology)
        if worker == self._tails()[0]:
            step.let_in = int(table[0])

    def _gather_result(self, step: Step) -> None:
        """The losses of all micro-batches."""
        if step.result is not None:
            return
        for worker in self._tails():
            self._hear(step, worker)
        topology = self._topology
        rows = table_of(step.losses, topology).view(topology.pipelines, topology.micro_batches).tolist()
        step.result = Result(tuple(map(tuple, rows)), step.let_in)


def _goes_back(action: Action) -> bool:
    """Whether an action needs a gradient of the stage behind."""
    return action.kind in (Kind.B, Kind.I)


def _name(worker: Worker) -> str:
    return f"{worker.pipeline}:{worker.stage}"


def _hex(value: float | None) -> str | None:
    return None if value is None else value.hex()


def _number(value: float | None) -> float:
    return math.nan if value is None else value
