"""Faults as data: which rank is struck, at which step and point of the program, and how."""

from __future__ import annotations

import difflib
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shared_core.errors import ConfigError
from shared_core.kinds import LONGEST_S
from shared_core.plain_json import parse

#: Ways in which a worker can be struck; ``SIGSTOP`` freezes it without ending it.
KINDS: tuple[str, ...] = ("SIGKILL", "SIGSTOP", "SIGTERM", "os._exit", "exception", "segfault")

#: What the system can refuse, as the names of its error numbers: the point raises that ``OSError``. Nobody fails.
REFUSALS: tuple[str, ...] = ("ENOSPC", "EROFS", "EIO", "EAGAIN", "ENOMEM", "EMFILE")

#: Places in a worker's life where the core looks for a fault.
POINTS: tuple[str, ...] = (
    "startup",
    "join",
    # A hot standby: it has made the process group; it waits for the place of its rank.
    "spare.prepares",
    "spare.waits",
    # A call of the trainer (fit, validate, test, predict) begins.
    "entry",
    "step_boundary",
    "forward",
    "collective.before",
    "collective.after",
    "bucket",
    "clip",
    "update.before",
    "update.during",
    "update.after",
    # Places of a test's own script, in what it changes outside updates.
    "outside",
    "validation",
    "checkpoint.write",
    # Before each file operation of a snapshot in memory (in the worker), and of the folder it lies in.
    "checkpoint.stage",
    # Before each file operation on storage (in the writer): any of them; those of a manifest begin at the next, and
    # end at the one after it; a checkpoint is removed.
    "checkpoint.file",
    "checkpoint.manifest",
    "checkpoint.committed",
    "checkpoint.prune",
    "recovery.severed",
    "recovery.frontier",
    # All have said where they stand, and this one is to compute the plan for all.
    "recovery.deciding",
    # Others know where this worker listens, and connect to it.
    "recovery.connecting",
    "recovery.connected",
    # A replacement has said which part of its state this worker gives it; others give theirs.
    "recovery.giving",
    "recovery.exchanged",
    "recovery.installed",
    # A survivor has sent one more message from its log on disk to a replacement that replays.
    "recovery.streamed",
    # A survivor has computed its share of a step that others replay, and hands it back.
    "replay.helped",
    "resize.severed",
    "resize.cut",
    # on_failure="reroute": before a survivor group is connected, before a wait in it, before survivors and replacements
    # meet, after they have agreed that replacements are in, and a replacement that asks to be admitted.
    "survivor_group.connect",
    "survivor_group.send",
    "survivor_group.wait",
    "survivor_group.admit",
    "survivor_group.agreed",
    "survivor_group.join_request",
    # A copy of the state that is made while the others train: before each message, in the worker that gives it, and
    # behind each in the replacement.
    "copy.give",
    "copy.take",
    # Before a thread is started that peers depend on, a device of gloo is opened, a publication is written, the log in
    # memory is moved to disk.
    "thread",
    "device",
    "publish",
    "spill",
    # Instructions of a pipeline's schedule, before each: any of them, or those of one kind.
    "pipe.instruction",
    "pipe.load",
    "pipe.forward",
    "pipe.backward",
    "pipe.send_activation",
    "pipe.recv_activation",
    "pipe.send_grad",
    "pipe.recv_grad",
    "pipe.reduce_tied",
    "pipe.reduce",
    "pipe.step",
    # Actions of a plan of re-routing, before each: any of them, or those of one kind.
    "reroute.action",
    "reroute.forward",
    "reroute.backward",
    "reroute.backward_input",
    "reroute.backward_weight",
    "reroute.reduce",
    "reroute.step",
    # Moves between stages: before state is given; at all workers, before and after that.
    "reroute.give",
    "reroute.move",
    # An evaluation of a pipeline: before each forward; before all tell each other its losses.
    "reroute.evaluate",
    "reroute.evaluated",
    # New times are proposed to this worker; it, which decides on them, tells one more worker that they hold; they hold.
    "reroute.proposed",
    "reroute.switching",
    "reroute.switched",
)

#: Value of ``Fault.step`` that matches every step; recoveries have no step of their own.
ANY_STEP = -1

#: Status of a worker struck by ``os._exit``.
EXIT_CODE = 17

