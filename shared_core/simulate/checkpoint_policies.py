"""What a checkpoint policy makes of a job that fails and may end early: places of its checkpoints, then many lives.

Places are found by asking the policy as a job would. They are a function of useful time, so that all lives share them;
each life has its own faults and its own end, and every policy meets the same ones. Delays are exact: a stall, a fault or
a restart moves all that follows, also with regard to the end. Needs NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared_core.checkpoint.cost import Cost
from shared_core.checkpoint.ending import Ending
from shared_core.checkpoint.policy import Exponential, Policy, Situation
from shared_core.checkpoint.policy.situation import LossCurve

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """A recorded loss curve, made monotone; linear between its points, a :class:`LossCurve`.

    Attributes:
        steps: ascending.
        losses: descending.
    """

    steps: Array
    losses: Array

    def loss(self, step: float) -> float:
        """Loss after so many steps; constant beyond the ends."""
        return float(np.interp(step, self.steps, self.losses))

    def slope(self, step: float) -> float:
        """Its derivative there, over a fortieth of the curve."""
        half = (self.steps[-1] - self.steps[0]) / 80
        low, high = max(step - half, self.steps[0]), min(step + half, self.steps[-1])
        return (self.loss(high) - self.loss(low)) / (high - low) if high > low else 0.0


@dataclass(frozen=True)
class Job:
    """A job.

    Attributes:
        curve: the true loss over steps. With more workers a step takes less time.
        hours: useful hours after which it is done.
        cost: of a checkpoint.
        mtbf_h: hours between faults of the whole job with all its workers.
        ending: the true law of early ends, over wall time.
        restart_s: from a fault until training goes on.
        step_s: useful seconds of a step with all workers.
        epoch_s: useful seconds of an epoch, for ``fixed``.
        workers: number of workers and from which useful second on; the hazard grows with their number.
    """

    curve: LossCurve
    hours: float
    cost: Cost
    mtbf_h: float
    ending: Ending
    restart_s: float = 60.0
    step_s: float = 1.0
    epoch_s: float = 600.0
    workers: tuple[tuple[float, int], ...] = ((0.0, 1),)

    @property
    def horizon_s(self) -> float:
        """Useful seconds of the whole job."""
        return self.hours * 3600


class Clock:
    """Integrals over useful time of what the number of workers governs: hazard, work, steps."""

    def __init__(self, job: Job) -> None:
        starts = np.array([since for since, _ in job.workers] + [math.inf])
        count = np.array([count for _, count in job.workers], dtype=float)
        most = count.max()
        self.job = job
        self.since, self.count = starts[:-1], count
        self.hazards = count / most / (job.mtbf_h * 3600)
        self.edges = np.append(self.since, max(job.horizon_s, self.since[-1]) * 4 + 1)
        widths = np.diff(self.edges)
        self.hazard_sum = np.append(0.0, np.cumsum(self.hazards * widths))
        self.moment_sum = np.append(0.0, np.cumsum(self.hazards * np.diff(self.edges**2) / 2))
        self.work_sum = np.append(0.0, np.cumsum(count * widths))
        self.step_sum = np.append(0.0, np.cumsum(count / most / job.step_s * widths))

    def piece(self, useful_s: float) -> int:
        """Which number of workers holds then."""
        return int(np.searchsorted(self.since, useful_s, "right")) - 1

    def hazard(self, useful_s: float) -> float:
        """Faults a second then."""
        return float(self.hazards[self.piece(useful_s)])

    def mean_hazard(self) -> float:
        """On average over the job."""
        return float(np.interp(self.job.horizon_s, self.edges, self.hazard_sum)) / self.job.horizon_s

    def step(self, useful_s: float) -> float:
        """Steps made by then."""
        return float(np.interp(useful_s, self.edges, self.step_sum))

    def rework_s(self, since_s: float, useful_s: float) -> float:
        """The integral of hazard times age."""
        low, high = (
            np.array([self._moment(at), np.interp(at, self.edges, self.hazard_sum)]) for at in (since_s, useful_s)
        )
        moment, hazard = high - low
        return float(moment - since_s * hazard)

    def _moment(self, useful_s: float) -> float:
        piece = self.piece(useful_s)
        return float(self.moment_sum[piece] + self.hazards[piece] * (useful_s**2 - self.since[piece] ** 2) / 2)


@dataclass(frozen=True)
class Knowledge:
    """What the policy believes, where that is not the truth.

    Attributes:
        ending: of the law of ends; None for no history.
        curve: by steps made so far; None for the true one.
        exponential: the same for COCI's fit.
        one_hazard: whether it is told the average hazard always, as COCI and its baseline are.
        hazard_factor: believed hazard over the true one.
        horizon: whether the planned end is known.
    """

    ending: Ending | None
    curve: Callable[[float], LossCurve | None] | None = None
    exponential: Callable[[float], Exponential | None] | None = None
    one_hazard: bool = False
    hazard_factor: float = 1.0
    horizon: bool = True


@dataclass(frozen=True)
class _PerSecond:
    """The true curve over useful seconds: with a changing number of workers a future second makes other steps."""

    clock: Clock

    def loss(self, step: float) -> float:
        return self.clock.job.curve.loss(self.clock.step(step))

    def slope(self, step: float) -> float:
        per_s = self.clock.count[self.clock.piece(step)] / self.clock.count.max() / self.clock.job.step_s
        return float(self.clock.job.curve.slope(self.clock.step(step)) * per_s)


def exponential_of(job: Job) -> Exponential | None:
    """COCI's fit of the whole true curve, over useful seconds."""
    from shared_core.checkpoint.curve import _exponential

    curve = _PerSecond(Clock(job))
    at = np.linspace(0, job.horizon_s, 400)
    return _exponential(at, np.array([curve.loss(each) for each in at]), 0, np)


