"""Replay shared with survivors (Swift's parallel recovery, TPDS 2024): while they wait for replacements they compute
micro-batches of their stages.

Replacements of neighboring stages that start at the same place are a line. Its first draws the data or reads logged
activations, its last reads logged gradients; each hands its part of a micro-batch to a helper, which computes all
stages of the line and gives each replacement the results of its stage. The line computes its own share as a pipeline.
These messages are apart from the program's own: where somebody fails meanwhile, the step is made without helpers.

Only steps that all survivors have made are shared: every message of theirs is in a log. The schedule replays the rest,
as always. Replacements of a line still send each other every message, in the order of the schedule: so each can
continue by itself where a helper fails, whatever the others of the line have noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe import schedule

from shared_core.errors import SwiftError, WaitTimeout
from shared_core.faults import inject
from shared_core.job import Job
from shared_core.loaders.randomness import RawRandom, restore_raw
from shared_core.pipeline import compat, stage
from shared_core.pipeline.cost import ReplayCost, shares
from shared_core.pipeline.instrumented_engine import InstrumentedEngine
from shared_core.pipeline.stage import Computed, Passed, Stage, Work, as_tuple, compute_line, has_running_statistics
from shared_core.system import threads
from shared_core.system.threads import start
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.recovery.exchange import Replaying
from shared_core.worker.recovery.replay import Replays
from shared_core.worker.recovery.transfer import receive, send

# -- between replacements and survivors -------------------------------------------------------------------------------


_PROBE_BYTES = 1 << 20
#: Seconds after which a helper that computes its share, or is not asked for anything, is given up.
_HELP_S = 1800.0
#: Ranks of neighbouring stages, in order, that start at the same step boundary and make the same steps.
Line = tuple[int, ...]


def lines(replaying: Replaying, stage_of: Callable[[int], int]) -> list[Line]:
    """The lines of replacements, by ascending stage."""
    boundaries = dict(zip(replaying.replacements, replaying.boundaries, strict=True))
    found: list[list[int]] = []
    for rank in sorted(boundaries, key=stage_of):
        last = found[-1][-1] if found else None
        if last is not None and stage_of(last) + 1 == stage_of(rank) and boundaries[last] == boundaries[rank]:
            found[-1].append(rank)
        else:
            found.append([rank])
    return [tuple(line) for line in found]


def _flat(values: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Tensors, tuples of tensors and None as (layout, tensors)."""
    layout: list[Any] = []
    tensors: list[torch.Tensor] = []
    for value in values:
        if value is None or isinstance(value, torch.Tensor):
            layout.append(int(value is not None))
            tensors += [value] if value is not None else []
        else:
            inner, more = _flat(list(value))
            layout.append(inner)
            tensors += more
    return layout, tensors


def _shaped(layout: list[Any], tensors: list[torch.Tensor]) -> list[Any]:
    """Inverse of :func:`_flat`; takes what it uses off the front of ``tensors``."""
    return [
        tuple(_shaped(each, tensors)) if isinstance(each, list) else tensors.pop(0) if each else None for each in layout
    ]


def help_replacements(
    replays: Replays, replaying: Replaying, to_help: Sequence[Line], stage_of: Callable[[int], Stage], threads: int
) -> None:
    """In a survivor: compute what each line hands out, on a thread each, until it has caught up.

    Returns at once. ``threads`` is torch's number of threads in the program, which bits may depend on.
    """

    def serve(line: Line) -> None:
        torch.set_num_threads(threads)
        inner: InnerGroup | None = None
        try:
            inner = meet(replays, replaying, line)
            _serve(replays, inner, [partial(stage_of, rank) for rank in line])
        except (RuntimeError, SwiftError):
            return  # another failure, or the replacements need no help any more
        finally:
            if inner is not None:
                replays.drop_side(inner)

    for line in to_help:  # each on a thread of its own: one may wait for another
        start(serve, (line,), name=f"swift-help-{line[0]}")


