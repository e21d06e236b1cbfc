"""What a script's variables hold, for a replacement: captured at each step boundary, put back, or refused by name."""

from __future__ import annotations

import os
import sys
import time
import types
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from shared_core.encoding.plain import loads
from shared_core.errors import RecoveryFailed
from shared_core.events import console_once
from shared_core.worker.variables.changes import alike, changed, digests
from shared_core.worker.variables.data_sets import DataSets
from shared_core.worker.variables.expressions import Unfinished
from shared_core.worker.variables.graft import MISSING, Difference, Graft, short
from shared_core.worker.variables.hooks import HookTables
from shared_core.worker.variables.kinds import (
    OfItsClass,
    attributes_of_tensor,
    is_of_library,
    kind_of,
    of_every_optimizer,
    root_of,
)
from shared_core.worker.variables.scopes import (
    Kind,
    Names,
    Scope,
    Scopes,
    ToldVariables,
    import_again,
    let_go,
    put_locals,
    script_frames,
)
from shared_core.worker.variables.settings import ProcessSettings
from shared_core.worker.variables.writer import (
    LIMIT,
    MODULE_PARTS,
    SEEN_AT_ONCE,
    Large,
    TooLarge,
    Unbound,
    Unwritten,
    ValueWriter,
    in_order,
    read_own,
)

#: For tests: a script's variables are left alone.
OFF = "SWIFT_TEST_NO_VARIABLES"
#: The user is told what captures cost when so many have taken longer than this, in seconds.
_DEAR_S, _DEAR_TIMES = 2e-3, 5
_ATOMS = (bool, int, float, str, bytes, type(None))
#: What the loop puts back, or makes for the new number of workers.
_OF_DATA = (Sampler, DataLoader, Dataset)
#: Variables that one message names.
_MOST_NAMED = 8
#: Longer texts in a generator are left alone: it has read them.
_TEXTS, _TEXT = (str, bytes), 256
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
#: So many iterators of C that a framework draws from are remembered.
_SOURCES = 16


_STALE = (
    "rank {0}: the expression at {2} has read `{1}` before it asks for a batch, and in the replacement that was "
    "another value. Fetch the batch in a separate statement before that expression"
)

#: Whose variables a worker puts back: those of its failed worker; those in a checkpoint of an earlier start of the
#: script; those of another rank, at another place.
Origin = Literal["same", "checkpoint", "other"]


def _raise(reason: str, origin: Origin) -> None:
    raise RecoveryFailed(reason)


#: A variable, what the other run held in it, and what this one holds.
_Change = tuple[Scope, str, Any, Any]


class _Untold:
    """Attributes that a framework had told of in the other run, and not yet here. ``graft``: None if none."""

    def __init__(self, graft: Graft | None, origin: Origin) -> None:
        self.graft, self.origin = graft, origin
        #: By scope: what it held, and whether that has changed since training began.
        self.scopes: dict[str, tuple[dict[str, Any], bool]] = {}
        self._boundaries, self._heard = 0, False

    def hears(self) -> None:
        self._heard = True

    def is_over(self) -> bool:
        """Call at each step boundary: whether the framework has told of all that it will. The restored boundary itself
        may be published again before the framework has told of anything.
        """
        self._boundaries += 1
        return self._heard or self._boundaries > 1


def _match(graft: Graft, scope: Scope, where: str, wanted: Mapping[str, Any]) -> list[_Change]:
    """Match a scope with the values of another run; what cannot be put back is added to ``graft.differences``."""
    mine = dict(zip(scope.names.names, scope.values, strict=True))
    todo: list[_Change] = []
    for name, new in wanted.items():
        old = mine.get(name, MISSING)
        old = MISSING if old is Unbound else old
        known = len(graft.differences)
        graft.match(new, old, name)
        todo.append((scope, name, new, old))
        graft.differences[known:] = [replace(each, where=where) for each in graft.differences[known:]]
    return todo


