"""Checkpoint policies compared on one job: what ``swiftctl lab policy`` shows. Needs NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.simulate.checkpointed_runs import RunOutcomes, SimulatedRuns, mean_and_error, simulate_runs
from benchmarks.simulate.placing import Clock, Knowledge, SimulatedJob, asked, exponential_of, places
from shared_core.checkpoint.policy import POLICIES, CociLiteral, Fixed, Policy, Value, make_policy


@dataclass(frozen=True)
class Share:
    """A mean over lives and its standard error."""

    mean: float
    error: float


@dataclass(frozen=True)
class PolicyResult:
    """A policy on a job.

    Attributes:
        policy: its name.
        places_s: useful seconds of its checkpoints in a life without faults.
        hours: useful hours of the job.
        stall: spent on checkpoints, as a share of the useful time of the whole job; None if nothing was simulated.
        rework: work done again, likewise.
        rule: what it follows at half of the useful time, where that may be another rule than its name says.
        lost: utility lacking at the end, as a share of what the whole job gains.
    """

    policy: str
    places_s: tuple[float, ...]
    hours: float
    stall: Share | None = None
    rework: Share | None = None
    lost: Share | None = None
    rule: str = ""

    def interval_s(self, part: float) -> float | None:
        """Between the checkpoints around this part of the useful time; None where there are none around."""
        at = part * self.hours * 3600
        for before, after in itertools.pairwise((0.0, *self.places_s)):
            if before <= at < after:
                return after - before
        return None


def chosen(name: str, job: SimulatedJob) -> Policy:
    """A policy by name, with what the job tells of it.

    Raises:
        ConfigError: there is none of this name.
    """
    if name == Fixed.name:
        return make_policy(name, every_steps=max(1, round(job.epoch_s / job.step_s)))
    return make_policy(name, price=job.price) if name == Value.name else make_policy(name)


def compare(
    job: SimulatedJob, names: Iterable[str] = tuple(POLICIES), lives: int = 0, seed: int = 0
) -> list[PolicyResult]:
    """Each policy, told the truth about the job; simulated if ``lives`` is not 0.

    Raises:
        ConfigError: there is no policy of a name.
    """
    policies = {name: chosen(name, job) for name in names}
    known = Knowledge(job.ending, exponential=exponential_of(job))
    by_worker = replace(known, exponential=exponential_of(job, by_worker=True), by_worker=True)
    clock, middle = Clock(job), max(1, round(job.horizon_s / job.step_s / 2))
    drawn = SimulatedRuns.draw(job, lives, seed) if lives else None
    found = []
    for name, policy in policies.items():
        told = by_worker if name == CociLiteral.name else known
        made = places(job, policy, told)
        if drawn is None:
            result = PolicyResult(name, tuple(made), job.hours)
        else:
            result = _simulated(name, made, job, simulate_runs(job, made, drawn))
        found.append(replace(result, rule=asked(job, policy, told, middle, middle - 1, clock).rule))
    return found


def _simulated(name: str, made: list[float], job: SimulatedJob, outcome: RunOutcomes) -> PolicyResult:
    scaled = (outcome.stall_s / job.horizon_s, outcome.rework_s / job.horizon_s, outcome.lost)
    stall, rework, lost = (Share(*mean_and_error(values)) for values in scaled)
    return PolicyResult(name, tuple(made), job.hours, stall, rework, lost)
