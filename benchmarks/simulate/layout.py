"""Shape of a job, what is missing of it, and closed forms of re-routed pipelines (ReCycle, arXiv 2405.14009).

Time is in slots: forward, input gradient and weight gradient of a micro-batch at a stage take one each. Free messages,
no memory bound. The forms equal optimal schedules found by a constraint solver on small cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shared_core.errors import ConfigError

Variant = Literal["coupled", "decoupled", "staggered"]


@dataclass(frozen=True)
class Layout:
    """Equal pipelines in data parallel. The worker at (pipeline, stage) is number ``pipeline * stages + stage``.

    Attributes:
        pipelines: data-parallel replicas.
        stages: pipeline stages; 1 is data parallelism alone.
        micro_batches: of each pipeline in a step.
        step_s: seconds of a step without failures.
        optimizer_slots: the optimizer step in slots.
    """

    pipelines: int
    stages: int = 1
    micro_batches: int = 1
    step_s: float = 1.0
    optimizer_slots: float = 3.0

    def __post_init__(self) -> None:
        if min(self.pipelines, self.stages, self.micro_batches) < 1:
            raise ConfigError("pipelines, stages and micro-batches must be at least 1")
        if not (self.step_s > 0 and self.optimizer_slots >= 0):
            raise ConfigError("a step must take more than 0 s, and its optimizer at least 0 slots")

    @property
    def workers(self) -> int:
        """All places."""
        return self.pipelines * self.stages

    @property
    def slots(self) -> float:
        """Slots of a step without failures, 1F1B with the optimizer: ``3 (m + S - 1) + opt``."""
        return 3 * (self.micro_batches + self.stages - 1) + self.optimizer_slots

    @property
    def slot_s(self) -> float:
        """Seconds of a slot."""
        return self.step_s / self.slots


@dataclass(frozen=True)
class Pattern:
    """Which places of a layout are vacant."""

    layout: Layout
    vacant: frozenset[int] = frozenset()

    @property
    def live(self) -> int:
        """Workers that are there."""
        return self.layout.workers - len(self.vacant)

    def after(self, lost: Iterable[int], joined: Iterable[int]) -> Pattern:
        """The pattern after a change."""
        return Pattern(self.layout, (self.vacant | frozenset(lost)) - frozenset(joined))


def count_stages(layout: Layout, places: Iterable[int]) -> tuple[int, ...]:
    """How many of the places are of each stage."""
    counts = [0] * layout.stages
    for place in places:
        counts[place % layout.stages] += 1
    return tuple(counts)


def has_lost_both_ends(pattern: Pattern) -> bool:
    """Whether a pipeline has neither its first nor its last stage, which alone have its data."""
    last = pattern.layout.stages - 1
    return last > 0 and any(
        place % pattern.layout.stages == 0 and place + last in pattern.vacant for place in pattern.vacant
    )


def spread(layout: Layout, failures: int) -> tuple[int, ...]:
    """Failures by stage after normalisation: as even as possible, the odd ones in early stages, which cost least."""
    each, odd = divmod(failures, layout.stages)
    return tuple(each + (stage < odd) for stage in range(layout.stages))


def period(layout: Layout, failures: Sequence[int], variant: Variant = "staggered") -> float:
    """Slots of a step when peers compute what the failed workers of each stage would; infinite if one has no peer left.

    A survivor of a stage with k failures computes ``L = 3 ceil(m D / (D - k))`` slots. Staggered optimizers lose no
    bubble, decoupled backward passes those of the warm-up, coupled ones those of the drain too. The coupled form at
    stage 0, ``L + 2``, was found on 3 x 4 x 6 only.
    """
    slots = layout.slots
    for stage, lost in enumerate(failures):
        if lost >= layout.pipelines:
            return math.inf
        if lost:
            load = 3 * math.ceil(layout.micro_batches * layout.pipelines / (layout.pipelines - lost))
            idle = {"staggered": 0, "decoupled": stage, "coupled": 3 * stage if stage else min(2, layout.stages - 1)}
            slots = max(slots, load + idle[variant] + layout.optimizer_slots)
    return slots


def rerouted(layout: Layout, live: int, variant: Variant = "staggered") -> float:
    """Throughput with ``live`` workers, as a share of that without failures, failures normalised."""
    return layout.slots / period(layout, spread(layout, layout.workers - live), variant)


def fault_scaled(layout: Layout, live: int) -> float:
    """Throughput in proportion to the live workers: what ReCycle is compared with."""
    return live / layout.workers


def wiped_out(before: Pattern, lost: Iterable[int]) -> bool:
    """Whether a stage loses all workers that hold its state at once.

    Workers have moved so that failures are spread evenly; of a newly failed one only its first stage is known.
    """
    held = (before.layout.pipelines - gone for gone in spread(before.layout, len(before.vacant)))
    return any(now >= there for now, there in zip(count_stages(before.layout, lost), held, strict=True))
