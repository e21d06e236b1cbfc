"""Training loops that the user writes: what a script says of them, how far they are, and the way of a replacement to
the failed worker's place.

A replacement runs the script from its start. Its loop over epochs begins with the failed worker's epoch, and the first
batch that the replacement asks a training loader for is the failed worker's: there it joins.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shared_core.config import SwiftConfig
from shared_core.encoding.attributes import Holders
from shared_core.encoding.plain import dumps, loads
from shared_core.encoding.values import NotPlain, assign, decode, encode, holds_weights
from shared_core.errors import ConfigError, Unsupported
from shared_core.events import console_once
from shared_core.handover import warn_plain_torchrun_once, warn_srun_once
from shared_core.job import Job, current_job, install
from shared_core.loaders import Loaders, read_random, write_random
from shared_core.sharing import SharedStep, StepSharing, shared_steps
from shared_core.untrained import TrainedUse, UntrainedUse
from shared_core.worker import link
from shared_core.worker.sharded.own import Owner
from shared_core.worker.variables.around import Place, Walks, calls_for_item, is_bare, places
from shared_core.worker.variables.kinds import OURS, count_as_script, root_of
from shared_core.worker.variables.variables import Variables

#: End of the names of entries for attributes that a ``state_dict`` does not hold.
_BESIDE = " beside"
_OF_MODULES = frozenset(vars(nn.Module()))


class Registered:
    """Objects and counters that a script has registered, in the order in which it did."""

    def __init__(self) -> None:
        self._all: dict[str, Any] = {}
        self._beside: dict[str, Holders] = {}
        self._counters: dict[str, SimpleNamespace] = {}

    def add(self, objects: tuple[Any, ...], values: Mapping[str, Any]) -> tuple[SimpleNamespace, bool]:
        """Register objects and counters: the counters' namespace, and whether an object holds weights."""
        counters = SimpleNamespace(**values)
        weigh = False
        for each in (*objects, *([counters] if values else [])):
            if not hasattr(each, "__dict__") and not hasattr(each, "state_dict"):
                raise ConfigError(
                    f"register() got a {type(each).__name__}, which has no state that could be put back: pass it by "
                    "name, as in counters = job.register(total=0.0)"
                )
            name = f"{len(self._all)} {type(each).__name__}"
            self._all[name] = each
            if hasattr(each, "state_dict") and (beside := _beside(each)):
                self._beside[name + _BESIDE] = Holders(beside, _OF_MODULES | _held_by(each))
            weighs = holds_weights(each)
            if each is counters and not weighs:
                self._counters[name] = counters
            weigh = weigh or weighs
        return counters, weigh

    def capture(self) -> dict[str, Any]:
        """The state of all, encoded; raises ConfigError where an object holds what cannot be published."""
        found = {name: _capture(name, each) for name, each in self._all.items()}
        return found | {name: holders.capture() for name, holders in self._beside.items()}

    def restore(self, found: Mapping[str, Any]) -> None:
        """Put back what :meth:`capture` has returned; objects that it does not hold stay."""
        for name, each in self._all.items():
            if name in found:
                _restore(each, found[name])
        for name, holders in self._beside.items():
            if name in found:
                holders.restore(found[name])

    def capture_counters(self) -> dict[str, Any]:
        """The state of the counters alone, without those that hold weights."""
        return {name: _capture(name, each) for name, each in self._counters.items()}

    def restore_counters(self, found: Mapping[str, Any]) -> None:
        for name, values in found.items():
            if name in self._counters:
                _restore(self._counters[name], values)


def _capture(name: str, each: Any) -> Any:
    try:
        return encode(each.state_dict() if hasattr(each, "state_dict") else vars(each))
    except NotPlain as error:
        raise ConfigError(
            f"the registered object {name.split()[1]!r} holds a {error}, which cannot be published for a replacement: "
            "register plain data, or give it state_dict() and load_state_dict()"
        ) from error


def _restore(each: Any, data: Any) -> None:
    if hasattr(each, "load_state_dict"):
        each.load_state_dict(decode(data))
        return
    for name, value in decode(data).items():
        setattr(each, name, assign(getattr(each, name, None), encode(value)))


def _beside(each: Any) -> dict[str, object]:
    """Objects whose attributes the ``state_dict`` of ``each`` may not hold, as of metrics of torchmetrics."""
    parts = each.named_modules() if isinstance(each, nn.Module) else [("", each)]
    return {path: part for path, part in parts if hasattr(part, "__dict__") and root_of(type(part)) != "torch"}


