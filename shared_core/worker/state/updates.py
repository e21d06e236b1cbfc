"""Optimizer updates as the recovery sees them: counted, held off while a replica is copied, left out where the state
already contains them.

Steps are seen through torch's public global optimizer hooks. An update begins when the step's closure has returned
(Lightning runs forward and backward inside it).
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shared_core.errors import ConfigError, RecoveryFailed, Unsupported
from shared_core.faults import inject
from shared_core.worker.sharded.own import local_part
from shared_core.worker.state.external_mutation import ExternalMutation, UnoptimizedParameters
from shared_core.worker.state.incremental_copy import Followers
from shared_core.worker.state.newer_state import NewerState, kept_beside
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.shared_images import SharedImage, SharedImages
from shared_core.worker.state.undo import Arguments, HiddenGradients, Parts, Undo, begin_after_closure
from shared_core.worker.variables.hooks import is_hook_of_script


class Count:
    """Counts updates. The caller holds the lock of the updates.

    Attributes:
        applied: updates that the program has gone through.
        ahead: updates that the state contains beyond those: of a replacement whose donor was ahead.
        recomputed: updates that this process has gone through more than once.
    """

    def __init__(self) -> None:
        self.applied = 0
        self.ahead = 0
        self.recomputed = 0
        self._highest = 0

    @property
    def state(self) -> int:
        return self.applied + self.ahead

    def begin(self, version: int, ahead: int = 0) -> None:
        """The program is where ``version`` updates have been made, with a state that contains ``ahead`` more."""
        self.applied, self.ahead = version, ahead

    def left_out(self) -> None:
        """The next update to be counted was left out, because the state contains it."""
        self.ahead -= 1

    def one(self) -> None:
        self.applied += 1
        if self.applied <= self._highest:
            self.recomputed += 1
        self._highest = max(self._highest, self.applied)

    def take_back(self) -> None:
        self.applied -= 1
        self._highest = self.applied


class UpdateGate:
    """No update runs while somebody holds the state, and nobody takes hold of it while an update runs. Several may hold
    it at once.

    Attributes:
        condition: the lock of the updates: guards whatever changes with them; notified when something may have
            become possible.
        installing: a replacement is about to join, and has no state to give.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.updating = False
        self.installing = False
        self._holders = 0

    @property
    def held_now(self) -> bool:
        return self._holders > 0

    def begin(self) -> None:
        """An update begins; blocks until nobody holds the state."""
        with self.condition:
            self.condition.wait_for(lambda: self._holders == 0)
            self.updating = True

    def end(self) -> None:
        """The update is complete. Callers hold the lock."""
        self.updating = False
        self.condition.notify_all()

    def install(self, installing: bool) -> None:
        with self.condition:
            self.installing = installing
            self.condition.notify_all()

    def hold(self) -> None:
        """No update begins until :meth:`release`. Callers hold the lock, and have seen that none runs."""
        self._holders += 1

    def release(self) -> None:
        with self.condition:
            self._holders -= 1
            self.condition.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No update runs in here; blocks until the one that runs is complete."""
        with self.condition:
            self.condition.wait_for(lambda: not self.updating)
            self.hold()
        try:
            yield
        finally:
            self.release()


#: (version before the update, parameters before it by place, or where the ranks of this machine have them together)
PreImage = tuple[int, dict[int, torch.Tensor] | SharedImage]


class UpdateImages:
    """What is kept before updates, and until when.

    Args:
        policy: ``always``, ``never``, or ``auto``: where a caller asks for it, and once a batch has had
            several updates.
        stable: gives the newest step boundary that every rank has published.
        outside: whether the script changes the state outside updates, too: then the state at step boundaries is kept.
        shared: what the ranks of this machine keep together; None where there are several machines.
    """

    def __init__(
        self,
        policy: str,
        count: Count,
        stable: Callable[[], int],
        outside: ExternalMutation,
        shared: SharedImages | None = None,
    ) -> None:
        self._policy, self._count, self._stable, self._outside = policy, count, stable, outside
        self._shared = shared
        self._several = False
        self._wanted = False
        self._sharded = self._own = False
        self._images: list[PreImage] = []
        self._newest: dict[int, torch.Tensor] = {}
        self._spare: dict[int, list[torch.Tensor]] = {}
        #: Number of the newest step boundary, and version, of the last two versions that step boundaries had.
        self._boundaries: list[tuple[int, int]] = []

    # -- whether -----------------------------------------------------------------------------------

    def attach(
        self, optimizers: int, sharded: bool, own: bool = False, *, same: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Begin with a state that so many ``optimizers`` update. ``sharded``: optimizer state is divided over the
        replicas; ``own``: all of it is divided over the ranks and given to nobody, so nothing is kept. ``same``: what
        they update, by place, where each update follows a backward in which all ranks take part.
        """
        self._sharded, self._own = sharded, own
        if self._shared is not None:
            self._shared.attach(same or {})
        self._several = self._several or optimizers > 1

    @property
    def kept(self) -> bool:
        if self._own:
            return False
        # Of a sharded stage a replica has nothing else to give: see Updates.attach().
        return self._policy == "always" or (self._several and (self._policy == "auto" or self._sharded))

    @property
    def needed(self) -> bool:
        """Whether they are, and replacements begin with them; not where these are given no newer state."""
        return not self._outside.active and self.kept

    def want(self, *, at_once: bool = False) -> None:
        """Keep from the next step boundary on, or at once (where the policy is ``auto``)."""
        self._wanted = True
        self._several = self._several or at_once

    def resume(self, several: bool) -> None:
        self._several = several

    # -- keeping -----------------------------------------------------------------------------------

    @torch.no_grad()
    def keep(self, replicated: Replicated, places: Iterable[int]) -> None:
        """An update of the parameters at these places begins: copy them. Nobody is being given images meanwhile, so the
        memory of those that were dropped is used again: memory that is new to the process costs more than the copy.
        """
        self._drop()
        version, places = self._count.applied, list(places)
        if self._shared is not None and (image := self._shared.complete(version, places)) is not None:
            self._images.append((version, image))
            self._spare = {}
            return
        kept: dict[int, torch.Tensor] = {}
        for place in places:
            parameter = replicated.parameters[place].detach()
            spare = self._spare.get(place)
            room = spare.pop() if spare else None
            fits = room is not None and (room.shape, room.dtype) == (parameter.shape, parameter.dtype)
            kept[place] = room if room is not None and fits else torch.empty_like(parameter)
        if kept:
            torch._foreach_copy_(list(kept.values()), [replicated.parameters[place] for place in kept])
        self._images.append((version, kept))

    def share(self, replicated: Replicated) -> None:
        """A backward has gradients for all ranks: copy this rank's part of the parameters before it gives them away."""
        # A replacement overwrites nothing before its next step boundary: another may start before its own.
        begun = bool(self._boundaries) and self._boundaries[-1][0] == sys.maxsize
        if self._shared is not None and self.needed and not self._count.ahead and not begun:
            self._shared.put(self._count.applied, self._oldest(), replicated.parameters)

    def at_boundary(self, index: int) -> None:
        self._several = self._several or self._wanted
        version = self._count.applied
        self._boundaries = [*(boundary for boundary in self._boundaries if boundary[1] != version), (index, version)][
            -2:
        ]
        self._drop()

    def _drop(self) -> None:
        """Drop what no replacement asks for. All ranks have made the gradients of the newest update, so each has
        published the step boundary before it; and none begins before one that every rank has published. (Step
        boundaries alone say nothing: where no collective lies between, such as at the end of a pass, one rank can be
        several ahead.)
        """
        oldest = self._oldest()
        dropped = [params for version, params in self._images if version < oldest and isinstance(params, dict)]
        self._images = [image for image in self._images if image[0] >= oldest]
        if dropped:
            places = {place for params in dropped for place in params}
            self._spare = {place: [params[place] for params in dropped if place in params] for place in places}

    def _oldest(self) -> int:
        """The oldest version that a replacement may begin with."""
        stable = self._stable()
        self._boundaries = [(boundary, version) for boundary, version in self._boundaries if boundary >= stable]
        return min((version for _, version in self._boundaries), default=self._count.applied)

    # -- for a replacement ----------------------------------------------------------------------------

    def has(self, version: int) -> bool:
        """Whether the parameters before the update that follows ``version`` are kept."""
        return any(kept == version for kept, _ in self._images)

    def _image(self, version: int) -> dict[int, torch.Tensor] | None:
        return next((_read(params) for kept, params in self._images if kept == version), None)

    def parameters_at(self, version: int, newest: list[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters with ``version`` updates, not copied: images, or ``newest``. Raises RecoveryFailed."""
        image = self._image(version)
        if image is not None:
            return list(image.values())
        if self._count.applied != version:
            raise RecoveryFailed(
                f"the parameters before update {version + 1} are no longer kept: there have been "
                f"{self._count.applied} updates"
            )
        return newest

    def add_to(self, description: dict[str, Any], tensors: list[torch.Tensor], version: int) -> None:
        """Add the images since ``version`` to an exported state, in place: ``[version, places, index of the first
        tensor]`` each. Raises RecoveryFailed if a part of one is gone.
        """
        description["images"] = []
        for kept, image in self._images:
            if kept >= version:
                params = _read(image)
                description["images"].append([kept, list(params), len(tensors)])
                tensors += params.values()
        for place, value in self._newest.items():  # a replacement that is itself still behind has older parameters
            tensors[place] = value

    # -- in a replacement -----------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether parameters are older than the optimizer's state, as they were at this place of the program."""
        return bool(self._newest)

    def begin(self, version: int) -> None:
        """The program is at a step boundary of ``version``."""
        self._boundaries = [(sys.maxsize, version)]

    def load(
        self, replicated: Replicated, description: dict[str, Any], tensors: Sequence[torch.Tensor], owned: bool
    ) -> None:
        """Take over the images in a donor's state, and copy to the parameters, which are the donor's newest, what they
        were at the step boundary. With ``owned`` nobody else uses ``tensors``, so they are not copied.
        """
        self._images = [
            (v, {p: t if owned else t.clone() for p, t in zip(places, tensors[at : at + len(places)], strict=True)})
            for v, places, at in description["images"]
        ]
        if self._count.ahead and self._images:
            images = [_read(image) for _, image in self._images]
            self._newest = {
                place: replicated.parameters[place].detach().clone() for params in images for place in params
            }
            for params in reversed(images):
                _put(replicated, params)

    def forward(self, replicated: Replicated) -> None:
        """The update before the present version was left out: put its parameters where they were after it."""
        if not self._newest:
            return
        version = self._count.applied
        later_images = [_read(image) for kept, image in self._images if kept > version]
        for place in self._image(version) or {}:
            later = next((params[place] for params in later_images if place in params), None)
            _put(replicated, {place: later if later is not None else self._newest[place]})
        if self._count.ahead == 0:
            self._newest = {}


def _read(image: dict[int, torch.Tensor] | SharedImage) -> dict[int, torch.Tensor]:
    return image.read() if isinstance(image, SharedImage) else image


def _put(replicated: Replicated, params: dict[int, torch.Tensor]) -> None:
    for place, value in params.items():
        replicated.parameters[place].data.copy_(value)


_NEWER = (
    "the script reads the state of {0} in a batch before that batch's update, and its replacement has it with the "
    "update in it. Read it after optimizer.step(), or set state.preimages='always': then it has what was there"
)


def _raise(reason: str) -> None:
    raise RecoveryFailed(reason)


def _grads(optimizer: Optimizer) -> list[torch.Tensor]:
    found = (p.grad for group in optimizer.param_groups for p in group["params"])
    return [local_part(grad) for grad in found if grad is not None]


def steps_as_torch(optimizer: Optimizer) -> bool:
    return str(inspect.unwrap(type(optimizer).step).__module__).startswith("torch.")


def not_attached(optimizer: Optimizer, name: str) -> ConfigError:
    """The error for an optimizer that steps what is trained, unseen. ``name`` is a parameter that it has changed."""
    return ConfigError(
        f"{type(optimizer).__name__} has stepped parameter {name}, which is attached without this optimizer, so its "
        "updates and its state would not be a replacement's: pass it to attach() or prepare(), or return it from "
        "configure_optimizers(). Of one that wraps another (Lookahead, SAM) attach the one inside, and job.register() "
        "the outer one if it also has state"
    )


class Before:
    """What an optimizer of a script's own steps, before a step. Optimizers of torch do nothing for parameters without a
    gradient, so gradients are hidden from them; one of a script may need them, or change parameters without.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._values = [
            (p, p.detach().clone(), copy.deepcopy(optimizer.state[p]) if p in optimizer.state else None)
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        for parameter, value, state in self._values:
            parameter.data.copy_(value)
            if state is None:
                self._optimizer.state.pop(parameter, None)
            else:
                mine = self._optimizer.state[parameter]
                mine.clear()
                mine.update(state)


class Updates:
    """Version of the replicated state and what happens around each update.

    Args:
        preimages: ``always``, ``never``, or ``auto``: keep parameters as they were before each update once a batch has
            had several, so that a replacement can compute what lies between two updates exactly, and state at step
            boundaries once the script changes it outside updates.
        fence: blocks until what is being copied may be changed.
        stable: gives the newest step boundary that every rank has published.
        shared: where the ranks of this machine keep parameters together; None where there are several machines.
        issued: how many collectives the program has begun.

    Attributes:
        in_batch: updates that have begun in the present batch.
    """

    def __init__(
        self,
        preimages: str = "auto",
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
        fence: Callable[[], None] = lambda: None,
        stable: Callable[[], int] = lambda: 0,
        shared: SharedImages | None = None,
        issued: Callable[[], int] = lambda: 0,
    ) -> None:
        self._before_each, self._after_each, self._fence = before, after, fence
        self._count = Count()
        #: Of the updates since the last step boundary, and of the next one.
        self._undo: Undo | None = None
        self._parts: Parts | None = None
        self._stays = False
        self.replicated: Replicated | None = None
        #: The same where others may be given it; and whether its optimizer's state is divided over the replicas.
        self._given: Replicated | None = None
        self._sharded = False
        self.outside, self.followers = ExternalMutation(preimages), Followers()
        self._images = UpdateImages(preimages, self._count, stable, self.outside, shared)
        self.gate = UpdateGate()
        self._issued, self._issued_before = issued, 0
        self.in_batch = 0
        self._begun = self._own = False
        self._hidden: dict[int, HiddenGradients] = {}
        self._clean: dict[int, list[tuple[int, int]]] = {}
        #: What was seen before steps of optimizers that are not attached, by identity.
        self._untracked_optimizers: dict[int, tuple[int, dict[str, int]]] = {}
        self._window: AbstractContextManager[Any] | None = None
        #: Before a step of an optimizer of the script's own, whose update the state contains.
        self._before_own: Before | None = None
        #: What such an optimizer keeps besides tensors, before its step.
        self._kept: Any = None
        self._refuse: Callable[[str], Any] = _raise
        self._handles: list[Any] = []

    # -- facts -------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._count.applied

    @property
    def state_version(self) -> int:
        """Updates the state contains: more than the program has made where the donor was ahead."""
        return self._count.state

    @property
    def recomputed(self) -> int:
        """Updates that this process has gone through more than once; recovery in place makes none."""
        return self._count.recomputed

    @property
    def keeps_images(self) -> bool:
        return self._images.needed

    def keep_images(self, *, at_once: bool = False) -> None:
        """Keep parameters before updates from the next boundary on, or at once (policy ``auto``)."""
        self._images.want(at_once=at_once)

    def share_images(self) -> None:
        """Call in a backward in which all ranks take part, before this one gives gradients to the others: the
        parameters are what they will be before the next update.
        """
        if self.replicated is not None:
            self._images.share(self.replicated)

    @property
    def computes_again(self) -> bool:
        """Whether a replacement has, at each place, the parameters that the failed worker had there."""
        return self.outside.active or self.keeps_images

    @property
    def exact(self) -> bool:
        """False while a replacement computes with parameters that are newer than its place in the program."""
        return self._count.ahead == 0 or self._images.behind

    def attach(
        self,
        replicated: Replicated,
        *,
        undo: bool = False,
        sharded: bool = False,
        own: bool = False,
        unoptimized: UnoptimizedParameters | None = None,
        parts: bool = False,
        summed: Collection[int] = (),
        refuse: Callable[[str], Any] | None = None,
    ) -> None:
        """Watch the optimizers of ``replicated`` from now on.

        Args:
            unoptimized: those of its parameters that no optimizer steps. Without it changes outside updates are not
                looked for.
            undo: keep what updates overwrite until the next step boundary, for :meth:`at_version`.
            sharded: the optimizer's state is divided over the replicas, so that each publishes its own. A replacement
                then runs every update that the failed worker's batch had, on its own shard, and is given the parameters
                at its step boundary, never newer ones. Updates are what is inside :meth:`update`.
            own: parameters and optimizer state are divided over the ranks: each publishes its shard, and nobody is
                given one.
            parts: parts of an update may be made before the optimizer's step, by :meth:`make_part`.
            summed: identities (``id``) of parameters whose gradients are the same on all ranks, because each calls
                :meth:`share_images` and gives its own before an update.
            refuse: ends what cannot continue; called with a reason.

        Raises:
            UnsupportedOptimizer: with ``undo`` or ``parts``, for an optimizer whose updates cannot be undone, or not
                be divided.
        """
        if self._undo is not None:
            self._undo.disarm()
        armed = Undo(replicated.optimizers) if undo and replicated.optimizers else None
        if armed is not None:
            armed.arm()
        made = Parts(replicated.optimizers[0], armed) if parts else None
        with self.gate.condition:
            self.replicated, self._given, self._sharded = replicated, None if own else replicated, sharded
            self._undo, self._parts = armed, made
            self.followers.able = not sharded and not own and made is None
            stepped = replicated.stepped()
            same = {i: p for i, p in enumerate(replicated.parameters) if id(p) in stepped}
            same = same if stepped.issubset(summed) else {}
            self._images.attach(len(replicated.optimizers), sharded, own, same=same)
            self.outside.attach(replicated, unoptimized)
            self._own, self._refuse = own, refuse or _raise
            for hidden in self._hidden.values():
                hidden.close()
            self._hidden = {
                id(each): HiddenGradients(each, partial(self._step_made, each)) for each in replicated.optimizers
            }
            self._clean.clear()
            if not self._handles and replicated.parameters:
                self._handles = [
                    register_optimizer_step_pre_hook(self._before),
                    register_optimizer_step_post_hook(self._after),
                ]

    # -- step boundaries --------------------------------------------------------------------------------

    def resume(self, boundary: int, *, images: bool, outside: bool, again: bool) -> None:
        """Replacement, at its step boundary: keep what the failed worker kept; all ranks must agree.

        Args:
            images: whether the failed worker kept parameters before each update.
            outside: whether it had seen changes outside updates.
            again: all workers were started again, perhaps with another script.
        """
        self._images.resume(images)
        watched = 0 if again else self.version
        self.outside.resume(boundary, self.version, outside, exact=not self._count.ahead, watched=watched)

    def next_batch(self) -> None:
        if self.in_batch > 1:
            self._images.want()
        self._refuse_torn()
        self.in_batch = 0
        with self.gate.condition:
            self.outside.next_batch(self.version)

    def at_boundary(self, index: int = 0, stable: int = 0) -> None:
        """Step boundary ``index`` was published; a replacement may start at ``stable`` at the earliest. Raises
        Unsupported in the middle of an update.
        """
        self._refuse_torn()
        if self.outside.active:
            self._fence()  # memory that is used again may be being copied
        with self.gate.condition:
            self.outside.at_boundary(index, self.version)
            self.outside.boundaries.drop_before(stable, reuse=not self.gate.held_now)
            self.gate.condition.notify_all()
        if self._undo is not None:
            self._undo.commit()
        self._images.at_boundary(index)

    # -- updates as they are made: the program's thread calls ----------------------------------------

    def _refuse_torn(self) -> None:
        """A batch ends. Raises Unsupported in the middle of an update."""
        if self.torn:
            raise Unsupported(
                "a batch ends after backward without optimizer.step(), but with state.overlapped_update the update has "
                "been made by then: step after each backward that synchronizes gradients, or leave the option off"
            )

    def pending_gradients(self) -> set[int]:
        """Numbers of the optimizers for which gradients were accumulated since their last update."""
        pending = set()
        for number, optimizer in enumerate(self.replicated.optimizers if self.replicated else ()):
            grads = _grads(optimizer)
            if [(id(g), g._version) for g in grads] == self._clean.get(id(optimizer), []):
                continue
            # Of shards one may be zero and another not, and all ranks must agree.
            if (grads and self._own) or any(bool(g.any()) for g in grads):
                pending.add(number)
        return pending

    def _mine(self, optimizer: Optimizer) -> bool:
        return self.replicated is not None and any(o is optimizer for o in self.replicated.optimizers)

    def _seen_by(self, optimizer: Optimizer) -> tuple[int, dict[str, int]]:
        """How many updates have been made, and the version counters of those of its parameters that are attached."""
        replicated = None if self._own else self.replicated
        return self._count.applied, {} if replicated is None else replicated.versions_in(optimizer)

    def _refuse_untracked(self, optimizer: Optimizer) -> None:
        """An optimizer that was not attached has made a step: refuse it where it has changed what is attached by
        itself. One that wraps an attached one has made the update of that.
        """
        before, now = self._untracked_optimizers.pop(id(optimizer), None), self._seen_by(optimizer)
        if before is not None and before[0] == now[0] and before[1] != now[1]:
            raise not_attached(optimizer, next(name for name in now[1] if before[1].get(name) != now[1][name]))

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if not self._mine(optimizer):
            self._untracked_optimizers[id(optimizer)] = self._seen_by(optimizer)
            return None
        # What was made early is compared with what the program's own pre-hooks have left.
        after_hooks = self._parts is not None
        return begin_after_closure(args, kwargs, lambda: self._begin_step(optimizer), after_hooks=after_hooks)

    @property
    def torn(self) -> bool:
        """Whether parts of an update have been made that is not complete."""
        return self._parts is not None and self._parts.torn

    @property
    def may_begin(self) -> bool:
        """Whether parts of the next update can be made: not where it will be left out."""
        return self._parts is not None and self._count.ahead == 0

    def make_part(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Update some parameters in place before the optimizer's step, which will make the rest. They have had no
        update since the last step, and ``gradients`` do not change until the step has ended. Blocks while the state
        is held.
        """
        assert self._parts is not None and self.replicated is not None
        if self._begun:
            self._fence()
            self.gate.begin()
        else:
            self._begin()
            self._begun = True
            self._keep_image(self.replicated.optimizers[0])
        with inject.update_window():
            self._parts.step(parameters, gradients)
        with self.gate.condition:
            self.outside.part_updated()
            self.gate.end()

    @contextmanager
    def update(self) -> Iterator[None]:
        """One update of a sharded stage is made in here: its shard is stepped, and parameters come from all shards."""
        assert self.replicated is not None
        self._begin()
        if self._images.needed:
            with self.gate.condition:
                self._images.keep(self.replicated, range(len(self.replicated.parameters)))
                self.gate.condition.notify_all()
        self._open_window()
        try:
            yield
        finally:
            self._close_window()
        with self.gate.condition:
            self._one_more()
        self._end()

    def _begin(self) -> None:
        inject.point("update.before")
        self.outside.see(pieces=True)
        self._fence()
        self.gate.begin()
        self._before_each()
        self.in_batch += 1

    def _begin_step(self, optimizer: Optimizer) -> None:
        begun, self._begun = self._begun, False
        if begun:
            self.outside.see()
            self._fence()
            self.gate.begin()
        else:
            self._begin()
        if self._parts is not None:
            self._hidden[id(optimizer)].hide(self._parts.check())
        self._issued_before = self._issued()
        if not steps_as_torch(optimizer) and any(map(is_hook_of_script, optimizer._optimizer_step_pre_hooks.values())):
            self.outside.expect()  # such a hook may look at its state, which a replacement would have newer
        self._kept = None if self.outside.active or steps_as_torch(optimizer) else kept_beside(optimizer)
        if self._count.ahead:
            # The state contains this update. Pre-hooks of the program are still to come.
            if steps_as_torch(optimizer):
                self._hidden[id(optimizer)].hide(p for group in optimizer.param_groups for p in group["params"])
            else:
                self._show_state()
                self._before_own = Before(optimizer)
        elif not begun:
            self._keep_image(optimizer)
        if not self._count.ahead:
            self.followers.begin(self._count.applied, optimizer)
        self._open_window()

    def _keep_image(self, optimizer: Optimizer) -> None:
        if self._images.needed:
            assert self.replicated is not None
            places = [self.replicated.index_of(p) for group in optimizer.param_groups for p in group["params"]]
            self._images.keep(self.replicated, places)

    def _open_window(self) -> None:
        self._window = inject.update_window()
        self._window.__enter__()

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.__exit__(None, None, None)
            self._window = None

    def _step_made(self, optimizer: Optimizer) -> None:
        """A step has ended, and the program's own post-hooks are about to see what it has made."""
        if self._kept is not None and self._kept != kept_beside(optimizer):
            # computed from the state, which a replacement that leaves this step out has newer
            self.outside.expect()
        self._kept = None
        if self._issued() != self._issued_before and self._mine(optimizer) and not steps_as_torch(optimizer):
            assert self.replicated is not None
            if self.outside.expect():
                self.replicated.divide(optimizer)
        if not self._count.ahead or not self._mine(optimizer):
            return
        with self.gate.condition:
            if self._before_own is not None:
                self._before_own.put_back()
                self._before_own = None
            self._count.left_out()
            assert self.replicated is not None
            self._images.forward(self.replicated)
        self._show_state()
        self._hide_newer_state()

    def waits(self) -> None:
        """Others are waited for. In the step of an optimizer of the script that may be until there is a replacement: it
        is given the state of its step boundary, as half an update is here. Any thread.
        """
        if self._kept is not None:
            self.outside.expect()

    def _show_state(self) -> None:
        """Undoes :meth:`_hide_newer_state`."""
        for each in self.replicated.optimizers if self.replicated is not None else ():
            if isinstance(each.state, NewerState):
                each.state = each.state.plain

    def _hide_newer_state(self) -> None:
        """While the state contains updates that the program is to make: the script does not see that of optimizers."""
        for each in self.replicated.optimizers if self._count.ahead and self.replicated is not None else ():
            if type(vars(each).get("state")) is defaultdict:
                each.state = NewerState(each.state, partial(self._refuse, _NEWER.format(type(each).__name__)))

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._mine(optimizer):
            self._refuse_untracked(optimizer)
            return
        self._close_window()
        with self.gate.condition:
            if self._parts is not None:
                self._parts.commit()
            self._one_more()
        self._clean[id(optimizer)] = [(id(g), g._version) for g in _grads(optimizer)]
        self._end()

    def _one_more(self) -> None:
        """An update is complete. Callers hold the lock."""
        self.outside.updated()
        self._count.one()
        self.followers.updated()
        self.gate.end()

    def _end(self) -> None:
        inject.point("update.after")
        self._after_each()

    # -- the state as it is given to others: recovery threads call --------------------------------

    @contextmanager
    def frozen(
        self, min_version: int, timeout_s: float, boundary: int | None = None
    ) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """State with at least ``min_version`` updates in it, and no update running; see :meth:`Replicated.export`. The
        tensors are live, or images, not to be written.

        Args:
            min_version: updates at the step boundary for which it is wanted.
            boundary: number of that step boundary; where it is kept, the state is the one at it.

        Raises:
            RecoveryFailed: if the state does not get there in time, or cannot be had because the script has changed it
                outside updates, also when the context ends.
        """
        with self.gate.condition:
            ready = self.gate.condition.wait_for(lambda: self._has(min_version, boundary), timeout=timeout_s)
            if not ready:
                raise RecoveryFailed(
                    f"the state did not get to update {min_version} within {timeout_s:.0f} s (it is at update "
                    f"{self._count.state}), so no replacement can be given it. A step hangs, or is slow: then raise "
                    "detection.wait_timeout_s"
                )
            kept = self.outside.given(boundary)
            if kept is None and boundary is not None:
                self.outside.refuse()
            self.gate.hold()
        try:
            if kept is not None:
                yield kept
                return
            self._whole()
            description, tensors = self._export()
            if self._sharded:
                yield (
                    description | {"version": min_version, "images": []},
                    self._images.parameters_at(min_version, tensors),
                )
                return
            description["version"] = self._count.state
            self._images.add_to(description, tensors, min_version)
            yield description, tensors
            if boundary is not None:
                self.outside.refuse()  # it may have been changed meanwhile
        finally:
            self.gate.release()

    def _whole(self) -> None:
        """Take back the parts of an update that cannot be completed without the replacement. The program makes them
        again when it has the others, or in ``optimizer.step()``.
        """
        if self._parts is not None and self._parts.torn:
            self._fence()
            with self.gate.condition:
                self._parts.take_back()
                self.outside.part_updated()

    def _has(self, version: int, boundary: int | None = None) -> bool:
        """Whether a replacement at ``version`` can be given the state now. Callers hold the lock."""
        if self.gate.installing:
            return False
        if self.outside.decided(boundary):
            return True  # also in the middle of an update
        if self.outside.waits(boundary):
            return False
        if self._sharded and self._images.has(version):
            return True  # also in the middle of an update, whose end may need the replacement
        return not self.gate.updating and self._count.state >= version

    def _export(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        nothing: dict[str, Any] = {"parameters": 0, "states": [], "here": True}
        return self._given.export() if self._given is not None else (nothing, [])

    @contextmanager
    def at_version(
        self, version: int, boundary: int | None = None
    ) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """State with ``version`` updates in it, as it was at step boundary ``boundary``, the last one; updates since
        then are undone, in place. Call while the gate is held. Raises RecoveryFailed if that state cannot be had.
        """
        kept = self.outside.given(boundary)
        if kept is not None:
            yield kept
            return
        if boundary is not None:
            self.outside.refuse()
        has = self._count.state
        if has < version or (has > version and self._undo is None):
            raise RecoveryFailed(f"the state contains {has} updates, but {version} were requested")
        self._whole()
        if has > version:
            assert self._undo is not None and self._given is not None
            self._fence()
            # A backward may be under way; it continues with what it has, and what it gives is not used.
            with _unsafe_preserve_version_counter(tuple(self._given.parameters)):
                self._undo.undo()
            self._count.begin(version)
        description, tensors = self._export()
        yield description | {"version": version, "images": []}, tensors

    # -- a replacement takes over a state -------------------------------------------------------------

    def begin_install(self) -> None:
        """A replacement is about to join: it is no donor until :meth:`load`."""
        self.gate.install(True)

    def stay(self) -> None:
        """This copy of the worker whose place it takes is given no state that it has, until :meth:`load`."""
        self._stays = True

    def stays_with(self, version: int) -> bool:
        """Whether it has the state of this version, and is to stay with it."""
        return self._stays and version == self._count.applied and not self._count.ahead

    def load(
        self,
        version: int,
        description: dict[str, Any] | None,
        tensors: Sequence[torch.Tensor],
        *,
        owned: bool = False,
    ) -> None:
        """Take over a donor's state at a step boundary of ``version``, in place; updates that it contains will do
        nothing. Without ``description`` it is the one that is here; with ``here`` in that it has come before.
        ``owned``: nobody else uses the tensors, so they are not copied.
        """
        self._show_state()
        with self.gate.condition:
            stays, self._stays = self._stays, False
            self._count.begin(version)
            if description is not None and self.replicated is not None:
                if not description.get("here"):
                    self.replicated.load(description, tensors, owned=owned)
                self._count.begin(version, max(0, description["version"] - version))
                if not stays:
                    self._images.load(self.replicated, description, tensors, owned)
            if not stays:
                self._images.begin(version)
            if self._undo is not None:
                self._undo.commit()
            self.gate.install(False)
        self._hide_newer_state()

    def take_back(self) -> None:
        """The last update was undone by its owner, who makes another in its place."""
        with self.gate.condition:
            self._count.take_back()
            self.followers.taken_back(self.version)
