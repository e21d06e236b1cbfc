"""Replay shared with survivors (Swift's parallel recovery, TPDS 2024): while they wait for replacements they compute
micro-batches of their stages.

Replacements of neighboring stages that start at the same place are a line. Its first draws the data or reads logged
activations, its last reads logged gradients; each hands its part of a micro-batch to a helper, which computes all
stages of the line and gives each replacement the results of its stage. The line computes its own share as a pipeline.
These messages are apart from the program's own: where somebody fails meanwhile, the step is made without helpers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from shared_core.errors import SwiftError, WaitTimeout
from shared_core.faults import inject
from shared_core.loaders.randomness import RawRandom, restore_raw
from shared_core.pipeline.cost import ReplayCost, shares
from shared_core.pipeline.stage import Computed, Passed, Stage, Work, compute_line
from shared_core.system.threads import start
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.recovery.exchange import Replaying
from shared_core.worker.recovery.replay import Replays
from shared_core.worker.recovery.transfer import receive, send

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