def _held_by(each: Any) -> frozenset[str]:
    """Attributes that its ``state_dict`` holds under their names; none for modules."""
    if isinstance(each, nn.Module):
        return frozenset()
    state = each.state_dict()
    return frozenset(name for name in state if isinstance(name, str)) if isinstance(state, Mapping) else frozenset()


#: Passes of an epoch that a replacement may skip, with the random generators that the failed worker had after each.
_ANCHORS = 8
#: Finished loops over epochs, with the same.
_ENDS = 32
_PLACE, _LOADERS, _VALUES = "loop.place", "loop.loaders", "loop.values"

_SHARED_STEPS_ONLY = (
    "on_failure='reroute' needs a loop in which any worker can compute the share of a failed one: write 'for step in "
    "{}', or choose on_failure='replace'"
)
_SHARED_STEPS = {"job": "job.shared_steps(loader, epochs)", "plugin": "plugin.shared_steps(model, loader, epochs)"}

_NO_WAY_IN = (
    "rank {}: the failed worker was in pass {} over the data, and the script's own epoch loop cannot be entered in the "
    "middle: write 'for epoch in {}.epochs(n)'"
)

_UNMARKED = (
    "optimizer steps are made, but batches are not read through {}: a worker that replaces a failed one computes all "
    "of that again, from its first batch, while the others wait, and the log that it needs grows with each step. {}"
)
#: By the name of the loop: a loader that marks its batches, and what to do.
_MARKED = {
    "job": (
        "job.steps(loader)",
        "Write 'for step, batch in job.steps(loader):' in the place of 'enumerate(loader)', and 'for step, _ in "
        "job.steps(range(n)):' in the place of 'while True:'",
    ),
    "plugin": ("a prepared loader", "Give the loader to accelerator.prepare(), and read from what that returns"),
}
UNMARKED = {name: _UNMARKED.format(*words) for name, words in _MARKED.items()}

_SECOND_PASS = (
    "a second pass over the data begins, and the script counts its epochs itself: when a worker fails from here on, "
    "all start again, from the newest checkpoint if there is one. Write 'for epoch in {}.epochs(n):' and the failed "
    "one is replaced"
)

_GRADIENTS_OFF = (
    "job.steps(loader) is used with gradients off, as for an evaluation: if a worker fails in it, its replacement "
    "skips the batches that are done, and sums over them that are not registered are wrong. Evaluate with 'for batch "
    "in loader:', without job.steps"
)
_INFERENCE = (
    "job.steps(loader) is used under torch.inference_mode(), where a replacement cannot be given its state: evaluate "
    "with 'for batch in loader:', without job.steps"
)


_AROUND = "the loop at {} goes through {}, whose place cannot be given to another process"
_GIVE = (
    "Use the numbers that epochs() and steps() give, put what picks or joins batches inside, as in "
    "job.steps(zip(loader, other)), and train in a for statement; to take batches with next(), count in a variable "
    "(while k < n)"
)


_EARLIER_LOOP = (
    "rank {}: the failed worker was in loop number {} of this script, and attach() began one for each: what the loops "
    "before it have made cannot be had again without running them"
)
_ANOTHER_WAY = (
    "rank {}: the script has ended before it reached the place to begin from: it has gone another way than before, "
    "because something that it asks has another value. Ask nothing of the trained model before the first batch of an "
    "epoch"
)
_FROM_SCRATCH = "{}. Or start from scratch with checkpoint.resume='never'"
_LATER = "a worker that resumes here could not have what the loops of earlier attach() calls have made"
_BETWEEN = (
    "{} uses the model between two loops over epochs, and a worker that resumes in the second one would do so before "
    "it has the trained parameters. Evaluate after the last pass of an epoch, and checkpoints go on"
)
_NO_END = (
    "rank {}: the failed worker had finished a loop over {}.epochs() whose end is no longer kept: make fewer such "
    "loops, with more epochs"
)


