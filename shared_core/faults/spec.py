"""Faults as data: which rank is struck, at which step and point of the program, and how."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from shared_core.errors import ConfigError
from shared_core.kinds import LONGEST_S
from shared_core.plain_json import parse

#: Ways in which a worker can be struck; ``SIGSTOP`` freezes it without ending it.
KINDS: tuple[str, ...] = ("SIGKILL", "SIGSTOP", "SIGTERM", "os._exit", "exception", "segfault")

#: What the system can refuse, as the names of its error numbers: the point raises that ``OSError``. Nobody fails.
REFUSALS: tuple[str, ...] = ("ENOSPC", "EROFS", "EIO", "EAGAIN", "ENOMEM", "EMFILE")

#: Memory that fails in silence: one bit flips, of a parameter or of optimizer state. Nobody fails.
FLIPS: tuple[str, ...] = ("flip.parameter", "flip.optimizer")
#: One bit of what the program has at the point flips: its batch (``forward.before``), the model's output (``forward``),
#: what it gives to a collective or has got from it (``collective.before`` and ``after``). Nobody fails.
FLIP_VALUE = "flip.value"
#: The worker shares its core with busy loops from now on. Nobody fails.
SLOW = "slow"

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
    # A worker that was told to leave has published the step boundary where it does.
    "leave",
    "forward.before",
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
_NEEDS_THE_THREAD = frozenset({"exception", *REFUSALS, *FLIPS, FLIP_VALUE})


@dataclass(frozen=True)
class Fault:
    """One fault. It strikes at most once in a job.

    Attributes:
        step: step boundaries the rank has passed when it is struck: 0 before the first batch, 1 in the first batch,
            :data:`ANY_STEP` (-1) at any time (``recovery.*``: from the first batch on).
        point: one of :data:`POINTS`.
        kind: one of :data:`KINDS`, :data:`REFUSALS` or :data:`FLIPS`, :data:`FLIP_VALUE` or :data:`SLOW`.
        nth: which occurrence of the point since the last step boundary, from 1; for ``update.during`` which tensor
            operation inside the optimizer update.
        incarnation: which worker of the rank: 0 the first, 1 its first replacement, and so on.
        delay_s: strike so many seconds after the point is met, wherever the worker is by then.
        after: place in the job's list of a fault that must have struck before: the worker waits for it at the point.
        bit: which one flips, see :func:`shared_core.worker.integrity.flip`.

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
    bit: int = 0

    def __post_init__(self) -> None:
        least = {"rank": 0, "step": ANY_STEP, "nth": 1, "incarnation": 0, "bit": 0} | (
            {} if self.after is None else {"after": 0}
        )
        for name in least:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"fault: {name} must be an int, got {value!r}")
        _one_of("point", self.point, POINTS)
        _one_of("kind", self.kind, (*KINDS, *REFUSALS, *FLIPS, FLIP_VALUE, SLOW))
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