def places(job: Job, policy: Policy, known: Knowledge, exponential: Exponential | None = None) -> list[float]:
    """Useful seconds at which the policy makes checkpoints in a life without faults.

    A step of the job is a second here, unless ``known`` has fits over the job's own steps.
    """
    clock = Clock(job)
    by_second = _PerSecond(clock)
    found: list[float] = []
    last, previous = 0.0, 64 * job.step_s
    fitted = known.curve is not None
    mean = clock.mean_hazard() * known.hazard_factor

    def situation(at: float) -> Situation:
        step = clock.step(at) if fitted else at
        true = clock.hazard(at) * known.hazard_factor
        return Situation(
            step=step,  # type: ignore[arg-type]  # fractions do no harm
            useful_s=at,
            saved_step=clock.step(last) if fitted else last,  # type: ignore[arg-type]
            saved_s=last,
            step_s=job.step_s * clock.count.max() / clock.count[clock.piece(at)] if fitted else 1.0,
            hazard=mean if known.one_hazard else true,
            cost=job.cost,
            rework_s=None if known.one_hazard else clock.rework_s(last, at) * known.hazard_factor,
            curve=known.curve(step) if known.curve is not None else by_second,
            exponential=known.exponential(step) if known.exponential is not None else exponential,
            ending=known.ending,
            horizon_s=job.horizon_s if known.horizon else None,
        )

    while True:
        # Every policy is the more willing the older the last checkpoint is: look for the first step by doubling.
        low, high = 0, max(1, round(previous / job.step_s / 2))
        left = math.floor((job.horizon_s - last) / job.step_s - 1e-9)
        while high < left and not policy.due(situation(last + high * job.step_s)).due:
            low, high = high, 2 * high
        high = min(high, left)
        if high <= low or not policy.due(situation(last + high * job.step_s)).due:
            return found
        while high - low > 1:
            middle = (low + high) // 2
            if policy.due(situation(last + middle * job.step_s)).due:
                high = middle
            else:
                low = middle
        previous = high * job.step_s
        last += previous
        found.append(last)


@dataclass(frozen=True)
class Lives:
    """Faults and ends of many lives, the same for every policy.

    Attributes:
        ends_s: wall time of the early end of each; infinite for none.
        faults: ``[lives, n]``: hazard that passes before each next fault.
    """

    ends_s: Array
    faults: Array

    @classmethod
    def draw(cls, job: Job, lives: int, seed: int, most_faults: int = 400) -> Lives:
        """Draw them."""
        random = np.random.default_rng(seed)
        passed = random.exponential(size=lives)
        ends = np.full(lives, math.inf)
        gone = 0.0
        for since, until, rate in zip(
            job.ending.since_s, (*job.ending.since_s[1:], math.inf), job.ending.rates, strict=True
        ):
            width = rate * (until - since) if rate else 0.0
            inside = (passed >= gone) & (passed < gone + width)
            ends[inside] = since + (passed[inside] - gone) / rate if rate else math.inf
            gone += width
        count = min(most_faults, int(10 + 4 * job.hours / job.mtbf_h))
        return cls(ends, random.exponential(size=(lives, count)))