class _Warnings:
    """Warns, once of each, of loops that a replacement cannot continue with as the script expects."""

    def __init__(self, unmarked: str) -> None:
        self._unmarked, self._told = unmarked, set[str]()
        self._boundaries = self._updates = self._rank = 0
        self._job: Job | None = None

    def begin(self, rank: int, job: Job | None) -> None:
        """``job``: None where nobody replaces a failed worker."""
        self._rank, self._job = rank, job

    def second_pass(self, message: str) -> None:
        if self._job is not None:
            self._tell("second pass", message)

    def unmarked(self) -> None:
        self._tell("unmarked", self._unmarked)

    def begins(self) -> None:
        """A pass begins. Raises Unsupported under ``torch.inference_mode()``."""
        if torch.is_inference_mode_enabled():
            raise Unsupported(_INFERENCE)
        if not torch.is_grad_enabled():
            self._tell("gradients", _GRADIENTS_OFF)

    def no_checkpoints(self, why: str) -> None:
        self._tell("no checkpoints", f"no checkpoints from here on: {why}")

    def epoch_ends(self) -> None:
        """Warn of an epoch with updates and no step boundary."""
        if self._job is None:
            return
        before, now = (self._boundaries, self._updates), (self._job.position.boundaries, self._job.updates.version)
        self._boundaries, self._updates = now
        if now[0] == before[0] and now[1] != before[1]:
            self.unmarked()

    def _tell(self, what: str, message: str) -> None:
        if what in self._told:
            return
        self._told.add(what)
        if self._rank == 0:
            console_once(what, message)
            if self._job is not None:
                self._job.reporter.emit("warning", message=message)


_COUNT_FIRST = "{0}.epochs({1}, {2}): the end of the range comes first, as in {0}.epochs({2}, start={1})"


class _Anchors:
    """What the script's own code depends on, besides the model, at the start of an epoch, after its last passes, and
    after the newest loops over epochs.

    Attributes:
        taken: packed, by number of passes in the epoch; 0 is its start.
        ends: the same at the ends of loops, by their phase.
    """

    def __init__(self, registered: Registered, loaders: Loaders, variables: Variables) -> None:
        self._registered, self._loaders, self._variables = registered, loaders, variables
        self.taken: dict[int, bytes] = {}
        self.ends: dict[int, bytes] = {}

    def take(self, passes: int) -> None:
        if passes == 0:
            self.taken.clear()
        self.taken[passes] = self._here()
        if passes > _ANCHORS:
            self.taken.pop(passes - _ANCHORS, None)

    def end(self, phase: int) -> None:
        self.ends[phase] = self._here()
        if len(self.ends) > _ENDS:
            self.ends.pop(min(self.ends))

    def _here(self) -> bytes:
        values = self._registered.capture_counters()
        found = {"random": read_random(), "values": values, "owned": self._loaders.owned()}
        return dumps(found | {"variables": self._variables.capture(boundary=False)})

    def restore(self, taken: Mapping[int, bytes], place: int) -> None:
        """Put back what a failed worker has taken there; nothing if it has taken nothing."""
        if place not in taken:
            return
        found = loads(taken[place])
        self._registered.restore_counters(found["values"])
        self._loaders.set_owned(found["owned"])
        self._variables.put_back(found.get("variables", {}), boundary=False)
        write_random(found["random"])


