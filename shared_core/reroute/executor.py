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

from shared_core.errors import ConfigError, InvalidSchedule, LaneBroken, RecoveryFailed, Unsupported
from shared_core.faults import inject
from shared_core.reroute.finishing import Finishing
from shared_core.reroute.history import History, Planner, StepPlan
from shared_core.reroute.messages import Key, Lane, Mail, Parts, Shapes, What
from shared_core.reroute.planning import EQUAL, agree, from_dict, to_dict
from shared_core.reroute.split import StageBackward
from shared_core.reroute.step import (
    Accumulating,
    Options,
    Result,
    StageModel,
    Step,
    detached,
    differentiable,
)
from shared_core.schedule.profile import COMMUNICATION, Profile
from shared_core.schedule.schedule import Action, Kind, Topology, Worker

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
        self._connect, self._options, self._noted = connect, options, noted
        self._planner, self._history = planner, History(planner)
        self._profile = Profile(skip=0)
        self._began: int | None = None
        self._watched = False
        self._shapes: dict[What, Shapes] = {}
        self._steps: dict[int, Step] = {}
        self._mail: Mail | None = None
        self._finishing = Finishing(
            topology, me, rank_of, model, self._history, self._steps, knocking, options, self._measure
        )
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
        self._finishing.forget_before(self.step - 1)
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
                self._finishing.finish(mine)
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

    @property
    def gradients(self) -> torch.Tensor | None:
        """Of the last step, one after the other: summed, not clipped. None before the first."""
        last = self._steps.get(self.step - 1)
        return None if last is None else last.reduced

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
        self._mail = Mail(lane, self._topology, self._shapes, knows)
        self._finishing.connect(self._mail)
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
                    self._finishing.norm_is_known(int(number), int(stage))

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
            having = {rank for rank, fact in facts.items() if fact.get("reduced")}
            waiting = {rank for rank, view in views.items() if rank not in having and view["at"][0] <= number}
            self._finishing.pass_on_sums(step, having, waiting)

    # -- a row -------------------------------------------------------------------------------------

    def _run_row(self, step: Step, plan: StepPlan) -> None:
        assert self._mail is not None
        row = plan.plan.schedule.rows[self._me]
        self._finishing.tell_losses(step, row)
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
            self._finishing.tell_losses(step, row)

    def _act(self, step: Step, plan: StepPlan, action: Action) -> Key | None:
        """Everything that may have to wait comes before anything that changes this worker.

        Returns:
            The message that was made, if there is one.
        """
        if action.kind is Kind.OPT:
            self._finishing.reduce(step, plan)
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
            ends = differentiable(outputs, self._last)
            step.records[place] = StageBackward(ends, leaves, apart=self._options.ordered), outputs
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
        self._finishing.tell_read(step, plan)
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


def _name(worker: Worker) -> str:
    return f"{worker.pipeline}:{worker.stage}"


def _hex(value: float | None) -> str | None:
    return None if value is None else value.hex()
