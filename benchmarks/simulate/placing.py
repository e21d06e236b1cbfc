"""Where a checkpoint policy puts the checkpoints of a job, found by asking it at step boundaries as a job would.

Places are a function of useful time, so that all lives of the job share them
(:mod:`benchmarks.simulate.checkpointed_runs`). Needs NumPy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared_core.checkpoint.cost import Cost
from shared_core.checkpoint.curve import fit_exponential
from shared_core.checkpoint.history import RunEnding
from shared_core.checkpoint.policy import Decision, Exponential, LossCurve, Policy, Situation
from shared_core.errors import ConfigError
from shared_core.kinds import open_regular

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded loss curve, linear between its points; a :class:`LossCurve`.

    Attributes:
        steps: ascending.
        losses: descending.
    """

    steps: Array
    losses: Array

    @classmethod
    def smooth(cls, losses: Array, points: int = 60) -> Recorded:
        """Of the loss of every step: medians of pieces that grow with the step, made to descend, ends included."""
        edges = np.unique(np.round(np.geomspace(1, len(losses), points + 1)).astype(int))
        pieces = [(low, high) for low, high in zip(edges[:-1], edges[1:], strict=True) if high > low]
        at = np.array([0.0, *((low + high) / 2 for low, high in pieces), float(len(losses))])
        medians = [float(np.median(losses[low - 1 : high - 1])) for low, high in pieces]
        return cls(at, _descending(np.array([max(medians[0], losses[0]), *medians, medians[-1]])))

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> Recorded:
        """Of a file with a header and rows ``step,loss``, a step each.

        Raises:
            ConfigError: it is no such file, or the loss does not fall.
            OSError: it cannot be read.
        """
        with open_regular(path) as file:
            content = file.read()
        try:
            lines = content.decode().splitlines()[1:]
            losses = np.array([float(line.split(",")[1]) for line in lines if line])
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{path} must hold a header and rows step,loss: {error}") from error
        if len(losses) < 10 or not np.isfinite(losses).all():
            raise ConfigError(f"{path} must hold at least 10 losses, all of them finite")
        found = cls.smooth(losses)
        if found.losses[0] <= found.losses[-1]:
            raise ConfigError(f"the loss in {path} does not fall")
        return found

    def loss(self, step: float) -> float:
        """Loss after so many steps; constant beyond the ends."""
        return float(np.interp(step, self.steps, self.losses))

    def slope(self, step: float) -> float:
        """Its derivative there, over half as many steps as were made so far."""
        half = max(step / 4, 1.0)
        low, high = max(step - half, self.steps[0]), min(step + half, self.steps[-1])
        return (self.loss(high) - self.loss(low)) / (high - low) if high > low else 0.0


def _descending(values: Array) -> Array:
    """The nearest sequence that never rises (pool adjacent violators)."""
    means: list[float] = []
    counts: list[int] = []
    for value in values:
        means.append(float(value))
        counts.append(1)
        while len(means) > 1 and means[-2] < means[-1]:
            mean, count = means.pop(), counts.pop()
            means[-1] = (means[-1] * counts[-1] + mean * count) / (counts[-1] + count)
            counts[-1] += count
    return np.repeat(means, counts)


@dataclass(frozen=True)
class SimulatedJob:
    """A job.

    Attributes:
        curve: the true loss over its steps.
        hours: useful hours after which it is done.
        cost: of a checkpoint.
        mtbf_h: hours between faults of the whole job while it has all its workers.
        ending: the true law of early ends, over wall time.
        restart_s: from a fault until training continues.
        step_s: useful seconds of a step while it has all its workers; with fewer it takes longer in proportion.
        epoch_s: useful seconds between two checkpoints of ``fixed``.
        workers: from which useful second on there are how many; the hazard grows with their number.
        price: of a checkpoint, in units of the loss.
    """

    curve: LossCurve
    hours: float
    cost: Cost
    mtbf_h: float
    ending: RunEnding
    restart_s: float = 60.0
    step_s: float = 1.0
    epoch_s: float = 600.0
    workers: tuple[tuple[float, int], ...] = ((0.0, 1),)
    price: float = 0.0

    @property
    def horizon_s(self) -> float:
        """Useful seconds of the whole job."""
        return self.hours * 3600

    @property
    def most(self) -> int:
        """All its workers."""
        return max(count for _, count in self.workers)