class LoopProgress:
    """How far the loop of a script is: its epochs, and its passes over the data. In a replacement, the way to the place
    of the failed worker.

    :class:`~shared_core.loop.TrainingLoop` says here where its passes begin and end, and where batches do; so does an
    adapter, whose framework iterates loaders itself.

    Args:
        job: the job of this worker; None without ``swiftrun``, and before :meth:`begin`.
        name: of what has ``epochs`` in the user's script, for messages: ``job``, or ``plugin`` under Accelerate.
        after: of the loop before this one, in a script that attaches several times; parts of the script are numbered
            on.

    Attributes:
        job: see above.
        total_steps: batches used so far, of all epochs and loops.
        epoch: number of the epoch in progress; None outside :meth:`epochs`.
        config: with options that the script may have given.
        registered: what the script has registered.
        loaders: those that the script iterates; from :meth:`begin` on.
    """

    def __init__(self, job: Job | None = None, name: str = "job", after: LoopProgress | None = None) -> None:
        self.job: Job | None = None
        #: The same where failed workers are replaced; else None.
        self._replaced: Job | None = None
        self._name, self.total_steps = name, 0
        self.epoch: int | None = None
        self._number: int = after._number + 1 if after is not None else 1
        #: Odd inside epochs(), even before, between and after its calls.
        self._phase: int = after._phase if after is not None else 0
        self._round: int = after._round if after is not None else 0
        self._looked = self._replays = False
        self._warnings = _Warnings(UNMARKED[name])
        self._active: Callable[[], Any] = lambda: None
        self._walks = Walks()
        self._between = TrainedUse()
        self.registered = Registered()
        self._anchors: _Anchors
        self.config = SwiftConfig()
        self.loaders: Loaders
        self._start = 0
        self._end: int | None = None
        if job is not None:
            self.begin(job, job.config)

    def epochs(self, count: int, start: int, frame: FrameType | None) -> Iterator[int]:
        """See :meth:`TrainingLoop.epochs`; ``frame`` has called that."""
        own: list[Callable[[], Any]] = []
        self.hear(frame)
        epochs = self._epochs(count, start, own, frame is not None and is_bare(frame))
        own.append(weakref.ref(epochs))
        return epochs

    def _epochs(self, count: int, start: int, own: Sequence[Callable[[], Any]], bare: bool) -> Iterator[int]:
        if start > count:  # the two were taken for each other
            raise ConfigError(_COUNT_FIRST.format(self._name, count, start))
        numbers = range(start, count)
        self._start, self._end = start, count
        if self._replays:
            return (yield from numbers)
        self._next_phase()
        self.refuse_own_steps()
        self._stand_by()
        target = self._target()
        self._refuse_later(target)
        if target is not None and self._replaced is not None:
            link.at_end(self._refuse_another_way)
        self._between.end()
        if target is None or target["phase"] == self._phase:
            self._look_around(sys._getframe())
            self.walk(own[0](), "epochs", bare=bare)
            try:
                for number in numbers if target is None else self._rest(target):
                    if self.job is not None:
                        self._carry_on(own[0](), number - self._start, target)
                    self._begin_epoch(number, target)
                    target = None
                    yield number
                    self._warnings.epoch_ends()
            finally:  # also where the script leaves the loop
                self.walked(own[0]())
                self.epoch = self._end = None
                if self.job is not None and not self.joining and not sys.is_finalizing():
                    self._anchors.end(self._phase)
                    if self._replaced is not None and self.config.checkpoint.dir is not None:
                        self._between.begin(self._attached)
                self._next_phase()
        else:
            self._skip_loop(target)

    def begin(self, job: Job, config: SwiftConfig, *, replays: bool = False) -> None:
        """Be the loop of ``job``, with options that the script may have given. ``replays``: replacements run the whole
        script, and so count and draw all that the failed workers did.
        """
        self.job, self.config, self._replays = job, config, replays
        self._replaced = job if isinstance(job, Job) else None  # a Checkpointer has what a loop needs of one
        self._warnings.begin(job.rank, self._replaced)
        self.loaders = Loaders(job, config)
        self._anchors = _Anchors(self.registered, self.loaders, job.variables)
        self._untrained = UntrainedUse(job.rank)
        if replays:
            return
        if self._replaced is not None:
            self._replaced.when_unmarked(self._warnings.unmarked)
        job.register(_PLACE, self._capture_place, self._restore_place)
        job.register(_LOADERS, self.loaders.capture, self.loaders.restore)
        job.register(_VALUES, self.registered.capture, self.registered.restore)

    @property
    def joining(self) -> bool:
        """Whether this is a replacement that has not reached the failed worker's place yet."""
        return self.job is not None and self.job.joining

    @property
    def nested(self) -> bool:
        """Whether a training loader is being iterated: others inside it are no step boundaries."""
        return self._active() is not None

    def refuse_own_steps(self) -> None:
        """A loop is entered in which each worker computes its own share. Raises Unsupported with
        ``on_failure="reroute"``.
        """
        if self.job is not None and self.job.reroutes:
            raise Unsupported(_SHARED_STEPS_ONLY.format(_SHARED_STEPS[self._name]))

    def expect(self, loader: Any, index: int) -> None:
        """Say how far the job has to go, where the length of ``loader`` is known: this pass, at its batch ``index``,
        and as long a one in each epoch that follows. Each pass ends with a step boundary of its own.
        """
        try:
            length = len(loader)
        except Exception:  # noqa: BLE001 (of the script's own class: the job needs no length)
            return
        passes = self._end - self.epoch - 1 if self._end is not None and self.epoch is not None else 0
        if self._replaced is not None:
            self._replaced.expect_steps(max(0, length - index) + passes * (length + 1))

    def note_epoch(self, number: int) -> None:
        """A framework that counts epochs itself begins one."""
        self.epoch = number

    def used(self) -> None:
        self.total_steps += 1

    def begin_round(self) -> bool:
        """A training loader is about to be iterated. False where the failed worker had finished with it."""
        assert self.job is not None
        self.job.variables.count_data_sets()
        self._round += 1
        self._warnings.begins()
        self.job.entries.continues()
        self.job.checkpoints.note_reachable(self._reachable())
        self._stand_by()
        target = self._target()
        self._refuse_later(target)
        if target is None:
            if self.epoch is None and self._round == 2:
                self._warnings.second_pass(_SECOND_PASS.format(self._name))
            return True
        if target["epoch"] is None and target["round"] > 1:
            self.job.fall_back(_NO_WAY_IN.format(self.job.rank, target["round"], self._name))
        here, there = (self._phase, self._round), (target["phase"], target["round"])
        if here < there:
            self._skipped()
            self._anchors.restore(target["anchors"], self._round)
            self._begin_part()
        return bool(there <= here)

    def looks_at_items(self) -> bool:
        """In a pass that the failed worker had finished with: whether the script takes single items of it, as to look
        at a batch. They are read again; training on them is refused, as all use of the model is here.
        """
        return calls_for_item(sys._getframe(1))

    def _reachable(self) -> bool:
        """Whether a worker that begins with a checkpoint of this pass gets to it as this one did."""
        if self._number == 1 and not self._between.where:
            return self.epoch is not None or self._round == 1
        if self.config.checkpoint.dir is not None and self._replaced is not None:
            why = _LATER if self._number > 1 else _BETWEEN.format(self._between.where)
            self._warnings.no_checkpoints(why)
        return False

    def end_round(self) -> None:
        if self.epoch is not None and not self.joining and not sys.is_finalizing():
            self._anchors.take(self._round)
            self._begin_part()

    def activate(self, position: Any) -> None:
        """``position`` iterates a training loader; it counts as active for as long as it lives."""
        self._active = weakref.ref(position)

    def walk(self, thing: Any, what: str = "steps", *, bare: bool = False, made: Sequence[Place] = ()) -> None:
        """A loop of the script asks ``thing`` for its first item; see :class:`Walks`."""
        if self.job is not None and not self._replays:
            first = what == "epochs" or self._round <= 1
            self._walks.begin(thing, what, bare=bare, first=first, made=made)

    def gave(self, thing: Any) -> None:
        self._walks.gave(thing)

    def walked(self, thing: Any) -> None:
        self._walks.end(thing)

    def variables_held(self) -> AbstractContextManager[None]:
        """Around a step boundary and the reading of what was read before it; see :meth:`Variables.held`."""
        assert self.job is not None
        return self.job.variables.held()

    def reread(self) -> None:
        """What was read before the boundary was read again; see :meth:`Variables.put_held_back`."""
        assert self.job is not None
        self.job.variables.put_held_back()

    def step_boundary(self) -> bool:
        """A batch begins; True if this replacement has just joined."""
        assert self.job is not None
        joined = self.job.step_boundary()
        if joined:
            self._untrained.end()
        return joined

    def _stand_by(self) -> None:
        """The first pass or epoch is about to begin; adapters say that themselves, before they look at ``joining``."""
        if self._replaced is not None and self._name == "job":
            self._replaced.make_own_standby()

    def _target(self) -> dict[str, Any] | None:
        """The failed worker's place, in a replacement that has not joined."""
        if self.job is None or not self.joining:
            return None
        found: dict[str, Any] | None = self.job.peek(_PLACE)
        return found

    def _refuse_later(self, target: Mapping[str, Any] | None) -> None:
        """A finished loop is not run again: code after it would see a model that nobody has trained."""
        if target is None or target["loop"] <= self._number:
            return
        assert self.job is not None
        self.job.fall_back(_EARLIER_LOOP.format(self.job.rank, target["loop"]))

    def _refuse_another_way(self) -> None:
        if self._target() is None:
            return
        assert self.job is not None
        reason = _ANOTHER_WAY.format(self.job.rank)
        if self.job.env.incarnation:
            self.job.fall_back(reason)
        raise Unsupported(_FROM_SCRATCH.format(reason))

    def _next_phase(self) -> None:
        self._phase, self._round, self._looked = self._phase + 1, 0, False
        self._begin_part()

    def _begin_part(self) -> None:
        """A replacement repeats what the script does from here to its next step boundary, with the same results."""
        if self.job is not None and not sys.is_finalizing():
            self.job.entries.between(self._phase, self.epoch, self._round)

    def hear(self, frame: FrameType | None) -> None:
        """The script calls from this frame, perhaps through an adapter."""
        while frame is not None and frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        if frame is not None and self.job is not None:
            count_as_script(frame.f_globals)

    def look_around_once(self, frame: FrameType | None) -> None:
        """The script begins a pass; outside :meth:`epochs` this is where its loaders are looked for."""
        if not self._looked:
            self._look_around(frame)

    def _look_around(self, frame: FrameType | None) -> None:
        if self.job is not None:
            self._looked = True
            self.loaders.look_around(frame, self._phase)

    def _begin_epoch(self, number: int, target: Mapping[str, Any] | None) -> None:
        """With the failed worker's place, if it is in this epoch."""
        self.epoch, self._round = number, 0
        if self.job is None:
            return
        self._begin_part()
        if target is not None:
            if target["steps"]:
                self._skipped()
            self._anchors.restore(target["anchors"], 0)
        else:
            self._anchors.take(0)

    def _rest(self, target: Mapping[str, Any]) -> range:
        """The failed worker's epochs. It counts from where it began: the script may begin elsewhere in a replacement,
        as where it continues from a file that it has written itself. A later start of the script may make more.
        """
        assert self.job is not None
        if self.job.origin == "same" and "range" in target:
            self._start, self._end = target["range"]
        return range(target["epoch"], self._end or 0)

    def _skip_loop(self, target: Mapping[str, Any]) -> None:
        assert self.job is not None
        if self._phase > target["phase"]:  # the script has left that loop
            self._refuse_another_way()
        if self._phase not in target["ends"]:
            self.job.fall_back(_NO_END.format(self.job.rank, self._name))
        self._skipped()
        self._anchors.restore(target["ends"], self._phase)
        self._next_phase()

    def _skipped(self) -> None:
        if self.job is not None:
            replaces = self._replaced is not None and self._replaced.env.incarnation > 0
            self._untrained.begin(self._attached, self.job.fall_back if replaces else None)

    @property
    def _attached(self) -> list[nn.Module]:
        replicated = self.job.replicated if self.job is not None else None
        return replicated.modules if replicated is not None else []

    def _capture_place(self) -> dict[str, Any]:
        return {
            "loop": self._number,
            "phase": self._phase,
            "epoch": self.epoch,
            "range": [self._start, self._end],
            "round": self._round,
            "steps": self.total_steps,
            "anchors": self._anchors.taken,
            "ends": self._anchors.ends,
            "around": self._around(),
        }

    def _around(self) -> list[Any]:
        found = self._walks.capture()
        if self.job is not None and self.job.rank == 0:
            for where, name in self._walks.stuck():
                message = f"{_AROUND.format(where, name)}: a failed worker is not replaced. {_GIVE}"
                console_once(f"around {where}", message)
        return found

    def _carry_on(self, epochs: Any, given: int, target: Mapping[str, Any] | None) -> None:
        """``epochs`` gives the next number, in a replacement that of the failed worker's epoch."""
        if target is None:
            self._walks.look(epochs)
        else:
            kinds: list[str] = next((each for what, each, _ in target["around"] if what == "epochs"), [])
            self._refuse_stuck(self._walks.move(epochs, kinds, given))
        self._walks.gave(epochs, count=given + 1)

    def _refuse_stuck(self, found: tuple[str, str] | None) -> None:
        if found is not None:
            assert self.job is not None
            self.job.fall_back(f"rank {self.job.rank}: {_AROUND.format(*found)}. {_GIVE}")

    def _restore_place(self, place: Mapping[str, Any]) -> None:
        self.total_steps = place["steps"]
        self._anchors.taken, self._anchors.ends = dict(place["anchors"]), dict(place["ends"])
        self._refuse_stuck(self._walks.restore(place["around"]))


