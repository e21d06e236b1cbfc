"""Selective logging: which machines of a pipeline restart together, so that messages between them need no log.

Machines form a chain. A plan cuts it into groups of neighbors; messages are logged where two groups meet, and a failed
machine's whole group replays. Fewer logs, longer replay: the idea is Swift's (Zhong et al., arXiv 2302.06173), which
merges greedily; here the plan is the best one. All functions are pure. See ``docs/design/plan_logging.md``.

Replay time of a group, in seconds per replayed step: its stages, and the links between its machines, are a line that M
equal micro-batches pass, each taking 1/M of a step's time at every place. The last leaves the line after

    sum(t) / M + (M - 1) / M * max(t),        t = seconds a step of each stage and link

(makespan of equal jobs in a flow shop). With S equal stages and free links it is (M + S - 1) / M * t, from which
Swift's bound follows: a step replayed by S_group of S stages takes (M + S_group - 1) / (M + S - 1) of a normal one.
With M = 1 it is the plain sum, the cost that Swift's own grouping uses (``merge_groups`` in
``pipeline_vit/profile/optimizer.py``). It is an estimate: loading the checkpoint and reading logs are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from shared_core.errors import ConfigError


@dataclass(frozen=True)
class ChainMachine:
    """One machine of the chain.

    Attributes:
        compute_s: what a stage of it computes in a step: forward and backward of all micro-batches, in seconds, without
            waiting; of its slowest stage if they differ.
        weight: how often it fails, relative to the others.
        stages: consecutive pipeline stages on it.
    """

    compute_s: float
    weight: float = 1.0
    stages: int = 1

    def __post_init__(self) -> None:
        _number("compute_s", self.compute_s)
        _number("weight", self.weight)
        _whole("stages", self.stages, 1)


@dataclass(frozen=True)
class ChainProfile:
    """What was measured of a pipeline.

    Attributes:
        machines: in the order of the pipeline.
        boundary_bytes: bytes that cross from machine i to i + 1 and back in one step, both directions together.
        steps_between_checkpoints: steps for which logs are kept.
        micro_batches: of a step; 1 gives the cost that Swift's own grouping uses.
        link_bytes_per_s: between two machines, both directions together; None leaves transfers out.
        step_s: seconds of a normal step of the whole pipeline; needed only for a budget in bytes per second.
    """

    machines: tuple[ChainMachine, ...]
    boundary_bytes: tuple[int, ...]
    steps_between_checkpoints: int
    micro_batches: int = 1
    link_bytes_per_s: float | None = None
    step_s: float | None = None

    def __post_init__(self) -> None:
        if not self.machines:
            raise ConfigError("a profile needs at least one machine")
        if len(self.boundary_bytes) != len(self.machines) - 1:
            raise ConfigError(
                f"{len(self.machines)} machines have {len(self.machines) - 1} boundaries, "
                f"but boundary_bytes has {len(self.boundary_bytes)} values"
            )
        for count in self.boundary_bytes:
            _whole("boundary_bytes", count, 0)
        _whole("steps_between_checkpoints", self.steps_between_checkpoints, 1)
        _whole("micro_batches", self.micro_batches, 1)
        for name in ("link_bytes_per_s", "step_s"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), positive=True)
        if not any(machine.weight for machine in self.machines):
            raise ConfigError("at least one machine needs a weight above 0")


@dataclass(frozen=True)
class Budget:
    """What logs may take; None is no limit.

    Attributes:
        storage_bytes: of all machines together, between two checkpoints.
        bytes_per_s: written by all machines together, averaged over a normal step.
    """

    storage_bytes: float | None = None
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                _number(field.name, getattr(self, field.name))

    def bytes_a_step(self, profile: ChainProfile) -> float:
        """Bytes that may be logged in one step. ConfigError if ``bytes_per_s`` is given without ``step_s``."""
        limit = math.inf
        if self.storage_bytes is not None:
            # Whole steps only: what a step may take is rounded down, as storage is compared in whole bytes.
            limit = math.floor(self.storage_bytes) // profile.steps_between_checkpoints
        if self.bytes_per_s is not None:
            if profile.step_s is None:
                raise ConfigError("a budget in bytes per second (--bandwidth) needs 'step_s' in the profile")
            limit = min(limit, self.bytes_per_s * profile.step_s)
        return limit


@dataclass(frozen=True)
class GroupPlan:
    """A grouping and what it costs.

    Attributes:
        groups: indices of the machines of each group, in the order of the pipeline.
        bytes_a_step: logged by all machines together.
        storage_bytes: of the logs between two checkpoints.
        replay_s: expected seconds to replay one step: over groups, probability of a failure in it times its replay.
        slowest_replay_s: seconds to replay one step of the group that takes longest.
    """

    groups: tuple[tuple[int, ...], ...]
    bytes_a_step: int
    storage_bytes: int
    replay_s: float
    slowest_replay_s: float

    @property
    def logged(self) -> tuple[int, ...]:
        """Boundaries whose messages are logged: i is the one between machines i and i + 1."""
        return tuple(group[-1] for group in self.groups[:-1])


def plan_groups(profile: ChainProfile, budget: Budget) -> GroupPlan:
    """The plan with the least expected replay time within the budget; of equal ones that with fewest bytes.

    One always exists: a single group logs nothing.
    """
    return _curve(profile, budget.bytes_a_step(profile))[-1]


def trade_off(profile: ChainProfile) -> list[GroupPlan]:
    """All plans that no other beats in both storage and expected replay time, from the least storage to the most."""
    return _curve(profile, math.inf)


def evaluate(profile: ChainProfile, groups: Iterable[Sequence[int]]) -> GroupPlan:
    """What a given grouping costs; ConfigError if it does not have the machines in order, each once."""
    made = tuple(tuple(group) for group in groups)
    if [i for group in made for i in group] != list(range(len(profile.machines))) or not all(made):
        raise ConfigError(f"groups must be machines 0 to {len(profile.machines) - 1} in order, each once, got {made}")
    total = sum(machine.weight for machine in profile.machines)
    expected, slowest = 0.0, 0.0
    for group in made:
        weight, seconds = _costs(profile, group[0], group[-1] + 1)[-1]
        expected += weight * seconds
        slowest = max(slowest, seconds)
    logged = sum(profile.boundary_bytes[group[-1]] for group in made[:-1])
    return GroupPlan(made, logged, logged * profile.steps_between_checkpoints, expected / total, slowest)


def drifted(now: ChainProfile, planned: ChainProfile, tolerance: float = 0.2) -> bool:
    """Whether the pipeline has changed so much that it is to be planned again.

    True if a time or a number of bytes differs from its planned value by more than ``tolerance`` times the planned mean
    over the chain (so what is small itself may vary), a machine's share of the failures by more than ``tolerance``
    times an equal share, a rate or ``step_s`` by more than ``tolerance`` times itself, or anything else at all. Raises
    ConfigError if ``tolerance`` is negative.
    """
    _number("tolerance", tolerance)

    def differ(new: Sequence[float], old: Sequence[float]) -> bool:
        allowed = tolerance * sum(old) / max(1, len(old))
        return any(abs(a - b) > allowed for a, b in zip(new, old, strict=True))

    def shares(profile: ChainProfile) -> list[float]:
        total = sum(machine.weight for machine in profile.machines)
        return [machine.weight / total for machine in profile.machines]

    def shape(profile: ChainProfile) -> tuple[Any, ...]:
        stages = tuple(machine.stages for machine in profile.machines)
        absent = (profile.link_bytes_per_s is None, profile.step_s is None)
        return (stages, profile.steps_between_checkpoints, profile.micro_batches, absent)

    if shape(now) != shape(planned):
        return True
    return (
        differ([m.compute_s for m in now.machines], [m.compute_s for m in planned.machines])
        or differ(now.boundary_bytes, planned.boundary_bytes)
        or differ(shares(now), shares(planned))
        or differ([now.link_bytes_per_s or 0.0], [planned.link_bytes_per_s or 0.0])
        or differ([now.step_s or 0.0], [planned.step_s or 0.0])
    )


#: A grouping of the first machines: bytes logged a step, sum of weight times replay seconds, first machine of the last
#: group, and the grouping before it.
_Label = tuple[int, float, int, "_Label | None"]


def _curve(profile: ChainProfile, limit: float) -> list[GroupPlan]:
    """Plans that log at most ``limit`` bytes a step and that no other beats, by an exact dynamic program.

    A group's cost depends on its ends alone, so a grouping of the first machines that logs no less and replays no
    faster than another one of the same machines is never part of a better plan, and is dropped. Equal boundaries leave
    at most as many labels as there are machines; with boundaries that all differ there may be exponentially many at
    worst, a few hundred for 24 machines drawn at random.
    """
    count = len(profile.machines)
    ahead: list[list[_Label]] = [[] for _ in range(count + 1)]
    kept: list[_Label] = [(0, 0.0, 0, None)]
    for first in range(count):
        if first:
            kept = _undominated(ahead[first])
            ahead[first] = []
        cut = profile.boundary_bytes[first - 1] if first else 0
        base = [label for label in kept if label[0] + cut <= limit]
        for end, (weight, seconds) in enumerate(_costs(profile, first, count), start=first + 1):
            cost = weight * seconds
            ahead[end] += [(label[0] + cut, label[1] + cost, first, label) for label in base]
    return [evaluate(profile, _groups(label, count)) for label in _undominated(ahead[count])]


def _undominated(labels: list[_Label]) -> list[_Label]:
    """In ascending bytes and descending time; of equal ones the first."""
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda label: label[:2]):
        if not kept or label[1] < kept[-1][1]:
            kept.append(label)
    return kept


def _groups(label: _Label, count: int) -> list[range]:
    ends = [count]
    rest: _Label | None = label
    while rest is not None and rest[3] is not None:
        ends.append(rest[2])
        rest = rest[3]
    return [range(first, end) for first, end in pairwise(reversed(ends))]


def _costs(profile: ChainProfile, first: int, end: int) -> list[tuple[float, float]]:
    """(sum of weights, replay seconds per step) of the groups ``range(first, e)``, for e = first + 1 ... end."""
    found = []
    weight = total = longest = 0.0
    for i in range(first, end):
        machine = profile.machines[i]
        if i > first and profile.link_bytes_per_s is not None:
            link = profile.boundary_bytes[i - 1] / profile.link_bytes_per_s
            total += link
            longest = max(longest, link)
        weight += machine.weight
        total += machine.compute_s * machine.stages
        longest = max(longest, machine.compute_s)
        found.append((weight, (total + (profile.micro_batches - 1) * longest) / profile.micro_batches))
    return found


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _number(name: str, value: Any, positive: bool = False) -> None:
    good = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    if not good or value < 0 or (positive and value == 0):
        raise ConfigError(f"{name} must be a finite number {'above 0' if positive else 'of at least 0'}, got {value!r}")