def meet(replays: Replays, replaying: Replaying, line: Line) -> InnerGroup:
    """The group in which a line, whose ranks come first, and the survivors share its replay. Blocks until all come."""
    return replays.side_group(replaying, f"help{line[0]}", [*line, *replaying.survivors])


def _serve(replays: Replays, inner: InnerGroup, makes: Sequence[Callable[[], Stage]]) -> None:
    stages: list[Stage] = []
    while True:
        first = receive(inner, 0, "to ask for help", _HELP_S, idle=True)
        if first[0]["do"] == "end":
            return
        if first[0]["do"] == "probe":
            send(inner, 0, {}, [])
            continue
        others = range(1, len(makes))
        parts = [first, *(receive(inner, place, "to hand out its part of the replay", _HELP_S) for place in others)]
        with replays.compute_lock.taken():
            before = RawRandom()
            try:
                stages = stages or [make() for make in makes]
                works = [_handed(stage, *part) for stage, part in zip(stages, parts, strict=True)]
                done = [compute_line(stages, each) for each in zip(*works, strict=True)]
            finally:
                restore_raw(before)
        inject.point("replay.helped")
        for place, of_stage in enumerate(zip(*done, strict=True)):
            _give_back(inner, place, of_stage, parts[place][0]["sum"])


def _handed(stage: Stage, head: dict[str, Any], tensors: list[torch.Tensor]) -> list[Work]:
    """What a replacement has handed out: parameters of its stage, which are set, and its part of each micro-batch."""
    for parameter in stage.parameters:
        parameter.data.copy_(tensors.pop(0))
    return [Work(number, *_shaped(layout, tensors)) for number, layout in head["works"]]


def _give_back(inner: InnerGroup, place: int, done: Sequence[Computed], summed: bool) -> None:
    if summed:
        _sum_up(done)
    layouts, results = [], []
    for each in done:
        layout, flat = _flat([each.outputs, each.loss, each.input_gradients, each.gradients])
        layouts.append(layout)
        results += flat
    send(inner, place, {"layouts": layouts}, results)


def _sum_up(done: Sequence[Computed]) -> None:
    """Leave the sum of all gradients with the first micro-batch."""
    for later in done[1:]:
        for place, gradient in enumerate(later.gradients):
            mine = done[0].gradients[place]
            if gradient is not None:
                done[0].gradients[place] = gradient if mine is None else mine + gradient
        later.gradients = [None] * len(later.gradients)


@dataclass(frozen=True)
class ReplayPart:
    """What a replacement says of its stage.

    Attributes:
        micro_s: measured seconds of a micro-batch's forward and backward; 0 if not measured.
        message_bytes: of one micro-batch that is lent: what it hands out and gets back, without parameters.
        able: its micro-batches can be computed elsewhere.
    """

    micro_s: float
    stage_bytes: int
    message_bytes: int
    able: bool


@dataclass(frozen=True)
class Wish:
    """What is to be shared, the same at all replacements of a line; ``ordered``: gradients by micro-batch."""

    micro_batches: int
    policy: str
    ordered: bool