_INSIDE = (
    "attach() was called inside a loop over job.epochs(): a replacement enters that loop at another epoch, without it. "
    "Make all models and optimizers before the loop, and attach them together; those that are not used yet may wait. "
    "Or end the loop, and begin another with attach()"
)


class TrainingLoop:
    """A training loop that survives the failure of workers. Without ``swiftrun`` it is a plain loop.

    Made by :func:`shared_core.attach`.

    Example::

        job = shared_core.attach(model, optimizer)
        counts = job.register(loss=0.0)
        for epoch in job.epochs(2):
            for step, batch in job.steps(loader):
                loss = model(batch).square().mean()
                job.note_loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                counts.loss += loss.item()
        print(f"{job.total_steps} steps, mean loss {counts.loss / job.total_steps:.3f}")
    """

    def __init__(self, progress: LoopProgress, models: Sequence[nn.Module] = ()) -> None:
        self._progress, self._models = progress, models
        self._sharing: StepSharing | None = None

    @property
    def job(self) -> Job | None:
        """The job of this worker; None without ``swiftrun``."""
        return self._progress.job

    @property
    def total_steps(self) -> int:
        """Batches used so far, of all epochs and loops."""
        return self._progress.total_steps

    @property
    def epoch(self) -> int | None:
        """Number of the epoch in progress; None outside :meth:`epochs`."""
        return self._progress.epoch

    def epochs(self, count: int, start: int = 0) -> Iterator[int]:
        """Numbers from ``start`` up to ``count``; a replacement begins with the failed worker's.

        Between the start of an epoch and its training loader, a replacement runs the script's code with the random
        generators and registered values that the failed worker had there, but before it has the model's state: write no
        files there.

        Args:
            count: end of the range.
            start: first number.
        """
        return self._progress.epochs(count, start, sys._getframe(1))

    def steps(self, loader: Any) -> Iterator[tuple[int, Any]]:
        """``(index, batch)`` for each batch of ``loader``, as ``enumerate(loader)``; see :attr:`total_steps`.

        A loader is known by its place (the n-th ``steps`` of the epoch), so it may be a new object each time. Inside
        another ``steps`` it is a part of that one's batch. Without :meth:`epochs`, all workers start again when one
        fails after the first pass.

        Args:
            loader: a ``DataLoader``, a progress bar around one, a generator, any iterable.

        Raises:
            Unsupported: for an iterable whose items cannot be found again, and under ``torch.inference_mode()``.
        """
        own: list[Callable[[], Any]] = []
        progress = self._progress
        progress.hear(sys._getframe(1))
        bare = is_bare(sys._getframe(1))
        made = () if bare or progress.job is None else places(sys._getframe(1))
        steps = self._steps(loader, own, bare, made)
        own.append(weakref.ref(steps))
        return steps

    def _steps(
        self, loader: Any, own: Sequence[Callable[[], Any]], bare: bool, made: Sequence[Place]
    ) -> Iterator[tuple[int, Any]]:
        progress = self._progress
        if progress.job is None:
            for index, batch in enumerate(loader):
                yield index, batch
                progress.used()
            return
        progress.refuse_own_steps()
        progress.look_around_once(sys._getframe())
        outer = not progress.nested
        if outer and not progress.begin_round():
            return
        begun = progress.loaders.begin(loader, progress.epoch or 0)
        if outer:
            progress.activate(begun.position)
        entered = expected = False
        progress.walk(own[0](), bare=bare, made=made)
        try:
            while True:
                if not entered and not progress.joining:
                    progress.loaders.enter(begun)
                    entered = True
                with progress.variables_held():
                    if outer and progress.step_boundary() and not entered:
                        progress.loaders.enter(begun)
                        entered = True
                if outer and not expected and not progress.joining:
                    expected = True
                    progress.expect(loader, begun.index)
                try:
                    batch = begun.next()
                except StopIteration:
                    return
                begun.index += 1
                progress.gave(own[0]())
                yield begun.index - 1, batch
                progress.used()
        finally:
            progress.walked(own[0]())
            progress.loaders.leave(begun)
            if outer:
                progress.end_round()

    def shared_steps(
        self, loader: Any, epochs: int, *, accumulate: int = 1, modules: Sequence[nn.Module] | None = None
    ) -> Iterator[SharedStep]:
        """Steps of which any worker can compute any rank's share; the only loop for ``on_failure="reroute"``.

        With it the workers continue at once when one fails: its peers compute its share of each global batch, and a
        replacement is admitted later. Without a failure, with other options and without ``swiftrun`` it is a
        data-parallel loop as well::

            job = shared_core.attach(model, optimizer)        # no DistributedDataParallel around the model
            for step in job.shared_steps(loader, epochs=3):
                losses = step.backward(lambda batch: criterion(model(batch[0]), batch[1]))
                optimizer.step()

        What the loop registers must be the same at all workers: a replacement gets a copy of a peer's.

        Args:
            loader: a ``DataLoader`` over a map-style data set, with a ``DistributedSampler`` if there are several
                workers. Order and randomness of its data are functions of the option ``seed``, rank, epoch and batch.
            epochs: passes over the data.
            accumulate: batches of a step at each rank; the gradient is that of their mean loss.
            modules: what is trained, if not the models given to :func:`attach`.

        Raises:
            ConfigError: for a second loop.
            Unsupported: for models with batch normalisation, and for data that only one rank can read.
        """
        if self._sharing is not None:
            raise ConfigError("shared_steps() was called before: make all steps in one loop, with as many epochs")
        progress = self._progress
        sharing = self._sharing = StepSharing(self.job, progress.config, modules or self._models, loader, accumulate)
        return shared_steps(sharing, epochs, progress, progress.step_boundary if self.job is not None else lambda: None)

    def wait_for_all(self) -> None:
        """After :meth:`shared_steps`: wait until replacements have taken the places of all failed workers.

        Call it before collectives of the script's own, which need all workers.
        """
        if self._sharing is not None:
            self._sharing.wait_for_all(self.total_steps)

    def register(self, *objects: Any, **values: Any) -> SimpleNamespace:
        """Have state of the script follow a replacement: what the loop counts, averages or remembers.

        Args:
            objects: with ``state_dict`` and ``load_state_dict``, or any object whose attributes are plain data.
            values: initial values of counters.

        Returns:
            A namespace with ``values`` as attributes, to be read and assigned: ``count = job.register(seen=0)``, then
            ``count.seen += len(batch)``.

        Raises:
            ConfigError: for values that cannot be published.
        """
        counters, weigh = self._progress.registered.add(objects, values)
        if self.job is not None:
            self.job.variables.registered(objects)
            if weigh:
                self.job.keep_boundaries()
        return counters

    def ignore(self, *names: str) -> None:
        """Variables and attributes of the script with these names may be others in a replacement: nothing depends
        on them.

        All others are put back, or compared (docs/will_my_script_work.md).
        """
        if self.job is not None:
            self.job.variables.ignore(*names)

    def note_loss(self, loss: torch.Tensor | float) -> None:
        """Tell the training loss of this batch: the policies ``value`` and ``coci`` decide by it, and the dashboard
        draws it. A tensor is not read at once.
        """
        if self.job is not None:
            self.job.note_loss(loss)


