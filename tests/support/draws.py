"""What a soak does to its jobs: faults drawn from a seed, so that each leaves the job a way to continue."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shared_core.errors import ConfigError
from shared_core.faults.spec import ANY_STEP, FLIP_VALUE, FLIPS, KINDS, POINTS, SLOW, Fault

MODELS = ("mlp", "gan", "bn", "plain", "accelerate", "averages", "by-hand")
#: Plain loops that change parameters outside updates.
OUTSIDE = ("averages", "by-hand")
#: A plain loop in which bits flip, too: replicas are compared, and batches computed again, at each update.
CORRUPTED = "corrupted"
#: Those in which workers also leave as planned, or are slow, each in so many of the runs.
DRAINED, _BESIDES = ("plain", "accelerate"), 0.3
#: Pipelines by name, with their stages; stages without replicas are rebuilt from logs.
PIPELINES = {
    "pipeline-2x2": 2,
    "pipeline-1x4": 4,
    "rerouted-2x2": 2,
    "rerouted-3x2": 2,
    "shared-3x2": 2,
    "moved-3x2": 2,
    "machines-3x2": 2,
}
#: Sharded models by name, with the replicas of each shard; ZeRO's with its stage.
SHARDED = {"fsdp2": 1, "hsdp": 2, "zero3": 1}
ZERO = {"zero3": 3}
#: Those that continue without failed workers, with their ranks.
REROUTED = {"rerouted-2x2": 4, "rerouted-3x2": 6, "shared-3x2": 6, "moved-3x2": 6, "machines-3x2": 6}
#: Those that run on so many machines, with as many workers each.
ON_MACHINES = {"machines-3x2": 3}
STEPS = 14
#: Faults are drawn for these steps, so that the last ones end without.
LAST_STRUCK = STEPS - 2
#: Step boundaries of the pipelines' job that train (each fourth evaluates), and those with a checkpoint.
PIPE_BOUNDARIES, CHECKPOINTS = (1, 2, 3, 5, 6, 7, 9, 10, 11, 13), 3
#: Share of the runs of re-routed pipelines with a failure while a replacement copies the state, and while one is let
#: in.
COPIED, ADMITTED = 0.25, 0.2

_COMMON = (
    "step_boundary",
    "forward",
    "collective.before",
    "collective.after",
    "bucket",
    "update.before",
    "update.during",
    "update.after",
    "validation",
    "join",
    "recovery.severed",
    "recovery.frontier",
    "recovery.connected",
    "recovery.giving",
    "recovery.exchanged",
    "recovery.installed",
)
#: Highest occurrence of a point in one batch of each model, kept low enough that most draws are met.
_NTH: dict[str, dict[str, int]] = {
    "mlp": {"collective.before": 4, "collective.after": 4, "bucket": 2, "update.during": 40},
    "plain": {"collective.before": 5, "collective.after": 5, "bucket": 2, "update.during": 40},
    "bn": {"collective.before": 5, "collective.after": 5, "bucket": 2, "update.during": 40},
    "accelerate": {"collective.before": 3, "collective.after": 3, "bucket": 2, "update.during": 40},
    "averages": {"forward": 2, "collective.before": 4, "collective.after": 4, "bucket": 2, "update.during": 40}
    | {"outside": 17},
    "by-hand": {"forward": 2, "collective.before": 4, "collective.after": 4, "bucket": 2, "update.during": 40}
    | {"outside": 10},
    # Four groups of parameters: gathered four times in forward, three times in backward, reduced, and a sum of norms.
    "fsdp2": {"collective.before": 12, "collective.after": 12, "update.during": 40},
    "hsdp": {"collective.before": 16, "collective.after": 16, "update.during": 40},
    "zero3": {"collective.before": 20, "collective.after": 20, "update.during": 10},
    "gan": {
        "collective.before": 6,
        "collective.after": 6,
        "bucket": 4,
        "update.before": 2,
        "update.during": 60,
        "update.after": 2,
    },
}
#: Where state may flip, and where what a worker computes, with its lowest and highest occurrence in one batch: the
#: first two collectives are those of buffers.
_STATE_FLIPS = {"step_boundary": (1, 1), "forward": (1, 1), "bucket": (1, 2), "update.before": (1, 1)}
_VALUE_FLIPS = {"forward.before": (1, 1), "forward": (1, 1), "collective.before": (3, 4)}
#: Batches after which the job of a model validates.
_VALIDATED = {"accelerate": (7,)}
_VALIDATED_BY_LIGHTNING = (3, 6, 10, 13)
#: Points of a pipeline, with their highest occurrence in one batch at every stage.
_PIPE: dict[str, int] = {
    "step_boundary": 1,
    "pipe.instruction": 15,
    "pipe.forward": 4,
    "pipe.backward": 4,
    "pipe.reduce_tied": 1,
    "pipe.reduce": 1,
    "pipe.step": 1,
    "collective.before": 2,
    "collective.after": 2,
    "update.before": 1,
    "update.during": 20,
    "update.after": 1,
}
_PIPE_RECOVERY = tuple(name for name in _COMMON if name.startswith("recovery.")) + ("recovery.streamed",)
#: Points of a re-routed pipeline, with their highest occurrence in one batch that trains, or evaluates.
_REROUTED_TRAINS: dict[str, int] = {
    "step_boundary": 1,
    "reroute.action": 8,
    "survivor_group.send": 8,
    "reroute.reduce": 1,
    "reroute.step": 1,
    "update.before": 1,
    "update.during": 20,
    "update.after": 1,
}
_REROUTED_EVALUATES: dict[str, int] = {"step_boundary": 1, "reroute.evaluate": 4, "reroute.evaluated": 1}
#: Points at which a survivor, and a replacement, passes when replacements are admitted.
_ADMITS = ("survivor_group.admit", "recovery.connected", "recovery.exchanged", "recovery.installed")
_COMES_IN = ("survivor_group.join_request", "recovery.connected", "recovery.exchanged", "recovery.installed")


class Cut(NamedTuple):
    """A machine that fails.

    Attributes:
        ranks: of its workers.
        boundary: when rank 0 has passed so many step boundaries.
        later_s: and so many seconds have gone by.
    """

    ranks: tuple[int, ...]
    boundary: int
    later_s: float

    def __str__(self) -> str:
        return (
            f"the machine of ranks {' and '.join(map(str, self.ranks))}, {self.later_s:.2f} s after boundary "
            f"{self.boundary}"
        )


@dataclass(frozen=True)
class Run:
    """One run of the soak: which model, and what happens in it.

    Attributes:
        copies: where workers wait until replacements have begun to copy the state; see :mod:`.copies`.
        cut: a machine that fails besides.
        drained: who asks when that which rank leaves; see :data:`tests.support.report.DRAIN`.
    """

    number: int
    model: str
    faults: tuple[Fault, ...]
    copies: str = ""
    cut: Cut | None = None
    drained: Mapping[str, str] = field(default_factory=dict)

    @property
    def strikes(self) -> int:
        """Faults, a failed machine included."""
        return len(self.faults) + (self.cut is not None)

    def __str__(self) -> str:
        leaves = [f"rank {rank} leaves ({place})" for place, rank in self.drained.items()]
        return "; ".join(str(each) for each in (*self.faults, self.cut, *leaves) if each is not None)


def plan(
    seed: int, number: int, models: Sequence[str], world_size: int, points: Sequence[str] | None, kinds: Sequence[str]
) -> Run:
    """Run ``number`` of a soak, a function of its arguments only."""
    model = models[number % len(models)]
    rng = random.Random(f"{seed}/{number}")
    if model in ON_MACHINES:
        return _machine_failed(rng, number, model, kinds)
    if model == "moved-3x2":
        return Run(number, model, _moves(rng, model, kinds))
    if model == "shared-3x2":  # nobody waits for replacements
        return Run(number, model, _rerouted(rng, model, kinds))
    if model in REROUTED:
        what = rng.random()
        if what < COPIED:
            return Run(number, model, *_in_a_copy(rng, model, kinds))
        draw = _when_admitted if what < COPIED + ADMITTED else _rerouted
        return Run(number, model, draw(rng, model, kinds))
    if model in PIPELINES:
        return Run(number, model, _pipeline(rng, model, world_size, kinds))
    if model == CORRUPTED:
        return Run(number, model, _corrupted(rng, world_size, kinds))
    count = rng.choice([1, 1, 2, 2, 3])
    chosen = tuple(points or _points(model))
    count = count if world_size > 2 else 1
    faults = random_faults(
        f"{seed}/{number}/faults",
        count,
        world_size,
        LAST_STRUCK,
        chosen,
        kinds,
        max_nth=_NTH[model],
        only={"validation": _VALIDATED.get(model, _VALIDATED_BY_LIGHTNING)},
    )
    if model not in DRAINED:
        return Run(number, model, tuple(faults))
    besides = random.Random(f"{seed}/{number}/besides")
    stay = sorted({*range(world_size)} - {fault.rank for fault in faults})
    if stay and besides.random() < _BESIDES:
        faults.append(Fault(besides.choice(stay), besides.randint(1, LAST_STRUCK), "forward", SLOW))
    if besides.random() >= _BESIDES:
        return Run(number, model, tuple(faults))
    asks, batch, leaves = besides.randrange(world_size), besides.randint(1, LAST_STRUCK), besides.randrange(world_size)
    return Run(number, model, tuple(faults), drained={f"{asks}:{batch}": str(leaves)})


def _points(model: str) -> tuple[str, ...]:
    """Points that the job of a model meets."""
    if model == "plain":  # plain loops have neither
        return tuple(name for name in _COMMON if name != "validation")
    if model in SHARDED:  # nobody gives a replacement its shard
        return tuple(name for name in _COMMON if name not in ("validation", "bucket", "recovery.giving"))
    if model in OUTSIDE:
        return (*(name for name in _COMMON if name != "validation"), "outside", "outside", "outside")
    return _COMMON if model == "gan" else (*_COMMON, "clip")


def _corrupted(rng: random.Random, world_size: int, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """One to three flips and failures, apart. The first batches are not computed again, and have no optimizer state."""
    earlier, faults = Counter[int](), list[Fault]()
    for step in sorted(rng.sample(range(4, LAST_STRUCK, 2), rng.randint(1, 3))):
        rank, kind = rng.randrange(world_size), rng.choice((FLIP_VALUE, FLIP_VALUE, *FLIPS, rng.choice(list(kinds))))
        points = _VALUE_FLIPS if kind == FLIP_VALUE else _STATE_FLIPS
        point = rng.choice(sorted(points))
        nth, bit = rng.randint(*points[point]), rng.getrandbits(24)
        faults.append(Fault(rank, step, point, kind, nth, earlier[rank], bit=bit))
        earlier[rank] += 1
    return tuple(faults)


def _pipeline(rng: random.Random, model: str, world_size: int, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """One to three faults: apart, of neighbours at once, or one and more in the recovery from it."""
    how = rng.choice(("one", "apart", "at once", "replay", "recovery"))

    def draw(rank: int, step: int, incarnation: int = 0) -> Fault:
        points = dict(_PIPE)
        if PIPELINES[model] == world_size and step % CHECKPOINTS == 0:
            points["checkpoint.write"] = 1
        point = rng.choice(sorted(points))
        # The same exception at the same place a second time ends a job.
        kind = rng.choice([each for each in kinds if not incarnation or each != "exception"])
        return Fault(rank, step, point, kind, rng.randint(1, points[point]), incarnation)

    rank, place = rng.randrange(world_size), rng.randrange(len(PIPE_BOUNDARIES))
    step = PIPE_BOUNDARIES[place]
    first = draw(rank, step)
    if how == "apart":
        # Ranks are a batch apart at most, so these are two recoveries.
        other, later = rng.randrange(world_size), PIPE_BOUNDARIES[min(place + 3, len(PIPE_BOUNDARIES) - 1)]
        return (first,) if later - step < 3 else (first, draw(other, later, int(other == rank)))
    if how == "at once":
        count = rng.choice((2, 2, 3))
        start = rng.randrange(world_size - count + 1)
        return tuple(draw(each, step) for each in range(start, start + count))
    if how == "replay":
        # A replacement from a checkpoint passes earlier batches again, any other one only the batch of the failure.
        earliest = step // CHECKPOINTS * CHECKPOINTS if PIPELINES[model] == world_size else step
        again = [boundary for boundary in PIPE_BOUNDARIES if max(1, earliest) <= boundary <= step]
        return first, draw(rank, rng.choice(again), 1)
    if how == "recovery":
        other = rng.choice([each for each in range(world_size) if each != rank])
        point = rng.choice(_PIPE_RECOVERY if PIPELINES[model] == world_size else _PIPE_RECOVERY[:-1])
        return first, Fault(other, ANY_STEP, point, _of_no_code(rng, kinds))
    return (first,)


# -- pipelines that continue without failed workers: each stage keeps a replica ---------------------------------------


def _of_no_code(rng: random.Random, kinds: Sequence[str]) -> str:
    """A kind of fault for where no code of the user's runs."""
    return rng.choice([each for each in kinds if each != "exception"])