@dataclass(frozen=True)
class Helpers:
    """The survivors, as a replacement sees them.

    Attributes:
        inner: a group of the replacements of a line, which come first, and the survivors.
        sizes: micro-batches of a step that the line computes itself, then those of each helper.
        ordered: gradients come back by micro-batch, not summed.
        expected: seconds of a step by the line alone, and with its helpers; 0 if not measured.
    """

    replays: Replays
    inner: InnerGroup
    line: int
    sizes: tuple[int, ...] = ()
    ordered: bool = True
    expected: tuple[float, float] = (0.0, 0.0)

    @property
    def use(self) -> int:
        return len(self.sizes[1:])

    def compute(self, stage: Stage, works: list[Work]) -> list[Computed]:
        """Compute one step's micro-batches, here and at the helpers. All replacements of the line call it.

        The global generators are as before afterwards. On RuntimeError or WaitTimeout nothing was changed.
        """
        before = RawRandom()
        try:
            self._hand_out(stage, works[self.sizes[0] :])
            done = self._own_share(stage, works[: self.sizes[0]])
        finally:
            restore_raw(before)
        for place in range(self.line, self.line + self.use):
            head, results = receive(self.inner, place, "to compute its share of the replay", _HELP_S)
            done += [Computed(*_computed(layout, results)) for layout in head["layouts"]]
        return done

    def _hand_out(self, stage: Stage, works: list[Work]) -> None:
        parameters, rest = [p.detach() for p in stage.parameters], works
        for place, size in enumerate(self.sizes[1:], self.line):
            share, rest = rest[:size], rest[size:]
            layouts = [_flat([work.inputs, work.labels, work.gradient]) for work in share]
            rows = [[work.number, layout] for work, (layout, _) in zip(share, layouts, strict=True)]
            tensors = [tensor for _, flat in layouts for tensor in flat]
            send(self.inner, place, {"do": "compute", "works": rows, "sum": not self.ordered}, parameters + tensors)

    def _own_share(self, stage: Stage, works: list[Work]) -> list[Computed]:
        if self.line == 1:
            return [stage.backward(stage.forward(work), work.gradient) for work in works]
        place = self.inner.members.index(self.inner.rank)
        passed: list[Passed] = []
        for work in works:
            inputs = work.inputs if place == 0 else self._from(place - 1)
            passed.append(stage.forward(Work(work.number, inputs, work.labels)))
            self._to(place + 1, passed[-1].outputs)
        done: list[Computed] = []
        for work, each in zip(works, passed, strict=True):
            gradient = work.gradient if place == self.line - 1 else self._from(place + 1)
            done.append(stage.backward(each, gradient))
            self._to(place - 1, done[-1].input_gradients)
        return done

    def _from(self, place: int) -> torch.Tensor:
        _, (tensor,) = receive(self.inner, place, "to compute its stage of the replay", _HELP_S)
        return tensor

    def _to(self, place: int, tensor: torch.Tensor) -> None:
        if 0 <= place < self.line:
            send(self.inner, place, {}, [tensor])

    def end(self) -> None:
        """Dismiss the helpers, and drop the group."""
        try:
            if self.inner.rank == self.inner.members[0]:
                for place in range(self.line, len(self.inner.members)):
                    send(self.inner, place, {"do": "end"}, [])
        except (RuntimeError, WaitTimeout):
            return  # whoever fails needs no word
        finally:
            self.replays.drop_side(self.inner)


def agree(replays: Replays, replaying: Replaying, line: Line, mine: ReplayPart, wish: Wish) -> Helpers:
    """In each replacement of a line at the same step: settle with the survivors how many of them compute."""
    inner = meet(replays, replaying, line)
    try:
        if inner.rank == line[0]:
            parts = [mine, *(ReplayPart(**receive(inner, place)[0]) for place in range(1, len(line)))]
            told = _settle(inner, parts, wish)
            for place in range(1, len(line)):
                send(inner, place, told, [])
        else:
            send(inner, 0, asdict(mine), [])
            told, _ = receive(inner, 0, "to say who computes a replay")
    except (RuntimeError, SwiftError):
        replays.drop_side(inner)
        raise
    alone, shared = told["expected"]
    return Helpers(replays, inner, len(line), tuple(told["sizes"]), wish.ordered, (alone, shared))