def _fill(graft: Graft, todo: Iterable[_Change]) -> None:
    changes: dict[str, tuple[Scope, dict[str, Any]]] = {}
    for scope, name, new, old in todo:
        value = graft.value(new)
        if value is not MISSING and (value is not old or isinstance(value, _ATOMS)):
            changes.setdefault(scope.name, (scope, {}))[1][name] = value
    for scope, values in changes.values():
        scope.put(values)


def _elsewhere(rank: int | None, name: str, where: str) -> str:
    function = name.rpartition(":")[2].partition(" ")[0]
    return (
        f"rank {rank}: the failed worker asked for its batch in {function}() ({where}), and its replacement asks "
        "elsewhere: ask for all batches of a pass at one place, and put what reads ahead inside, as in "
        "job.steps(Prefetcher(loader))"
    )


class Variables:
    """The variables of one worker's script. Call on the script's own thread only.

    Args:
        rank: of this worker; None where nobody replaces it: then nothing is captured.
        origin: whose variables are put back.
        refuse: ends what cannot continue; called with a reason and the origin.
    """

    def __init__(
        self,
        rank: int | None,
        origin: Callable[[], Origin] = lambda: "same",
        refuse: Callable[[str, Origin], Any] = _raise,
    ) -> None:
        self._rank, self._off = rank, rank is None or bool(os.environ.get(OFF))
        self._origin, self._refuse = origin, refuse
        self._scopes, self._settings = Scopes(), ProcessSettings()
        self._restored: dict[int, Any] = {}
        self._writer = ValueWriter(self._restored.__contains__)
        self._writer.given = self._scopes.given.names
        self._told: dict[str, tuple[Any, ToldVariables]] = {}
        self._leaves: list[tuple[type, frozenset[str]]] = []
        self._named: dict[str, Any] | None = None
        #: Variables, by scope and name, that are written as a stand-in.
        self._large: dict[tuple[str, str], type[Large]] = {}
        #: Digests of the variables at the start of the first epoch, and at the first step boundary: of these two, what
        #: has the same at both. ``_began``: of a step boundary, too.
        self._first: dict[str, dict[str, bytes]] | None = None
        self._began = False
        #: (scope, name) of what was put back from a checkpoint, on the way to its step boundary.
        self._back = set[tuple[str, str]]()
        self._attached: list[str] = []
        self._hooks = HookTables()
        #: Attributes of what is of a class of torch among what is attached, by name, and how many there were.
        self._of_torch: dict[str, dict[str, Any]] = {}
        self._attributes = -1
        self._registered: list[torch.Tensor | Optimizer] = []
        #: Iterators that a framework draws from, or what refers to them, by identity.
        self._sources: dict[int, Any] = {}
        #: What is attached and its parts, by names that are the same in a replacement.
        self._parts: dict[str, Any] = {}
        #: Parameters and buffers among these, and what ``id()`` is for all of them.
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._identities = b""
        self._holds = self._at_once = False
        self._held: tuple[dict[str, Any], Origin] | None = None
        self._untold = _Untold(None, "same")
        self._dear, self._dark = 0, (0, 0)
        self.data_sets = DataSets(self._writer.ignored, self._tell_seldom)
        self._of_data: tuple[dict[str, bytes], Origin] | None = None

    # -- what counts --------------------------------------------------------------------------------------------------

    def ignore(self, *names: str) -> None:
        self._writer.ignored.update(names)

    def leave(self, cls: type, names: Iterable[str]) -> None:
        self._leaves.append((cls, frozenset(names)))

    def tell(self, name: str, thing: Any, leaves: Iterable[str] = ()) -> None:
        """Capture the attributes of an object, too; all else that it is comes back otherwise.

        ``name`` must be the same in a replacement; another object of this name is forgotten. ``leaves``: attributes
        that do not count, beside those of :meth:`leave`.
        """
        leaves = frozenset(leaves).union(*(names for cls, names in self._leaves if isinstance(thing, cls)))
        self._told[name] = (
            thing,
            ToldVariables(name, thing, leaves | MODULE_PARTS if isinstance(thing, nn.Module) else leaves),
        )
        self._restored[id(thing)] = thing
        self._untold.hears()
        if name in self._untold.scopes:
            self._put_told(self._told[name][1].scope())

    def reads(self, source: Any) -> None:
        """Do not capture this iterator: a framework draws from it, and puts it in its place in a replacement.

        This holds for as long as it lives. Of iterators that take no weak reference only the newest ``_SOURCES``
        are remembered.
        """
        key = id(source)
        if key in self._sources:
            return
        self._restored[key] = True
        try:
            self._sources[key] = weakref.ref(source, lambda _: self._no_source(key))
        except TypeError:  # an iterator of C: kept alive, so that its id is not reused
            self._sources[key] = source
            strong = [key for key, each in self._sources.items() if not isinstance(each, weakref.ref)]
            for each in strong[:-_SOURCES]:
                self._no_source(each)

    def _no_source(self, key: int) -> None:
        self._sources.pop(key, None)
        self._restored.pop(key, None)

    def forget(self, name: str) -> None:
        self._told.pop(name, None)

    def count_data_sets(self) -> None:
        """From now on, what data sets and samplers hold counts as variables: the script has its own training loop."""
        self._writer.data = True

    def look_at_optimizers(self) -> None:
        """Those that the script has made and not attached are its variables."""
        self._writer.optimizers = True

    def registered(self, things: Iterable[Any]) -> None:
        """What the ``state_dict`` of these modules holds, and these optimizers, are put back by others."""
        for each in things:
            if isinstance(each, nn.Module):
                with suppress(Exception):  # of the script's own state_dict()
                    self._registered += [v for v in each.state_dict(keep_vars=True).values() if torch.is_tensor(v)]
            elif isinstance(each, Optimizer):
                self._registered.append(each)
        self._leave_registered()

    def _leave_registered(self) -> None:
        self._restored.update((id(each), each) for each in self._registered)

    def attach(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Leave these to others, except attributes that classes of the script added. Replaces earlier ones."""
        for name in self._attached:
            self.forget(name)
        for each in self._parts.values():
            self._writer.parts.pop(id(each), None)
        self._attached.clear()
        self._parts.clear()
        self._restored.clear()  # in place: the writer has this very dictionary
        self._restored.update(self._sources)
        self._restored.update((id(thing), thing) for thing, _ in self._told.values())
        self._leave_registered()
        for number, module in enumerate(modules):
            bare = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
            self._restored[id(module)] = module
            if module is not bare:
                self._parts[f"wrapper {number}"] = module
            for path, child in bare.named_modules():
                self._restored[id(child)] = child
                self._parts[f"module {number} {path}"] = child
                if not is_of_library(type(child)):
                    name = f"model {number} {path}".rstrip()
                    self._attached.append(name)
                    self.tell(name, child)
            for path, tensor in (*bare.named_parameters(), *bare.named_buffers()):
                self._restored[id(tensor)] = tensor
                self._parts[f"tensor {number} {path}"] = tensor
        for number, optimizer in enumerate(optimizers):
            self._restored[id(optimizer)] = optimizer
            self._parts[f"optimizer {number}"] = optimizer
            if not is_of_library(type(optimizer)):
                self._attached.append(f"optimizer {number}")
                self.tell(f"optimizer {number}", optimizer, of_every_optimizer())
        for name, each in self._parts.items():
            self._writer.parts[id(each)] = name
        self._tensors = [(name, each) for name, each in self._parts.items() if type(each) in _PLAIN_TENSORS]
        self._identities = array("Q", map(id, self._parts.values())).tobytes()
        bare = [each.module if isinstance(each, nn.parallel.DistributedDataParallel) else each for each in modules]
        self._of_torch = {
            name: vars(each)
            for name, each in self._parts.items()
            if isinstance(each, (nn.Module, Optimizer)) and root_of(type(each)) == "torch"
        }
        self._attributes = -1
        self._hooks.attach(self._parts)
        self._writer.memory.attach({str(number): each for number, each in enumerate(bare)}, optimizers)

    # -- at step boundaries -------------------------------------------------------------------------------------------

    def capture(self, *, boundary: bool = True) -> dict[str, Any]:
        """All variables as plain data; empty if nothing is captured. Reads the frames of its callers. ``boundary`` is
        False at the start of an epoch, before its first step boundary.
        """
        if self._off:
            return {}
        return self._held[0] if self._held is not None else self._capture(sys._getframe(1), boundary)

    def plain_in(self, frame: types.FrameType) -> dict[str, Any]:
        """See :class:`shared_core.loaders.engine.Script`."""
        own = frame.f_locals
        plain = {k: v for k, v in own.items() if type(v) in _ATOMS and (type(v) not in _TEXTS or len(v) <= _TEXT)}
        let_go(frame)
        return plain

    def put_in(self, frame: types.FrameType, values: Mapping[str, Any]) -> None:
        """See :class:`shared_core.loaders.engine.Script`."""
        put_locals(frame, values)

    def capture_now(self) -> dict[str, Any]:
        """As :meth:`capture`, for :meth:`as_then`: also where what was put back has not taken effect yet."""
        return {} if self._off else self._capture(sys._getframe(1), boundary=False)

    @contextmanager
    def as_then(self, captured: dict[str, Any]) -> Iterator[None]:
        """Inside, variables are as they were at :meth:`capture_now`: a process that is started sees them so."""
        now = self.capture_now()
        self._put_back(captured, self._origin(), boundary=False)
        try:
            yield
        finally:
            self._put_back(now, "same", boundary=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of what is attached, and of models that variables held when the loop began."""
        models = {name: each for name, each in (self._named or {}).items() if isinstance(each, nn.Module)}
        return dict(self._tensors) | {
            f"{name} {path}": each
            for name, model in models.items()
            for path, each in (*model.named_parameters(), *model.named_buffers())
        }

    def reading(self) -> AbstractContextManager[None]:
        """Around what asks a loader for something; see :class:`DataSets`."""
        return self.data_sets.reading()

    def _capture(self, frame: types.FrameType, boundary: bool) -> dict[str, Any]:
        begun = time.thread_time()
        self._tell_tensors(name for name, each in self._tensors if attributes_of_tensor(each))
        if (size := sum(map(len, self._of_torch.values()))) != self._attributes:
            self._attributes = size
            self._tell_added(self._of_torch)
        scopes = self._find(frame)
        self._writer.memory.refresh()
        now = self._write(scopes)
        if (took := time.thread_time() - begun) > _DEAR_S:
            self._dear += 1
            if self._dear == _DEAR_TIMES:
                self._tell_cost(scopes, took)
        if (len(self._writer.dark), self._writer.partly) != self._dark:
            self._tell_dark(scopes)
        if boundary:
            self._writer.begins = False
            self._name_untold()
        if self._first is None or (boundary and not self._began):
            here = digests(*read_own(now))
            self._first = here if self._first is None else alike(self._first, here)
            self._began = boundary
        data = self.data_sets.changed() if boundary else {}
        return {
            "now": now,
            "first": self._first,
            "data": data,
            "settings": self._settings.read(),
            "identities": self._identities,
        }

    def _tell_tensors(self, names: Iterable[str]) -> None:
        """Capture the attributes that the script has given these parameters and buffers."""
        for name in names:
            tensor = self._parts.get(name)
            if name not in self._told and isinstance(tensor, _PLAIN_TENSORS) and type(tensor) in _PLAIN_TENSORS:
                self._attached.append(name)
                self.tell(name, tensor, vars(tensor).keys() - attributes_of_tensor(tensor).keys())

    def _tell_added(self, names: Iterable[str], *, elsewhere: bool = False) -> None:
        """Capture the attributes that the script has given these objects of torch, here or ``elsewhere``."""
        for name in names:
            thing = self._parts.get(name)
            if name in self._told or name not in self._of_torch:
                continue
            theirs = OfItsClass(thing)
            if elsewhere or any(each not in MODULE_PARTS and each not in theirs for each in self._of_torch[name]):
                self._attached.append(name)
                self._told[name] = thing, ToldVariables(name, thing, theirs)

    def _find(self, frame: types.FrameType) -> list[Scope]:
        scopes = list(self._scopes.find(frame, [told for _, told in self._told.values()]))
        hooks = self._hooks.read()
        scopes.append(Scope("hooks", "hooks", "a hook", Names(hooks), [*hooks.values()], self._hooks))
        if self._named is None:
            self._named = {}
            for scope in scopes:
                for name, value in zip(scope.names.names, scope.values, strict=True):
                    if not isinstance(value, _ATOMS) and kind_of(type(value)) in ("fixed", "module", "optimizer"):
                        self._named[f"{scope.name} {name}"] = value
                        self._writer.aliases.setdefault(id(value), f"{scope.name} {name}")
        return scopes

    def _write(self, scopes: list[Scope]) -> bytes:
        try:
            if self._writer.begins:  # a part of a tensor may be found before the variable that holds the whole
                for each in (value for scope in scopes for value in scope.values):
                    if isinstance(each, (torch.Tensor, np.ndarray)):
                        self._writer.has_written(each)
            return self._writer.write([self._row(scope) for scope in scopes])
        except Exception:  # too large, or what holds a value that cannot be written
            self._single_out(scopes)
            return self._writer.write([self._row(scope) for scope in scopes], 4 * LIMIT)

    def _row(self, scope: Scope) -> tuple[str, Kind, str, str, Sequence[Any]]:
        out, large = self._writer.ignored, self._large
        if not (large or out):
            return scope.name, scope.kind, scope.where, scope.names.joined, in_order(scope.values)
        kept = [
            (name, value if isinstance(value, _ATOMS) or (as_ := large.get((scope.name, name))) is None else as_(value))
            for name, value in zip(scope.names.names, scope.values, strict=True)
            if name not in out
        ]
        names = " ".join(name for name, _ in kept)
        return scope.name, scope.kind, scope.where, names, in_order([value for _, value in kept])

    def _single_out(self, scopes: list[Scope]) -> None:
        """Choose the largest values until the rest fit into ``LIMIT``: these are only compared from now on."""
        sizes = self._sizes(scopes)
        total = sum(size for size, *_ in sizes)
        for size, scope_name, name, where in sizes:
            if total <= LIMIT:
                break
            total -= size
            self._large[scope_name, name] = Large
            apart = isinstance((self._named or {}).get(f"{scope_name} {name}"), nn.Module)
            mend = f"If nothing depends on it, write job.ignore({name!r})"
            self._tell(
                name,
                f"the variable {name!r} ({where}) is too large to be published at each step (the limit for all is "
                f"{LIMIT >> 20} MiB): a worker that fails after it has changed is not replaced, and all go back to the "
                f"checkpoint. {'Attach this model beside the trained one' if apart else mend}",
            )

    def _sizes(self, scopes: list[Scope]) -> list[tuple[int, str, str, str]]:
        """(bytes, scope, name, place) of all values but simple ones, the largest first. What cannot be written at all
        is left out from now on, and the user is told.
        """
        found: list[tuple[int, str, str, str]] = []
        for scope in scopes:
            *_, names, values = self._row(scope)
            for name, value in zip(names.split(), values, strict=True):
                if isinstance(value, _ATOMS):
                    continue
                try:
                    size = len(self._writer.write(value))
                except TooLarge:
                    size = LIMIT + 1
                except Exception as error:
                    self._large[scope.name, name] = Unwritten
                    self._tell(
                        name,
                        f"the variable {name!r} ({scope.where}) cannot be published ({type(error).__name__}: {error}): "
                        "a worker that fails is not replaced, and all go back to the checkpoint. If nothing depends on "
                        f"it, write job.ignore({name!r})",
                    )
                    continue
                found.append((size, scope.name, name, scope.where))
        return sorted(found, reverse=True)

    def _tell_cost(self, scopes: list[Scope], took: float) -> None:
        for size, _, name, where in self._sizes(scopes)[:1]:
            self._tell(
                f"cost of {name}",
                f"publishing the script's variables takes {took * 1e3:.0f} ms of each step, most of it for {name!r} "
                f"({where}, {size >> 10} KiB): keep many small objects in one array or tensor; or delete it before the "
                f"loop; or, if nothing depends on it, write job.ignore({name!r})",
            )

    def _tell_dark(self, scopes: list[Scope]) -> None:
        """Tell the user which variables hold what cannot be read fully, or not at each step."""
        self._dark = len(self._writer.dark), self._writer.partly
        for scope in scopes:
            *_, names, values = self._row(scope)
            for name, value in zip(names.split(), values, strict=True):
                looking = ValueWriter(self._writer.restored)
                looking.ignored, looking.data, looking.begins = self._writer.ignored, self._writer.data, False
                with suppress(Exception):
                    looking.write(value)
                for each in sorted(looking.dark if (scope.name, name) not in self._large else ()):
                    advice = f"If nothing depends on it, write job.ignore({name!r})"
                    if "DataLoader" in each:
                        advice = "Make it with persistent_workers=False"
                    self._tell(
                        name,
                        f"the variable {name!r} ({scope.where}) holds a {short(each)}, which does not show what it "
                        f"holds: a worker that fails is not replaced, and all go back to the checkpoint. {advice}",
                    )

                if looking.partly:
                    self._tell(
                        f"parts of {name}",
                        f"the variable {name!r} ({scope.where}) holds an array of {looking.partly >> 20} MiB, of which "
                        f"a part is looked at in each step, and all in {looking.partly // SEEN_AT_ONCE + 1} steps: a "
                        "change that NumPy makes may be noticed as late as that. Make it read-only if it does not "
                        "change (flags.writeable = False), or keep what changes in a tensor or in arrays of 1 MiB",
                    )

    def _tell(self, name: str, message: str) -> None:
        if self._rank == 0:
            console_once(f"variable {name}", message)

    def put_back(self, stored: dict[str, Any], *, boundary: bool = True) -> None:
        """Put back what :meth:`capture` returned in the process that this one continues; refuse what cannot be. Of
        another rank only told objects are put back: variables may depend on the rank.
        """
        origin = self._origin()
        if boundary and stored:
            self._of_data = stored.get("data", {}), origin
        if self._holds and boundary:
            self._held = stored, origin
            if not self._at_once:
                return
        self._put_back(stored, origin, boundary)

    def _put_back(self, stored: dict[str, Any], origin: Origin, boundary: bool) -> None:
        try:
            refusal = self.restore(stored, origin, boundary=boundary)
        except Exception as error:  # of a class that is another one now, or of damaged bytes
            refusal = f"rank {self._rank}: the script's variables cannot be put back: {type(error).__name__}: {error}"
        if refusal:
            self._refuse(refusal, origin)

    def check_data(self) -> None:
        """In a replacement, after the batches were read again: refuse the script's changes to data sets."""
        if self._of_data is None:
            return
        (theirs, origin), self._of_data = self._of_data, None
        name = self.data_sets.differ(theirs) if origin != "other" else ""
        if name:
            self._refuse(
                f"rank {self._rank}: `{name}` has changed since training began, and not by what is read again: what "
                "was drawn and read with it cannot be had again. Change numbers in data sets and samplers only, or "
                "read the data in a loop of your own; if nothing depends on it, write "
                f"job.ignore({name.rpartition('.')[2]!r})",
                origin,
            )

    def _tell_seldom(self, name: str, seconds: float) -> None:
        self._tell(
            f"seldom {name}",
            f"`{name}` is so large that it is looked at every {seconds:.1f} s only: if the script changes it while "
            "training, other than by reading, a worker that fails before that continues with what it was at the start",
        )

    @contextmanager
    def held(self, *, at_once: bool = False) -> Iterator[None]:
        """:meth:`put_back` inside takes effect at the end: what reading batches again changes is then as in the process
        that this one continues.

        Args:
            at_once: it takes effect at once, too, so that the rest of the pass is read with those values and not with
                the script's first ones. Data sets and samplers then stay as reading has left them.
        """
        self._holds, self._at_once = True, at_once
        try:
            yield
        finally:
            self._holds = False
        self.put_held_back()

    def put_held_back(self) -> None:
        """Inside :meth:`held`, all is read again that was read before the boundary: put back what waits for that."""
        if self._held is not None:
            (stored, origin), self._held = self._held, None
            self._put_back(stored, origin, boundary=True)

    # -- in a replacement ---------------------------------------------------------------------------------------------

    def restore(self, stored: dict[str, Any], origin: Origin = "same", *, boundary: bool = True) -> str:
        """Put back what :meth:`capture` returned in another process, at the same place of the script.

        Args:
            origin: where it comes from. What had not changed when a checkpoint was made is left alone: a later start of
                the script may give it other values.
            boundary: this is a step boundary, where what cannot be put back is compared.

        Returns:
            What cannot be put back, for people. Empty where all is as it was.

        Raises:
            CorruptFile: if it is damaged.
        """
        if self._off or not stored:
            return ""
        values, rows = loads(stored["now"], cyclic=True)
        first = stored["first"]
        only = changed(first, values, rows) if first is not None and (origin != "same" or boundary) else None
        begun = None if only is None else {scope for scope, _ in only}
        if origin == "other" and only:
            self._tell_reset(only, values, rows)
        if origin != "checkpoint":
            only = None
        elif only is not None:
            only |= self._back  # else what has its first value again stays as it was put back before
            self._back |= only
        told = [scope for scope, kind, *_ in values if kind == "told"]
        self._tell_tensors(told)
        self._tell_added(told, elsewhere=True)
        here = {scope.name: scope for scope in self._find(sys._getframe(1))}
        missing = [scope for scope, *_ in values if scope not in here]
        if missing and origin != "other" and import_again(missing):
            here = {scope.name: scope for scope in self._find(sys._getframe(1))}
        assert self._named is not None
        theirs = array("Q", stored.get("identities", b""))
        same = len(theirs) == len(self._parts)
        identities = dict(zip(theirs, map(id, self._parts.values()), strict=True)) if same else {}
        named = self._named | self._parts | self._writer.memory.named()
        graft = Graft(rows, self._writer, named, identities, edited=origin == "checkpoint")
        for _, own in self._told.values():
            graft.keep(each for each in own.left(MODULE_PARTS) if isinstance(each, (torch.Tensor, list)))
        todo: list[_Change] = []
        untold = _Untold(graft, origin)
        for scope_name, kind, where, names, held in values:
            scope = here.get(scope_name) or (self._scopes.of_class(scope_name) if kind == "class" else None)
            left = self._writer.ignored
            wanted = {
                name: new
                for name, new in zip(names.split(), held, strict=True)
                if name not in left and (only is None or (scope_name, name) in only)
            }
            if origin == "other" and scope_name not in self._told:
                continue
            if scope is not None:
                todo += _match(graft, scope, where, wanted)
                if kind == "hooks" and origin == "same":
                    for name in sorted(wanted.keys() ^ set(scope.names.names)):
                        was, now = ("a function", "not there") if name in wanted else ("not there", "a function")
                        graft.differences.append(Difference(name, was, now, where))
            elif kind == "told" and boundary:
                # A framework tells of it again where it begins; if it does not, what has changed is refused.
                untold.scopes[scope_name] = wanted, begun is None or scope_name in begun
            elif kind == "frame" and boundary and origin != "other" and wanted:
                return _elsewhere(self._rank, scope_name, where)
            elif kind != "told" and wanted:
                graft.differences.append(Difference(scope_name, "there", "not there", where))
        graft.match_owners()
        if graft.differences and boundary and origin != "other":
            return self._refusal(graft.differences)
        frames = list(script_frames(sys._getframe(1))) if boundary and origin == "same" else []
        unfinished = Unfinished(frames)
        _fill(graft, todo)
        if graft.differences and boundary and origin != "other":  # the order of sets
            return self._refusal(graft.differences)
        stale = unfinished.stale()
        for frame in frames:
            let_go(frame)
        if stale is not None:
            return _STALE.format(self._rank, *stale)
        if origin == "same" and "settings" in stored:
            self._settings.put(stored["settings"])
        if boundary:
            self._first, self._began = first, True
            self._back.clear()
            # nothing else may keep the objects of both runs alive, such as iterators that the script drops
            self._untold = untold if untold.scopes else _Untold(None, origin)
        return ""

    def _tell_reset(self, moved: Collection[tuple[str, str]], values: Iterable[Any], rows: Iterable[Any]) -> None:
        """Tell the user which variables that training had changed have other values here."""
        scopes = self._find(sys._getframe(1))
        theirs, mine = digests(values, rows), digests(*read_own(self._write(scopes)))
        names = [
            f"`{name}` ({scope.where})"
            for scope in scopes
            if scope.kind not in ("told", "hooks")
            for name, value in zip(scope.names.names, scope.values, strict=True)
            if (scope.name, name) in moved and value is not Unbound and not isinstance(value, _OF_DATA)
            if mine[scope.name].get(name) != theirs[scope.name][name]
        ]
        if names:
            more = f" and {len(names) - _MOST_NAMED} others" if len(names) > _MOST_NAMED else ""
            self._tell(
                "reset",
                f"with other workers than before, variables begin again as the script makes them: "
                f"{', '.join(names[:_MOST_NAMED])}{more}. What job.register() was given continues (docs/elasticity.md)",
            )

    def _put_told(self, scope: Scope) -> None:
        """The framework tells of this only now: put back what the failed worker held in it."""
        wanted, _ = self._untold.scopes.pop(scope.name)
        graft, origin = self._untold.graft, self._untold.origin
        assert graft is not None  # else nothing was restored, and nothing is untold
        graft.differences.clear()
        todo = _match(graft, scope, scope.where, wanted)
        graft.match_owners()
        if graft.differences and origin != "other":
            self._refuse(self._refusal(graft.differences), origin)
        else:
            _fill(graft, todo)
        if not self._untold.scopes:
            self._untold = _Untold(None, origin)

    def _name_untold(self) -> None:
        """At a step boundary: refuse if attributes have changed that the framework has not told of again."""
        if not self._untold.scopes or not self._untold.is_over():
            return
        scopes, origin = self._untold.scopes, self._untold.origin
        self._untold = _Untold(None, "same")
        gone = [name for name, (wanted, has_changed) in scopes.items() if wanted and has_changed]
        if gone and origin != "other":
            self._refuse(
                f"rank {self._rank}: the attributes of `{gone[0]}` have changed in the failed worker, and this part of "
                "the script is not in its replacement. Give the same callbacks, data modules and models to each call; "
                f"if nothing depends on what they hold, write job.ignore({next(iter(scopes[gone[0]][0]))!r})",
                origin,
            )

    def _refusal(self, differences: Sequence[Difference]) -> str:
        each = differences[0]
        name = each.path.partition(".")[0].partition("[")[0].partition(" ")[0]
        more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
        return (
            f"rank {self._rank}: `{each.path}` ({each.where}) was {each.was} in the failed worker and is {each.here} "
            f"in its replacement, which cannot be given the other{more}. Keep it as plain data, or as an object with "
            f"plain attributes; if nothing depends on it, write job.ignore({name!r})"
        )
