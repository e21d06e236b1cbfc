"""Many lives of a job with checkpoints at given places, each with its own faults and its own end.

Delays are exact: a stall, a fault or a restart moves all that follows, also with regard to the end. All sets of places
meet the same faults and ends, so that small differences between them can be told from chance. Needs NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.simulate.placing import Array, Clock, SimulatedJob, TrueCurve


@dataclass(frozen=True)
class SimulatedRuns:
    """Faults and ends of many lives.

    Attributes:
        ends_s: wall time of the early end of each; infinite for none.
        faults: ``[lives, n]``, the hazard that passes before each next fault.
    """

    ends_s: Array
    faults: Array

    @classmethod
    def draw(cls, job: SimulatedJob, lives: int, seed: int) -> SimulatedRuns:
        """Draw them."""
        random = np.random.default_rng(seed)
        left, ends = random.exponential(size=lives), np.full(lives, math.inf)
        for since, until, rate in zip(
            job.ending.since_s, (*job.ending.since_s[1:], math.inf), job.ending.rates, strict=True
        ):
            if rate:
                at = since + left / rate
                ends = np.where(np.isinf(ends) & (left >= 0) & (at < until), at, ends)
                left = left - rate * (until - since)
        faults = 10 + min(1000, int(6 * job.hours / job.mtbf_h))
        return cls(ends, random.exponential(size=(lives, faults)))


@dataclass(frozen=True)
class RunOutcomes:
    """Of each life. Seconds are of all workers: those while only a part is at work count for that part.

    Attributes:
        stall_s: spent on checkpoints.
        rework_s: work that was done again.
        made: number of checkpoints.
        short: utility that it lacks at its end, against a life with the same end but without faults and checkpoints, as
            a share of what the whole job gains.
        short_saved: the same for what is in the last durable checkpoint.
        abrupt: share of early ends of which that is all that is left.
        price: of a checkpoint, as a share of that gain.
    """

    stall_s: Array
    rework_s: Array
    made: Array
    short: Array
    short_saved: Array
    abrupt: float
    price: float

    @property
    def overhead_s(self) -> Array:
        """Stall and rework."""
        return self.stall_s + self.rework_s

    @property
    def lost(self) -> Array:
        """Utility that is lacking, by the shares of graceful and abrupt ends, and the price of the checkpoints."""
        return (1 - self.abrupt) * self.short + self.abrupt * self.short_saved + self.price * self.made

    def of(self, job: SimulatedJob) -> RunOutcomes:
        """The same lives of a job in which nothing but the share of abrupt ends and the price are others."""
        return replace(self, abrupt=job.ending.abrupt, price=job.price / _utility(job, Clock(job))[1])

    def mean(self) -> RunOutcomes:
        """As that of one life."""
        arrays = (self.stall_s, self.rework_s, self.made, self.short, self.short_saved)
        stall, rework, made, short, short_saved = (np.array([each.mean()]) for each in arrays)
        return RunOutcomes(stall, rework, made, short, short_saved, self.abrupt, self.price)


def simulate_runs(job: SimulatedJob, places: Sequence[float], lives: SimulatedRuns) -> RunOutcomes:
    """All lives with checkpoints at these useful seconds."""
    clock, cost, lag = Clock(job), job.cost.seconds, job.cost.persist_s
    edges = np.array([0.0, *places, job.horizon_s])
    last, size = len(edges) - 1, len(lives.ends_s)
    hazard_at = np.interp(edges, clock.edges, clock.hazard_sum)
    work_at = np.interp(edges, clock.edges, clock.work_sum)
    piece = np.array([clock.piece(edge) for edge in edges])
    rate, share = clock.hazards[piece], clock.shares[piece]
    paid_at = np.where(np.arange(len(edges)) < last, cost, 0.0)

    segment, fault, made = (np.zeros(size, dtype=int) for _ in range(3))
    now, current, saved, stall, rework = (np.zeros(size) for _ in range(5))
    left = lives.faults[:, 0].copy()
    alive = np.arange(size)
    while len(alive):
        # Each of those alive tries its segment: work from edge s to s + 1, then the checkpoint there.
        s, e = segment[alive], left[alive]
        work, paid = edges[s + 1] - edges[s], paid_at[s + 1]
        needed = hazard_at[s + 1] - hazard_at[s]
        in_work, fails = e < needed, e < needed + rate[s + 1] * paid
        worked = np.where(in_work, np.interp(hazard_at[s] + e, clock.hazard_sum, clock.edges) - edges[s], work)
        worked = np.clip(worked, 0.0, work)
        elapsed = np.where(fails, worked + np.where(in_work, 0.0, (e - needed) / rate[s + 1]), work + paid)
        room = lives.ends_s[alive] - now[alive]
        killed = room < elapsed
        hit, well = fails & ~killed, ~fails & ~killed

        who, at = alive[killed], s[killed]
        advanced = np.clip(room[killed], 0.0, work[killed])
        current[who] = edges[at] + advanced
        saved[who] = edges[_durable(at, room[killed], lag)]
        stall[who] += np.clip(room[killed] - work[killed], 0.0, None) * share[at + 1]

        who, at = alive[hit], s[hit]
        back = _durable(at, elapsed[hit], lag)
        done = np.interp(edges[at] + worked[hit], clock.edges, clock.work_sum)
        rework[who] += done - work_at[back]
        stall[who] += (elapsed[hit] - worked[hit]) * share[at + 1]
        now[who] += elapsed[hit] + job.restart_s
        segment[who] = back
        fault[who] += 1
        left[who] = lives.faults[who, fault[who] % lives.faults.shape[1]]
        gone = who[now[who] >= lives.ends_s[who]]
        current[gone] = saved[gone] = edges[segment[gone]]

        who, at = alive[well], s[well]
        now[who] += elapsed[well]
        stall[who] += paid[well] * share[at + 1]
        left[who] -= needed[well] + rate[at + 1] * paid[well]
        made[who] += at + 1 < last
        segment[who] += 1
        complete = who[segment[who] == last]
        current[complete] = saved[complete] = job.horizon_s

        over = np.zeros(size, dtype=bool)
        for each in (alive[killed], gone, complete):
            over[each] = True
        alive = alive[~over[alive]]

    utility, whole = _utility(job, clock)
    best = utility(np.minimum(lives.ends_s, job.horizon_s))
    short, short_saved = best - utility(current), best - utility(saved)
    return RunOutcomes(stall, rework, made.astype(float), short, short_saved, job.ending.abrupt, job.price / whole)


def _durable(segment: np.ndarray, elapsed: Array, lag: float) -> np.ndarray:
    """The newest durable checkpoint: that at the beginning of the segment, or the one before while it is written."""
    return np.where(elapsed < lag, np.maximum(segment - 1, 0), segment)


def _utility(job: SimulatedJob, clock: Clock) -> tuple[Callable[[Array], Array], float]:
    """What is reached after given useful seconds as a share of the whole job's gain; and that gain."""
    grid = np.unique(np.append(np.geomspace(job.step_s / 10, job.horizon_s, 3000), np.linspace(0, job.horizon_s, 3001)))
    curve = TrueCurve(clock)
    losses = np.array([curve.loss(each / job.step_s) for each in grid])
    gain = float(losses[0] - losses[-1])
    return lambda useful: np.interp(useful, grid, (losses[0] - losses) / gain), gain


def mean_and_error(values: Array) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))