def _settle(inner: InnerGroup, parts: Sequence[ReplayPart], wish: Wish) -> dict[str, Any]:
    """In the first replacement of a line, for all of it."""
    if not all(part.able for part in parts):
        return {"sizes": [wish.micro_batches], "expected": [0.0, 0.0]}
    measured = all(part.micro_s for part in parts)
    replay = ReplayCost(
        wish.micro_batches,
        tuple(part.micro_s if measured else 1.0 for part in parts),
        sum(part.stage_bytes for part in parts),
        sum(part.message_bytes for part in parts),
        _bytes_per_s(inner, len(parts)),
        wish.ordered,
    )
    copies = workers_to_use(replay, len(inner.members) - len(parts), wish.policy) + 1
    expected = [replay.seconds(1), replay.seconds(copies)] if measured else [0.0, 0.0]
    return {"sizes": shares(wish.micro_batches, copies, replay.stage_s), "expected": expected}


def _bytes_per_s(inner: InnerGroup, helper: int) -> float:
    """Measure how fast a helper gets a message of 1 MiB."""
    probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
    for data in ([], [probe]):  # the first opens what is opened once
        began = time.perf_counter()
        send(inner, helper, {"do": "probe"}, data)
        receive(inner, helper)
    return _PROBE_BYTES / (time.perf_counter() - began)


def _computed(layout: list[Any], results: list[torch.Tensor]) -> list[Any]:
    outputs, loss, input_gradients, gradients = _shaped(layout, results)
    return [outputs, loss, input_gradients, list(gradients)]


def workers_to_use(replay: ReplayCost, survivors: int, policy: str) -> int:
    if policy == "always":
        return min(survivors, replay.micro_batches - 1)
    return replay.best(survivors + 1) - 1


# -- in an engine -----------------------------------------------------------------------------------------------------


_T = TypeVar("_T")