#: Of the newest loop of this process.
_newest: LoopProgress | None = None


def attach(*objects: Any) -> TrainingLoop:
    """Say what a script trains, and get the loop that survives the failure of workers.

    Call this after ``DistributedDataParallel`` was put around the models. A script that trains one model after the
    other, or the same in another way, calls it for each; what was attached before no longer is.

    Args:
        objects: models, averages of them and target networks, optimizers, loaders, and whatever else has
            ``state_dict`` (schedulers, scalers).

    Raises:
        ConfigError: if an object has no state; inside :meth:`TrainingLoop.epochs`; under ``swiftrun``, if the process
            group is none that can survive.
        Unsupported: under ``swiftrun``, if a process group works on another device than the CPU; see
            :func:`shared_core.install`.

    Example::

        job = shared_core.attach(model, optimizer, scheduler)
        for step, batch in job.steps(loader):
            ...
    """
    global _newest
    job = current_job()
    if job is None:
        warn_plain_torchrun_once()
        warn_srun_once()
    else:
        install()
    if job is not None and dist.is_initialized() and job.runtime.world is None:
        raise ConfigError(
            "the process group was created before shared_core.install() was called, so it cannot survive a failure: "
            "call shared_core.install() first"
        )
    if job is not None and _newest is not None and _newest.epoch is not None:
        raise ConfigError(_INSIDE)
    progress = _newest = LoopProgress(job, after=_newest)
    engines = [each for each in objects if isinstance(each, Owner)]
    objects = tuple(each for each in objects if not any(engine.holds(each) for engine in engines))
    models = [each for each in objects if isinstance(each, nn.Module)]
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    loop = TrainingLoop(progress, models)
    if job is not None:
        job.attach(models, optimizers)
        job.keep_images()
        if not engines:
            job.variables.look_at_optimizers()
        if models and not optimizers:  # then the script changes the parameters itself
            job.keep_boundaries()
    for each in objects:
        if isinstance(each, (nn.Module, Optimizer)):
            continue
        if isinstance(each, torch.utils.data.DataLoader):
            if job is not None:
                progress.loaders.attach(each)
        else:
            loop.register(each)
    return loop
