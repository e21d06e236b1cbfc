"""Replay shared with survivors (Swift's parallel recovery, TPDS 2024): while they wait for a newcomer they compute
micro-batches of its stage.

The newcomer draws the data and reads the logged messages of a step, hands micro-batches out, computes its own share,
and sends on what comes back as if it had computed it. A helper that is lost costs nothing but its share, which the
newcomer computes itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shared_core.errors import SwiftError, WaitTimeout
from shared_core.loaders.randomness import RawRandom, restore_raw
from shared_core.pipeline.cost import ReplayCost, shares
from shared_core.pipeline.stage import Computed, Stage, Work
from shared_core.system.threads import start
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.recovery.exchange import Replaying
from shared_core.worker.recovery.replay import Replays
from shared_core.worker.recovery.transfer import receive, send

_PROBE_BYTES = 1 << 20
#: Longest time in which a helper computes its share, and is not asked for anything.
_HELP_S = 1800.0


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


def help_newcomers(replays: Replays, replaying: Replaying, stage_of: Callable[[int], Stage], threads: int) -> None:
    """In a survivor: compute for each newcomer what it hands out, until it says that it is level. Returns at once.

    Args:
        replays: of this worker.
        replaying: who replays.
        stage_of: builds the stage of a rank.
        threads: torch's threads in the program, which bits may depend on.
    """

    def serve(newcomer: int) -> None:
        torch.set_num_threads(threads)
        inner: InnerGroup | None = None
        try:
            inner = meet(replays, replaying, newcomer)
            _serve(replays, inner, lambda: stage_of(newcomer))
        except (RuntimeError, SwiftError):
            return  # another loss, or the newcomer needs no help any more
        finally:
            if inner is not None:
                replays.drop_side(inner)

    for newcomer in replaying.newcomers:  # each on a thread of its own: one may wait for another
        start(serve, (newcomer,), name=f"swift-help-{newcomer}")


def meet(replays: Replays, replaying: Replaying, newcomer: int) -> InnerGroup:
    """The group in which a newcomer (0) and the survivors share its replay."""
    return replays.side_group(replaying, f"help{newcomer}", [newcomer, *replaying.survivors])


def _serve(replays: Replays, inner: InnerGroup, make: Callable[[], Stage]) -> None:
    stage: Stage | None = None
    while True:
        head, tensors = receive(inner, 0, "to ask for help", _HELP_S, idle=True)
        if head["do"] == "end":
            return
        if head["do"] == "probe":
            send(inner, 0, {}, [])
            continue
        with replays.turn.taken():
            before = RawRandom()
            try:
                if stage is None:
                    stage = make()
                for parameter in stage.parameters:
                    parameter.data.copy_(tensors.pop(0))
                works = [Work(number, *_shaped(layout, tensors)) for number, layout in head["works"]]
                done = []
                for work in works:
                    done.append(stage.compute(work))
            finally:
                restore_raw(before)
        if head["sum"]:
            _sum_up(done)
        values = [[each.outputs, each.loss, each.input_gradients, each.gradients] for each in done]
        layouts, results = [], []
        for value in values:
            layout, flat = _flat(value)
            layouts.append(layout)
            results += flat
        send(inner, 0, {"layouts": layouts}, results)


def _sum_up(done: list[Computed]) -> None:
    """Leave the sum of all gradients with the first micro-batch."""
    for later in done[1:]:
        for place, gradient in enumerate(later.gradients):
            mine = done[0].gradients[place]
            if gradient is not None:
                done[0].gradients[place] = gradient if mine is None else mine + gradient
        later.gradients = [None] * len(later.gradients)


def bytes_per_s(inner: InnerGroup) -> float:
    """Measure in the newcomer how fast a helper gets a message.

    Raises:
        RuntimeError: a helper was lost.
        WaitTimeout: it does not answer.
    """
    probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
    for data in ([], [probe]):  # the first opens what is opened once
        began = time.perf_counter()
        send(inner, 1, {"do": "probe"}, data)
        receive(inner, 1)
    return _PROBE_BYTES / (time.perf_counter() - began)


@dataclass(frozen=True)
class Helpers:
    """The survivors, as a newcomer sees them.

    Attributes:
        replays: of this worker.
        inner: a group of the newcomer (0) and the survivors.
        count: number of survivors.
        use: how many of them compute.
        ordered: gradients come back by micro-batch.
    """

    replays: Replays
    inner: InnerGroup
    count: int
    use: int = 0
    ordered: bool = True

    def compute(self, stage: Stage, works: list[Work]) -> list[Computed]:
        """Compute the micro-batches of one step, here and at the helpers.

        Raises:
            RuntimeError: a helper was lost; nothing was changed.
            WaitTimeout: a helper does not answer.
        """
        sizes = shares(len(works), self.use + 1)
        mine, rest = works[: sizes[0]], works[sizes[0] :]
        lent: list[list[Work]] = []
        for size in sizes[1:]:
            lent.append(rest[:size])
            rest = rest[size:]
        parameters = [p.detach() for p in stage.parameters]
        for place, share in enumerate(lent, 1):
            layouts = [_flat([work.inputs, work.labels, work.gradient]) for work in share]
            rows = [[work.number, layout] for work, (layout, _) in zip(share, layouts, strict=True)]
            tensors = [tensor for _, flat in layouts for tensor in flat]
            send(self.inner, place, {"do": "compute", "works": rows, "sum": not self.ordered}, parameters + tensors)
        done = compute_here(stage, mine)
        for place in range(1, len(lent) + 1):
            head, results = receive(self.inner, place, "to compute its share of the replay", _HELP_S)
            done += [Computed(*_computed(layout, results)) for layout in head["layouts"]]
        return done

    def end(self) -> None:
        """No more help is needed."""
        try:
            for place in range(1, self.count + 1):
                send(self.inner, place, {"do": "end"}, [])
        except (RuntimeError, WaitTimeout):
            return  # whoever is lost needs no word
        finally:
            self.replays.drop_side(self.inner)


def _computed(layout: list[Any], results: list[torch.Tensor]) -> list[Any]:
    outputs, loss, input_gradients, gradients = _shaped(layout, results)
    return [outputs, loss, input_gradients, list(gradients)]


def compute_here(stage: Stage, works: list[Work]) -> list[Computed]:
    """Compute micro-batches in this worker; the global generators are as before afterwards."""
    before = RawRandom()
    try:
        return [stage.compute(work) for work in works]
    finally:
        restore_raw(before)


def workers_to_use(replay: ReplayCost, survivors: int, policy: str) -> int:
    """How many survivors compute: the best number, or all of them where the policy is ``always``."""
    if policy == "always":
        return min(survivors, replay.micro_batches - 1)
    return replay.best(survivors + 1) - 1