class SharedReplay:
    def __init__(self, engine: InstrumentedEngine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._helpers: Helpers | None = None
        self._decided = False
        self._line: Line = ()
        self._steps, self._took = 0, 0.0

    @property
    def possible(self) -> bool:
        """Whether micro-batches of every stage can be computed out of order and elsewhere; all ranks answer alike."""
        engine, config = self._engine, self._job.config
        module = engine.module
        keys = [spec.key for spec in compat.layers_of(module) if isinstance(spec, TiedLayerSpec)]
        # Recomputing segments adds to a parameter that two of them use in another order, and does so without autocast.
        alters = len(set(keys)) < len(keys) or engine.torch_autocast_enabled()
        return (
            config.replay.randomness == "seeded"
            and config.replay.parallel != "never"
            and not engine.dynamic_shape
            and not (alters and module.activation_checkpoint_interval > 0)
            and module.get_additional_losses() is None
        )

    def offer(self) -> None:
        """Start the threads that help replacements."""
        engine, job, threads = self._engine, self._job, torch.get_num_threads()

        def stage_of(rank: int) -> Stage:
            return stage.clone(engine, compat.stage_of(engine, rank), job.config.seed)

        def help_them(replaying: Replaying) -> None:
            to_help = lines(replaying, lambda rank: compat.stage_of(engine, rank))
            help_replacements(job.replays, replaying, to_help, stage_of, threads)

        job.replays.help(help_them)

    # -- in the replacement ---------------------------------------------------------------------------

    def takes(self, micro_s: float) -> bool:
        """Whether the next step is shared. ``micro_s``: seconds of a micro-batch, both ways; 0 before the first."""
        replaying = self._job.replays.own
        if replaying is None:
            return False
        if self._engine.global_steps >= replaying.complete:
            self._end()
            return False
        if not self._decided and (micro_s or self._job.config.replay.parallel == "always") and self._has_trained():
            self._decided = True
            self._ask(replaying, micro_s)
        return self._helpers is not None

    def _has_trained(self) -> bool:
        """Whether a step here or at the failed worker has made the shapes of messages known; alike in a whole line."""
        engine = self._engine
        first, last = engine.is_first_stage(), engine.is_last_stage()
        known = (first or engine.pipe_recv_buf is not None) and (last or engine.grad_layer is not None)
        return known and (engine.timed > 0 or engine.global_steps > 0)

    def _ask(self, replaying: Replaying, micro_s: float) -> None:
        """Decide who computes; dismiss helpers that are not needed."""
        job = self._job
        self._line = self._line_of(replaying)
        if not self._messages_in_logs(replaying):
            self._dismiss(replaying)
            return
        policy = job.config.replay.parallel
        wish = Wish(int(self._engine.micro_batches), policy, job.config.replay.sums == "ordered")
        try:
            helpers = agree(job.replays, replaying, self._line, self._part(micro_s), wish)
        except (RuntimeError, SwiftError):
            return  # a failure, or nobody comes: the schedule does it
        if helpers.use:
            self._helpers = helpers
        else:
            helpers.end()

    def _line_of(self, replaying: Replaying) -> Line:
        engine, rank = self._engine, self._job.rank
        return next(line for line in lines(replaying, lambda each: compat.stage_of(engine, each)) if rank in line)

    def _messages_in_logs(self, replaying: Replaying) -> bool:
        """Whether both neighbors of the line are survivors, which have sent all they will."""
        engine = self._engine
        first, last = (compat.stage_of(engine, self._line[place]) for place in (0, -1))
        neighbours = {
            engine.grid.stage_to_global(stage_id=each)
            for each in (first - 1, last + 1)
            if 0 <= each < engine.num_stages
        }
        return neighbours <= set(replaying.survivors)

    def _dismiss(self, replaying: Replaying) -> None:
        line = self._line

        def dismiss() -> None:
            try:
                inner = meet(self._job.replays, replaying, line)
                Helpers(self._job.replays, inner, len(line)).end()
            except (RuntimeError, SwiftError):
                return

        threads.start(dismiss, name="swift-dismiss")

    def _part(self, micro_s: float) -> ReplayPart:
        engine = self._engine
        stage_bytes = sum(p.numel() * p.element_size() for p in engine.module.parameters())
        before, after = (
            sum(t.numel() * t.element_size() for t in as_tuple(buffer))
            for buffer in (engine.pipe_recv_buf, engine.grad_layer)
        )
        handed = before * (not self._joined(-1)) + after * (not self._joined(+1))
        # No layer may depend on the order of micro-batches, and one tensor has to pass to the next stage.
        one = engine.is_last_stage() or isinstance(engine.grad_layer, torch.Tensor)
        able = one and not has_running_statistics(engine.module)
        return ReplayPart(micro_s, stage_bytes, handed + before + after, able)

    def _joined(self, way: int) -> bool:
        """Whether the previous (-1) or the next (+1) stage is in the line."""
        return 0 <= self._line.index(self._job.rank) + way < len(self._line)

    def _end(self) -> None:
        job, helpers, replaying = self._job, self._helpers, self._job.replays.own
        assert replaying is not None
        if helpers is not None:
            alone, planned = helpers.expected
            fields = {"step_s": self._took / max(self._steps, 1), "planned_s": planned, "alone_s": alone}
            job.reporter.emit("help", steps=self._steps, helpers=helpers.use, ordered=helpers.ordered, **fields)
            helpers.end()
        elif not self._decided:
            self._line = self._line_of(replaying)
            self._dismiss(replaying)
        self._helpers, self._decided = None, False
        job.replays.end()

    def run(self) -> None:
        """One step, with the bits and messages of the schedule."""
        engine = self._engine
        own = stage.own(engine, self._job.config.seed)
        compat.use_one_buffer(engine)
        engine.fwd_outputs = []
        works = [self._work(place) for place in range(engine.micro_batches)]
        assert self._helpers is not None
        began = time.perf_counter()
        done = self._pass(own, works, self._helped(own, works))
        self._steps += 1
        self._took += time.perf_counter() - began
        for place, parameter in enumerate(own.parameters):
            for each in done:
                gradient = each.gradients[place]
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        engine.module.micro_offset = engine.offset_of(engine.micro_batches - 1) + 1
        for instruction in (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep):
            compat.instructions_of(engine)[instruction](engine)

    def _helped(self, own: Stage, works: list[Work]) -> list[Computed] | None:
        """None where somebody failed: this stage computes the step alone. Others notice: a cut group ends for all."""
        assert self._helpers is not None
        try:
            return self._helpers.compute(own, works)
        except (RuntimeError, SwiftError):
            self._job.replays.drop_side(self._helpers.inner)
            self._helpers = None
            return None

    def _work(self, place: int) -> Work:
        engine, buffers = self._engine, self._engine.pipe_buffers
        work = Work(engine.number_of(place), None)
        if engine.is_first_stage() or engine.is_last_stage():
            compat.load_micro_batch(engine)
        if not self._joined(-1):
            if not engine.is_first_stage():
                compat.receive_activations(engine)
            work.inputs = buffers["inputs"][0]
        if engine.is_last_stage():
            work.labels = buffers["labels"][0]
        elif not self._joined(+1):
            compat.receive_gradients(engine)
            work.gradient = engine.grad_layer.clone()
        return work

    def _pass(self, own: Stage, works: list[Work], known: list[Computed] | None) -> list[Computed]:
        """Forward and backward of all micro-batches in the schedule's order; messages that neighbors have are
        only logged.

        ``known`` are the results, where they are computed elsewhere; None: compute them here.
        """
        engine = self._engine
        ahead, behind = iter(range(len(works))), iter(range(len(works)))
        passed: dict[int, Passed] = {}
        done: list[Computed] = []
        for forward in _order(engine):
            place = next(ahead if forward else behind)
            work = works[place]
            if forward:
                if self._joined(-1):
                    compat.receive_activations(engine)
                    work.inputs = engine.pipe_buffers["inputs"][0]
                if known is None:
                    passed[place] = _undisturbed(partial(own.forward, work))
                self._send_on(passed[place] if known is None else known[place])
                continue
            if self._joined(+1):
                compat.receive_gradients(engine)
                work.gradient = engine.grad_layer.clone()
            if known is None:
                done.append(_undisturbed(partial(own.backward, passed.pop(place), work.gradient)))
            else:
                done.append(known[place])
            self._send_back(work, done[-1])
        return done

    def _send_on(self, made: Passed | Computed) -> None:
        engine, buffers = self._engine, self._engine.pipe_buffers
        if not engine.is_last_stage():
            buffers["outputs"][0] = made.outputs
            compat.send_activations(engine)
            buffers["outputs"][0] = None

    def _send_back(self, work: Work, each: Computed) -> None:
        engine, buffers = self._engine, self._engine.pipe_buffers
        if engine.is_last_stage():
            assert each.loss is not None
            engine.loss = each.loss
            engine.fwd_outputs.append(each.loss)
            if engine.total_loss is None:
                engine.total_loss = torch.zeros_like(each.loss)
            engine.total_loss += each.loss
        if not engine.is_first_stage():
            inputs, gradients = as_tuple(work.inputs), as_tuple(each.input_gradients)
            held = [tensor.detach() for tensor in inputs]
            for tensor, gradient in zip(held, gradients, strict=True):
                tensor.grad = gradient
            buffers["inputs"][0] = tuple(held) if isinstance(work.inputs, tuple) else held[0]
            compat.send_gradients(engine)


def _order(engine: InstrumentedEngine) -> Iterator[bool]:
    """The schedule's order: whether each pass is a forward or a backward. Both take the micro-batches as they come."""
    steps = schedule.TrainSchedule(engine.micro_batches, engine.num_stages, engine.stage_id).steps()
    kinds = (schedule.ForwardPass, schedule.BackwardPass)
    return (isinstance(each, kinds[0]) for slot in steps for each in slot if isinstance(each, kinds))


def _undisturbed(compute: Callable[[], _T]) -> _T:
    """Compute, and restore the global generators afterwards."""
    before = RawRandom()
    try:
        return compute()
    finally:
        restore_raw(before)