#: Kinds that cannot come from a timer thread, because they act on the thread that meets the point.
_NEEDS_THE_THREAD = frozenset({"exception", *REFUSALS})


@dataclass(frozen=True)
class Fault:
    """One fault. It strikes at most once in a job.

    Attributes:
        rank: logical rank that is struck.
        step: step boundaries the rank has passed when it is struck: 0 before the first batch, 1 in the first batch,
            :data:`ANY_STEP` (-1) at any time (``recovery.*``: from the first batch on).
        point: one of :data:`POINTS`.
        kind: one of :data:`KINDS` or :data:`REFUSALS`.
        nth: which occurrence of the point since the last step boundary, from 1; for ``update.during`` which tensor
            operation inside the optimizer update.
        incarnation: which worker of the rank: 0 the first, 1 its first replacement, and so on.
        delay_s: strike so many seconds after the point is met, wherever the worker is by then.
        after: place in the job's list of a fault that must have struck before: the worker waits for it at the point.

    Raises ConfigError for a value out of range, with what is allowed.
    """

    rank: int
    step: int
    point: str
    kind: str
    nth: int = 1
    incarnation: int = 0
    delay_s: float = 0.0
    after: int | None = None

    def __post_init__(self) -> None:
        least = {"rank": 0, "step": ANY_STEP, "nth": 1, "incarnation": 0} | ({} if self.after is None else {"after": 0})
        for name in least:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"fault: {name} must be an int, got {value!r}")
        _one_of("point", self.point, POINTS)
        _one_of("kind", self.kind, KINDS + REFUSALS)
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"fault: {name} must be at least {bound}, got {getattr(self, name)}")
        number = isinstance(self.delay_s, int | float) and not isinstance(self.delay_s, bool)
        if not number or not 0 <= self.delay_s <= LONGEST_S:
            raise ConfigError(f"fault: delay_s must be a number of seconds, not negative, got {self.delay_s!r}")
        if self.delay_s and self.kind in _NEEDS_THE_THREAD:
            raise ConfigError(f"fault: kind {self.kind!r} strikes at its point only; remove delay_s={self.delay_s}")
        if self.point == "step_boundary" and self.nth != 1:
            raise ConfigError(f"fault: a step has one step_boundary, so nth must be 1, got {self.nth}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fault:
        """Build from plain data; ConfigError for an unknown, missing or bad field."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"a fault must be a mapping of fields, got {values!r}")
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(sorted(known))}"
                raise ConfigError(f"fault: unknown field {name!r}; {hint}")
        missing = [name for name in ("rank", "step", "point", "kind") if name not in values]
        if missing:
            raise ConfigError(f"fault: missing {', '.join(missing)} in {dict(values)!r}")
        return cls(**values)

    def __str__(self) -> str:
        when = "any step" if self.step == ANY_STEP else f"step {self.step}"
        nth = f" #{self.nth}" if self.nth > 1 else ""
        inc = f" incarnation {self.incarnation}" if self.incarnation else ""
        late = f" +{self.delay_s}s" if self.delay_s else ""
        after = f", after fault {self.after}" if self.after is not None else ""
        return f"{self.kind} of rank {self.rank}{inc} at {self.point}{nth}, {when}{late}{after}"


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value in allowed:
        return
    close = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"one of {', '.join(allowed)}"
    raise ConfigError(f"fault: unknown {name} {value!r}; {hint}")


def dumps(faults: Iterable[Fault]) -> str:
    """A JSON list of faults, as a file for ``swiftrun --faults`` holds it."""
    return json.dumps([fault.to_dict() for fault in faults])


def loads(text: str) -> list[Fault]:
    """Inverse of :func:`dumps`. Raises ConfigError where the text is not a JSON list of faults."""
    try:
        raw = parse(text)
    except ValueError as error:
        raise ConfigError(f"faults must be a JSON list of objects: {error}") from error
    if not isinstance(raw, list):
        raise ConfigError(f"faults must be a JSON list of objects, got {type(raw).__name__}")
    return [Fault.from_dict(item) for item in raw]


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
    for name in points:
        _one_of("point", name, POINTS)
    for name in kinds:
        _one_of("kind", name, KINDS)
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