class Clock:
    """What the number of workers governs, over useful time: hazard, work, steps. Sums are exact between ``edges``.

    Attributes:
        edges: useful seconds at which the number changes, and one beyond the end.
        hazards: faults a second of each piece.
        shares: workers of each piece, over all.
        hazard_sum: the hazard's integral from 0 to each edge.
        work_sum: the share's.
    """

    def __init__(self, job: SimulatedJob) -> None:
        self.job = job
        since = np.array([since for since, _ in job.workers])
        self.shares = np.array([count for _, count in job.workers]) / job.most
        self.hazards = self.shares / (job.mtbf_h * 3600)
        self.edges = np.append(since, max(job.horizon_s, since[-1]) * 4 + 1)
        self.hazard_sum = np.append(0.0, np.cumsum(self.hazards * np.diff(self.edges)))
        self.work_sum = np.append(0.0, np.cumsum(self.shares * np.diff(self.edges)))
        self._moment_sum = np.append(0.0, np.cumsum(self.hazards * np.diff(self.edges**2) / 2))

    def piece(self, useful_s: float) -> int:
        """Which number of workers holds then."""
        return min(int(np.searchsorted(self.edges, useful_s, "right")), len(self.shares)) - 1

    def hazard(self, useful_s: float) -> float:
        """Faults a second then."""
        return float(self.hazards[self.piece(useful_s)])

    def mean_hazard(self) -> float:
        """On average over the job."""
        return float(np.interp(self.job.horizon_s, self.edges, self.hazard_sum)) / self.job.horizon_s

    def step(self, useful_s: float) -> float:
        """Steps of the job made by then."""
        return float(np.interp(useful_s, self.edges, self.work_sum)) / self.job.step_s

    def rework_s(self, since_s: float, useful_s: float) -> float:
        """The integral of hazard times age from one useful second to another."""
        moment = self._moment(useful_s) - self._moment(since_s)
        hazard = np.interp([since_s, useful_s], self.edges, self.hazard_sum)
        return float(moment - since_s * (hazard[1] - hazard[0]))

    def _moment(self, useful_s: float) -> float:
        piece = self.piece(useful_s)
        inside = self.hazards[piece] * (useful_s**2 - self.edges[piece] ** 2) / 2
        return float(self._moment_sum[piece] + inside)


@dataclass(frozen=True)
class TrueCurve:
    """The job's loss over slots of ``step_s`` useful seconds, with the workers that there will be."""

    clock: Clock

    def loss(self, step: float) -> float:
        """Loss after so many slots."""
        return self.clock.job.curve.loss(self.clock.step(step * self.clock.job.step_s))

    def slope(self, step: float) -> float:
        """Its derivative there."""
        useful_s = step * self.clock.job.step_s
        share = float(self.clock.shares[self.clock.piece(useful_s)])
        return self.clock.job.curve.slope(self.clock.step(useful_s)) * share


@dataclass(frozen=True)
class _AtThisSpeed:
    """A fitted curve over slots, when those to come make as many steps as the present one."""

    curve: LossCurve | Exponential
    slot: float
    step: float
    share: float

    def loss(self, step: float) -> float:
        return self.curve.loss(max(0.0, self.step + (step - self.slot) * self.share))

    def slope(self, step: float) -> float:
        return self.curve.slope(max(0.0, self.step + (step - self.slot) * self.share)) * self.share