def _in_a_batch(rng: random.Random, rank: int, step: int, kinds: Sequence[str]) -> Fault:
    points = _REROUTED_TRAINS if step in PIPE_BOUNDARIES else _REROUTED_EVALUATES
    point = rng.choice(sorted(points))
    return Fault(rank, step, point, rng.choice(list(kinds)), rng.randint(1, points[point]))


def _rerouted(rng: random.Random, model: str, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """Failures at once or up to two batches apart, often of both ends of a pipeline, or of two workers of a stage."""
    world, stages = REROUTED[model], PIPELINES[model]
    pipelines = world // stages
    home = rng.randrange(pipelines)
    ranks = [home, (stages - 1) * pipelines + home]
    if rng.random() < 0.3:
        ranks = [rng.randrange(pipelines) + stage * pipelines for stage in rng.sample(range(stages), rng.randint(1, 2))]
    if pipelines > 2 and rng.random() < 0.5:
        ranks.append(rng.choice([rank for rank in range(pipelines) if rank not in ranks]))
    step, apart, found = rng.randint(2, LAST_STRUCK - 2), rng.choice((0, 0, 1, 2)), list[Fault]()
    for rank in ranks:
        found.append(_in_a_batch(rng, rank, step + (rng.randint(0, apart) if found else 0), kinds))
    return tuple(found)


def _in_a_copy(rng: random.Random, model: str, kinds: Sequence[str]) -> tuple[tuple[Fault, ...], str]:
    """A failure, and another one while its replacement copies the state and the others train: of the replacement, of
    the worker that gives it the state, or of another one. The others wait at a later step for the copy to begin.
    """
    world, pipelines = REROUTED[model], REROUTED[model] // PIPELINES[model]
    rank, place = rng.randrange(world), rng.randrange(1, 5)  # before the first batch replacements are waited for
    peers = [each for each in range(world) if each // pipelines == rank // pipelines and each != rank]
    others = [each for each in range(world) if each != rank and (pipelines > 2 or each not in peers)]
    whose = rng.choice(("replacement", "giver", "other") if pipelines > 2 else ("replacement", "other"))
    first = _in_a_batch(rng, rank, PIPE_BOUNDARIES[place], kinds)
    kind = _of_no_code(rng, kinds)
    if whose == "other":
        second = _in_a_batch(rng, rng.choice(others), PIPE_BOUNDARIES[place + 2], kinds)
    elif whose == "giver":
        second = Fault(min(peers), ANY_STEP, "copy.give", kind)
    else:
        # At the first message: more come only if the others still train, and they may wait by then.
        second = Fault(rank, ANY_STEP, "copy.take", kind, incarnation=1)
    return (first, second), f"{place + 2}:{2 if whose == 'replacement' else 1}"


def _when_admitted(rng: random.Random, model: str, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """Both ends of a pipeline fail, so that the others wait for a replacement; and one more when replacements are
    admitted: one of these, or of the others.
    """
    world, pipelines = REROUTED[model], REROUTED[model] // PIPELINES[model]
    home, step = rng.randrange(pipelines), rng.choice(PIPE_BOUNDARIES[1:-3])
    ends = [home, world - pipelines + home]
    others = [rank for rank in range(world) if rank not in ends] if pipelines > 2 else []
    if others and rng.random() < 0.5:
        third = Fault(rng.choice(others), ANY_STEP, rng.choice(_ADMITS), _of_no_code(rng, kinds))
    else:
        third = Fault(rng.choice(ends), ANY_STEP, rng.choice(_COMES_IN), _of_no_code(rng, kinds), incarnation=1)
    return (*(_in_a_batch(rng, rank, step, kinds) for rank in ends), third)


def _moves(rng: random.Random, model: str, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """Two workers of a stage fail, so that one of the other stage moves there; often another one of that stage,
    while it moves or later.
    """
    pipelines = REROUTED[model] // PIPELINES[model]
    stage, step = rng.randrange(2), rng.choice((5, 6))
    first = stage * pipelines
    found = [_in_a_batch(rng, first + place, step, kinds) for place in rng.sample(range(pipelines), 2)]
    other, what = (1 - stage) * pipelines + rng.randrange(pipelines), rng.random()
    if what < 0.3:
        found.append(Fault(other, ANY_STEP, "reroute.move", _of_no_code(rng, kinds), rng.randint(1, 2)))
    elif what < 0.6:
        found.append(_in_a_batch(rng, other, rng.choice((10, 11)), kinds))
    return tuple(found)


def _machine_failed(rng: random.Random, number: int, model: str, kinds: Sequence[str]) -> Run:
    """A machine fails, but not the one with the store; often a worker of another one, too."""
    world, pipelines = REROUTED[model], REROUTED[model] // PIPELINES[model]
    each = world // ON_MACHINES[model]
    place = rng.randrange(1, ON_MACHINES[model])
    ranks = tuple(range(place * each, (place + 1) * each))
    faults: tuple[Fault, ...] = ()
    if rng.random() < 0.5:
        left = [rank for rank in range(world) if rank not in ranks]
        stages = [rank // pipelines for rank in left]
        other = rng.choice([rank for rank in left if stages.count(rank // pipelines) > 1])
        faults = (_in_a_batch(rng, other, rng.randint(2, LAST_STRUCK - 2), kinds),)
    return Run(number, model, faults, cut=Cut(ranks, rng.randint(2, 8), round(rng.uniform(0.0, 0.3), 2)))


def random_faults(
    seed: int | str,
    n: int,
    world_size: int,
    steps: int,
    points: Sequence[str] = ("forward", "collective.before", "collective.after", "bucket", "update.during"),
    kinds: Sequence[str] = KINDS,
    max_nth: Mapping[str, int] | None = None,
    only: Mapping[str, Sequence[int]] | None = None,
) -> list[Fault]:
    """``n`` faults drawn from a seed, in order of their steps; the same arguments give the same faults.

    No rank is struck twice within neighboring steps, at least one rank is left unstruck there, and a rank struck again
    later is struck in its next incarnation. Faults in a recovery match any step and are drawn only beside a fault that
    causes one: ``recovery.*`` strikes a survivor, ``join`` and ``startup`` the replacement.

    Args:
        seed: anything :class:`random.Random` takes.
        steps: steps 1 to ``steps`` are struck.
        max_nth: highest ``nth`` of a point; 1 where not given.
        only: steps in which a point occurs; all where not given.

    Raises ConfigError if ``n`` faults cannot be placed.
    """
    if n < 0 or steps < 1 or world_size < 2 or not points or not kinds:
        raise ConfigError(f"cannot draw {n} faults for {world_size} ranks, {steps} steps, {points!r}, {kinds!r}")
    if not {*points} <= {*POINTS} or not {*kinds} <= {*KINDS}:
        raise ConfigError(f"unknown points or kinds among {points!r}, {kinds!r}")
    causes = [name for name in points if not _in_recovery(name)]
    if not causes and n:
        raise ConfigError(f"faults at {', '.join(points)} need another that causes a recovery; add a point outside it")
    rng = random.Random(seed)
    drawn: list[Fault] = []
    for _ in range(1000 * max(n, 1)):
        if len(drawn) == n:
            break
        point = rng.choice(list(points) if drawn else causes)
        kind, nth = rng.choice(list(kinds)), rng.randint(1, (max_nth or {}).get(point, 1))
        rank = rng.randrange(world_size)
        if _in_recovery(point):
            candidate = _second(rng.choice(drawn), drawn, rank, point, kind, nth)
            if kind == "exception" and point.startswith("recovery."):
                candidate = None  # no code of the user's runs there that could raise
        else:
            step = rng.choice([s for s in (only or {}).get(point, range(1, steps + 1)) if 1 <= s <= steps] or [0])
            candidate = Fault(rank, step, point, kind, nth) if step else None
        if candidate is not None and _fits(candidate, drawn, world_size):
            drawn.append(candidate)
    if len(drawn) < n:
        raise ConfigError(f"only {len(drawn)} of {n} faults fit into {steps} steps of {world_size} ranks")
    drawn.sort(key=lambda f: (f.step == ANY_STEP, f.step, f.rank))
    earlier: Counter[int] = Counter()
    result = []
    for fault in drawn:
        result.append(replace(fault, incarnation=earlier[fault.rank]))
        earlier[fault.rank] += 1
    return result


def _in_recovery(point: str) -> bool:
    return point.startswith("recovery.") or point in ("join", "startup")


def _second(cause: Fault, drawn: Sequence[Fault], rank: int, point: str, kind: str, nth: int) -> Fault | None:
    """A fault during the recovery that ``cause`` brings about; None if ``cause`` does not serve."""
    if cause.step == ANY_STEP:
        return None
    if point.startswith("recovery."):
        # A survivor; one that is struck at another time too might meet the wrong recovery.
        return None if any(f.rank == rank for f in drawn) else Fault(rank, ANY_STEP, point, kind, nth)
    if sum(f.rank == cause.rank for f in drawn) > 1:
        return None
    return Fault(cause.rank, ANY_STEP, point, kind, nth, incarnation=1)


def _fits(fault: Fault, drawn: Sequence[Fault], world_size: int) -> bool:
    """Whether every rank is struck once at most, and not all are, around each step."""
    if fault.incarnation:
        return True  # the replacement of a rank that fails already
    anytime = [f for f in drawn if f.step == ANY_STEP and not f.incarnation]
    if fault.step == ANY_STEP:
        return len({f.rank for f in drawn} | {fault.rank}) < world_size
    # A rank may be a batch ahead of another when the failure of a third is seen: neighbouring steps count as one.
    near = [f for f in drawn if abs(f.step - fault.step) <= 1 and f.step != ANY_STEP] + anytime
    if any(f.rank == fault.rank for f in drawn if f.step == ANY_STEP):
        return False
    return all(f.rank != fault.rank for f in near) and len({f.rank for f in near}) + 1 < world_size