@dataclass(frozen=True)
class Outcome:
    """Of each life; seconds are of workers where their number changes, over the largest number.

    Attributes:
        stall_s: spent on checkpoints.
        rework_s: work that was done again.
        lost: utility that it lacks at its end against a life with the same end without faults and checkpoints, as a
            share of what the whole job gains; the mean over abrupt and graceful ends by their shares.
        checkpoints: number that a life without faults makes.
    """

    stall_s: Array
    rework_s: Array
    lost: Array
    checkpoints: int

    @property
    def overhead_s(self) -> float:
        """Mean of stall and rework."""
        return float((self.stall_s + self.rework_s).mean())


def live(job: Job, made: list[float], lives: Lives) -> Outcome:
    """All lives with checkpoints at given useful seconds."""
    clock, cost, lag = Clock(job), job.cost.seconds, job.cost.persist_s
    edges = np.array([0.0, *made, job.horizon_s])
    segments, size = len(edges) - 1, len(lives.ends_s)
    hazard_at = np.interp(edges, clock.edges, clock.hazard_sum)
    share = clock.count / clock.count.max()
    piece = np.clip(np.searchsorted(clock.since, edges, "right") - 1, 0, None)
    rate, weight = clock.hazards[piece], share[piece]
    work_at = np.interp(edges, clock.edges, clock.work_sum) / clock.count.max()
    durable_cost = np.append(np.full(segments - 1, cost), 0.0)

    segment = np.zeros(size, dtype=int)
    fault = np.zeros(size, dtype=int)
    left = lives.faults[:, 0].copy()
    now, current, saved = np.zeros(size), np.zeros(size), np.zeros(size)
    stall, rework = np.zeros(size), np.zeros(size)
    alive = np.arange(size)
    while len(alive):
        s = segment[alive]
        work, paid = edges[s + 1] - edges[s], durable_cost[s]
        needed = hazard_at[s + 1] - hazard_at[s]
        e = left[alive]
        in_work, fails = e < needed, e < needed + rate[s + 1] * paid
        reached = np.where(in_work, np.interp(hazard_at[s] + e, clock.hazard_sum, clock.edges) - edges[s], work)
        reached = np.minimum(reached, work)
        elapsed = np.where(fails, reached + np.where(in_work, 0.0, (e - needed) / rate[s + 1]), work + paid)
        room = lives.ends_s[alive] - now[alive]
        killed = room < elapsed

        over, s_over = alive[killed], s[killed]
        advanced = np.clip(room[killed], 0.0, work[killed])
        current[over] = edges[s_over] + advanced
        saved[over] = edges[np.where(advanced < lag, np.maximum(s_over - 1, 0), s_over)]
        stall[over] += np.clip(room[killed] - work[killed], 0.0, None) * weight[s_over + 1]

        hit = fails & ~killed
        who, s_hit = alive[hit], s[hit]
        back = np.where(reached[hit] < lag, np.maximum(s_hit - 1, 0), s_hit)
        done = np.interp(edges[s_hit] + reached[hit], clock.edges, clock.work_sum) / clock.count.max()
        rework[who] += done - work_at[back]
        stall[who] += (elapsed[hit] - reached[hit]) * weight[s_hit + 1]
        now[who] += elapsed[hit] + job.restart_s
        segment[who] = back
        fault[who] += 1
        left[who] = lives.faults[who, fault[who] % lives.faults.shape[1]]
        gone = who[now[who] >= lives.ends_s[who]]
        current[gone] = saved[gone] = edges[segment[gone]]

        well = ~fails & ~killed
        on, s_on = alive[well], s[well]
        now[on] += elapsed[well]
        stall[on] += paid[well] * weight[s_on + 1]
        left[on] -= needed[well] + rate[s_on + 1] * paid[well]
        segment[on] += 1
        complete = on[segment[on] == segments]
        current[complete] = saved[complete] = job.horizon_s

        ended = np.zeros(size, dtype=bool)
        ended[over] = ended[gone] = ended[complete] = True
        alive = alive[~ended[alive]]

    utility = _utility(job, clock)
    best = utility(np.minimum(lives.ends_s, job.horizon_s))
    kept = (1 - job.ending.abrupt) * utility(current) + job.ending.abrupt * utility(saved)
    return Outcome(stall, rework, best - kept, len(made))


def _utility(job: Job, clock: Clock) -> Callable[[Array], Array]:
    """Share of the whole job's gain that is reached after given useful seconds."""
    near = np.geomspace(job.step_s / 10, job.horizon_s, 4000)
    grid = np.unique(np.concatenate([[0.0], near, np.linspace(0, job.horizon_s, 8001)]))
    curve = _PerSecond(clock)
    losses = np.array([curve.loss(each) for each in grid])
    values = (losses[0] - losses) / (losses[0] - losses[-1])
    return lambda useful: np.interp(useful, grid, values)