@dataclass(frozen=True)
class Knowledge:
    """What a policy believes.

    Attributes:
        ending: law of early ends; None for no history.
        fitted: gives the curve that is fitted after so many steps, None while there is none; unset for the true one.
        exponential: COCI's fit, over slots; with ``by_worker`` over steps.
        one_hazard: whether it is told the job's average hazard throughout, as COCI and its baseline are.
        hazard_factor: believed hazard over the true one.
        by_worker: whether it is told how many workers there are, and the fit at their speed, as COCI's theorem 4.2 is.
    """

    ending: RunEnding | None
    fitted: Callable[[float], LossCurve | None] | None = None
    exponential: Exponential | None = None
    one_hazard: bool = False
    hazard_factor: float = 1.0
    by_worker: bool = False


def exponential_of(job: SimulatedJob, by_worker: bool = False) -> Exponential | None:
    """COCI's fit of the whole true curve, over slots; with ``by_worker`` over steps."""
    if by_worker:
        steps = np.linspace(0, Clock(job).step(job.horizon_s), 400)
        return fit_exponential(steps, np.array([job.curve.loss(step) for step in steps]))
    curve, slots = TrueCurve(Clock(job)), np.linspace(0, job.horizon_s / job.step_s, 400)
    return fit_exponential(slots, np.array([curve.loss(slot) for slot in slots]))


def at_speed(fit: Exponential, slot: float, step: float, share: float) -> Exponential:
    """A fit over steps as one over slots around ``slot``, each of which makes ``share`` of a step."""
    return Exponential(fit.decay * share, fit.level + fit.decay * (step - slot * share))


def asked(job: SimulatedJob, policy: Policy, known: Knowledge, slot: int, saved: int, clock: Clock) -> Decision:
    """What a policy answers at the step boundary after so many slots, with its last checkpoint after ``saved``."""
    useful_s, step = slot * job.step_s, clock.step(slot * job.step_s)
    piece = clock.piece(useful_s)
    share = float(clock.shares[piece])
    curve: LossCurve | None = TrueCurve(clock)
    if known.fitted is not None:
        fitted = known.fitted(step)
        curve = _AtThisSpeed(fitted, slot, step, share) if fitted is not None else None
    exponential = known.exponential
    if known.by_worker and exponential is not None:
        exponential = at_speed(exponential, slot, step, share)
    since = clock.rework_s(saved * job.step_s, useful_s) * known.hazard_factor
    return policy.due(
        Situation(
            step=slot,
            useful_s=useful_s,
            saved_step=saved,
            saved_s=saved * job.step_s,
            step_s=job.step_s,
            hazard=(clock.mean_hazard() if known.one_hazard else clock.hazard(useful_s)) * known.hazard_factor,
            cost=job.cost,
            rework_s=None if known.one_hazard else since,
            curve=curve,
            exponential=exponential,
            ending=known.ending,
            horizon_s=job.horizon_s,
            workers=job.workers[min(piece, len(job.workers) - 1)][1] if known.by_worker else 1,
        )
    )


def places(job: SimulatedJob, policy: Policy, known: Knowledge) -> list[float]:
    """Useful seconds at which the policy makes checkpoints, in a life without faults.

    A step boundary comes every ``step_s``; with fewer workers it is thought to be a smaller part of a step.
    """
    clock = Clock(job)
    slots, saved, gap = math.ceil(job.horizon_s / job.step_s) - 1, 0, 64
    found: list[float] = []

    def due(slot: int) -> bool:
        return asked(job, policy, known, slot, saved, clock).due

    while True:
        # The older the last checkpoint, the more willing is every policy: look for the first step boundary by doubling.
        low, high = saved, saved + max(1, gap // 2)
        while high < slots and not due(high):
            low, high = high, high + 2 * (high - saved)
        high = min(high, slots)
        if high <= low or not due(high):
            return found
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if due(middle) else (middle, high)
        gap, saved = high - saved, high
        found.append(saved * job.step_s)
