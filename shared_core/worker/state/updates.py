"""Optimizer updates as the recovery sees them: counted, held off while a replica is copied, left out where the
state already contains them.

Steps are seen through torch's public global optimizer hooks. An update begins when the step's closure has returned
(Lightning runs forward and backward inside it).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shared_core.errors import RecoveryFailed
from shared_core.faults import inject
from shared_core.worker.state.following import Followers
from shared_core.worker.state.outside_changes import Outside
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.undo import Arguments, Undo, begin_after_closure
from shared_core.worker.state.unstepped import Loose

#: (version before the update, parameters before it by place)
PreImage = tuple[int, dict[int, torch.Tensor]]


class Updates:
    """Version of the replicated state and what happens around each update.

    Attributes:
        recomputed: updates that this process has gone through more than once; recovery in place makes none.
        outside: changes that the script makes outside updates.
        followers: copies of the state that are made while updates go on.

    Args:
        preimages: ``always``, ``never``, or ``auto``: keep parameters as they were before each update once a batch
            has had several, so that a newcomer can compute
            what lies between two updates exactly, and state at batch tops once the script changes it outside updates.
        after: called after each update.
        fence: returns when what is being copied may be changed.
    """

    def __init__(
        self,
        preimages: str = "auto",
        *,
        after: Callable[[], None] = lambda: None,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy, self._after_each, self._fence = preimages, after, fence
        self._condition = threading.Condition()
        self._updating = False
        self._installing = False
        self._frozen = 0
        self._skip = 0
        self._applied = 0
        self._highest = 0
        self.recomputed = 0
        self._in_batch = 0
        self._several = False
        self._sharded = False
        self._wants_images = False
        self._images: list[PreImage] = []
        self._newest: dict[int, torch.Tensor] = {}
        self._versions_at_tops: list[int] = []
        self._stash: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._clean: dict[int, list[tuple[int, int]]] = {}
        self._window: AbstractContextManager[Any] | None = None
        self.replicated: Replicated | None = None
        self.outside, self.followers = Outside(preimages), Followers()
        self._undo: Undo | None = None
        self._handles: list[Any] = []

    # -- facts -------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Updates the program has gone through."""
        return self._applied

    @property
    def state_version(self) -> int:
        """Updates the state contains: in a newcomer whose donor was ahead, more than the program has gone through."""
        return self._applied + self._skip

    @property
    def keeps_images(self) -> bool:
        """Whether parameters are kept before each update."""
        if self.outside.active:
            return False  # newcomers are given no newer ones
        # Of a sharded stage a replica has nothing else to give: see attach().
        return self._policy == "always" or (self._several and (self._policy == "auto" or self._sharded))

    def keep_images(self, *, at_once: bool = False) -> None:
        """Keep parameters before each update from the next batch top on, or at once (where the policy is ``auto``)."""
        self._wants_images = True
        self._several = self._several or at_once

    @property
    def computes_again(self) -> bool:
        """Whether a newcomer has, at each place, the parameters that its predecessor had there."""
        return self.outside.active or self.keeps_images

    @property
    def exact(self) -> bool:
        """False while a newcomer computes with parameters that are newer than its place in the program."""
        return self._skip == 0 or bool(self._newest)

    def attach(
        self, replicated: Replicated, *, undo: bool = False, sharded: bool = False, loose: Loose | None = None
    ) -> None:
        """Watch the optimizers of ``replicated`` from now on.

        Args:
            replicated: what is trained.
            loose: those of its parameters that no optimizer steps. Without it changes outside updates are not looked
                for.
            undo: keep what updates overwrite until the next batch top, for :meth:`at_version`.
            sharded: the optimizer's state is divided over the replicas, so that each publishes its own. A newcomer
                then runs every update that its predecessor's batch had, on its own shard, and is given the parameters
                at its batch top, never newer ones. Updates are what is inside :meth:`update`.

        Raises:
            UnsupportedOptimizer: with ``undo``, for an optimizer whose updates cannot be undone.
        """
        if self._undo is not None:
            self._undo.disarm()
            self._undo = None
        if undo and replicated.optimizers:
            self._undo = Undo(replicated.optimizers)
            self._undo.arm()
        with self._condition:
            self.replicated = replicated
            self._sharded = sharded
            self.followers.able = not sharded
            self._several = self._several or len(replicated.optimizers) > 1
            self._clean.clear()
            self.outside.attach(replicated, loose)
            if not self._handles and replicated.optimizers:
                self._handles = [
                    register_optimizer_step_pre_hook(self._before),
                    register_optimizer_step_post_hook(self._after),
                ]

    def resume(self, top: int, *, images: bool, outside: bool, again: bool) -> None:
        """Newcomer, at its batch top: keep what the predecessor kept; all ranks must agree.

        Args:
            top: its number.
            images: whether the predecessor kept parameters before each update.
            outside: whether it had seen changes outside updates.
            again: all workers were started again, perhaps with another script.
        """
        self._several = images
        watched = 0 if again else self._applied
        self.outside.resume(top, self._applied, outside, exact=not self._skip, watched=watched)

    def next_batch(self) -> None:
        """A batch begins, at a recovery point or not."""
        self._wants_images = self._wants_images or self._in_batch > 1
        self._in_batch = 0
        with self._condition:
            self.outside.next_batch(self._applied)

    def at_top(self, index: int = 0, stable: int = 0) -> None:
        """A batch top was published: images older than the one before it cannot be asked for any more.

        Args:
            index: number of the batch top.
            stable: batch top from which a newcomer may start at the earliest.
        """
        self._several = self._several or self._wants_images
        if self.outside.active:
            self._fence()  # memory that is used again may be being copied
        with self._condition:
            self.outside.at_top(index, self._applied)
            self.outside.tops.drop_before(stable, reuse=self._frozen == 0)
            self._condition.notify_all()
        if self._undo is not None:
            self._undo.commit()
        self._versions_at_tops.append(self._applied)
        del self._versions_at_tops[:-2]
        self._images = [image for image in self._images if image[0] >= self._versions_at_tops[0]]

    def pending_gradients(self) -> bool:
        """Whether gradients were accumulated since the last update of their optimizer."""
        for optimizer in self.replicated.optimizers if self.replicated else ():
            grads = _grads(optimizer)
            if [(id(g), g._version) for g in grads] != self._clean.get(id(optimizer), []) and any(
                bool(g.any()) for g in grads
            ):
                return True
        return False

    # -- copying -----------------------------------------------------------------------------------

    @contextmanager
    def frozen(
        self, min_version: int, timeout_s: float, top: int | None = None
    ) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """State with at least ``min_version`` updates in it, and no update running; see :meth:`Replicated.export`.

        Args:
            min_version: updates at the batch top for which it is wanted.
            timeout_s: longest wait for it.
            top: number of that batch top; where it is kept, the state is the one at it.

        Raises:
            RecoveryFailed: if the state does not get there in time, or cannot be had because the script has changed it
                outside updates.
        """
        with self._condition:
            ready = self._condition.wait_for(lambda: self._has(min_version, top), timeout=timeout_s)
            if not ready:
                raise RecoveryFailed(
                    f"waited {timeout_s:.0f} s for the state to contain {min_version} updates; it has "
                    f"{self.state_version}"
                )
            kept = self.outside.given(top)
            if kept is None and top is not None:
                self.outside.refuse()
            self._frozen += 1
        try:
            if kept is not None:
                yield kept
                return
            nothing: dict[str, Any] = {"parameters": 0, "states": [], "tensors": []}
            description, tensors = self.replicated.export() if self.replicated is not None else (nothing, [])
            if self._sharded:
                yield description | {"version": min_version, "images": []}, self._parameters_at(min_version, tensors)
                return
            description["version"] = self.state_version
            images = [(version, params) for version, params in self._images if version >= min_version]
            description["images"] = []
            for version, params in images:
                description["images"].append([version, list(params), len(tensors)])
                tensors += params.values()
            if self._newest:  # a newcomer that is itself still behind: its parameters are not the newest
                for place, value in self._newest.items():
                    tensors[place] = value
            yield description, tensors
            if top is not None:
                self.outside.refuse()  # it may have been changed meanwhile
        finally:
            with self._condition:
                self._frozen -= 1
                self._condition.notify_all()

    def _has(self, version: int, top: int | None = None) -> bool:
        """Whether a newcomer that starts at ``version`` can be given the state now."""
        if self._installing:
            return False
        if self.outside.decided(top):
            return True  # also in the middle of an update
        if self.outside.waits(top):
            return False
        if self._sharded and self._image(version) is not None:
            return True  # also in the middle of an update, whose end may need the newcomer
        return not self._updating and self.state_version >= version

    def _image(self, version: int) -> dict[int, torch.Tensor] | None:
        return next((params for kept, params in self._images if kept == version), None)

    def _parameters_at(self, version: int, newest: list[torch.Tensor]) -> list[torch.Tensor]:
        image = self._image(version)
        if image is not None:
            return list(image.values())
        if self._applied != version:
            raise RecoveryFailed(
                f"the parameters before update {version + 1} are no longer kept: there have been {self._applied}"
            )
        return newest

    @contextmanager
    def held(self) -> Iterator[None]:
        """No update runs in here."""
        with self._condition:
            self._condition.wait_for(lambda: not self._updating)
            self._frozen += 1
        try:
            yield
        finally:
            with self._condition:
                self._frozen -= 1
                self._condition.notify_all()

    @contextmanager
    def at_version(self, version: int, top: int | None = None) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """State with ``version`` updates in it, as it was at the last batch top; updates since then are undone.

        Call inside :meth:`held`.

        Args:
            version: updates at the batch top.
            top: its number.

        Raises:
            RecoveryFailed: if that state cannot be had.
        """
        kept = self.outside.given(top)
        if kept is not None:
            yield kept
            return
        if top is not None:
            self.outside.refuse()
        if self.state_version < version or (self.state_version > version and self._undo is None):
            raise RecoveryFailed(f"the state contains {self.state_version} updates, but {version} were requested")
        if self.state_version > version:
            assert self._undo is not None and self.replicated is not None
            self._fence()
            # A backward may be under way; it goes on with what it has, and what it gives is not used.
            with _unsafe_preserve_version_counter(tuple(self.replicated.parameters)):
                self._undo.undo()
            self._applied, self._skip = version, 0
        nothing: dict[str, Any] = {"parameters": 0, "states": [], "tensors": []}
        description, tensors = self.replicated.export() if self.replicated is not None else (nothing, [])
        yield description | {"version": version, "images": []}, tensors

    def begin_install(self) -> None:
        """A newcomer is about to join: it is no donor until :meth:`load`."""
        self._installing = True

    def load(
        self,
        version: int,
        description: dict[str, Any] | None,
        tensors: Sequence[torch.Tensor],
        *,
        owned: bool = False,
    ) -> None:
        """Take over a donor's state at a batch top of ``version``; updates that the state already contains will do
        nothing.

        Args:
            version: updates at the batch top.
            description: of the state; None for the one that is here. With ``here`` the state has come before.
            tensors: of the state.
            owned: nobody else uses them.
        """
        with self._condition:
            self._applied = version
            self._skip = 0
            if description is not None and self.replicated is not None:
                if not description.get("here"):
                    self.replicated.load(description, tensors, owned=owned)
                self._skip = max(0, description["version"] - version)
                self._images = [
                    (
                        v,
                        {
                            p: t if owned else t.clone()
                            for p, t in zip(places, tensors[at : at + len(places)], strict=True)
                        },
                    )
                    for v, places, at in description["images"]
                ]
                if self._skip and self._images:
                    self._newest = {
                        place: self.replicated.parameters[place].detach().clone()
                        for _, params in self._images
                        for place in params
                    }
                    for _, params in reversed(self._images):
                        self._put(params)
            self._versions_at_tops = [version]
            if self._undo is not None:
                self._undo.commit()
            self._installing = False
            self._condition.notify_all()

    def _put(self, params: dict[int, torch.Tensor]) -> None:
        assert self.replicated is not None
        for place, value in params.items():
            self.replicated.parameters[place].data.copy_(value)

    def take_back(self) -> None:
        """The last update was undone by its owner, who makes another in its place."""
        with self._condition:
            self._applied -= 1
            self._highest = self._applied
            self.followers.taken_back(self._applied)

    # -- hooks -------------------------------------------------------------------------------------

    def _mine(self, optimizer: Optimizer) -> bool:
        return self.replicated is not None and any(o is optimizer for o in self.replicated.optimizers)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if not self._mine(optimizer):
            return None
        return begin_after_closure(args, kwargs, lambda: self._begin_step(optimizer))

    @contextmanager
    def update(self) -> Iterator[None]:
        """One update of a sharded stage is made in here: its shard is stepped, and parameters come from all shards."""
        assert self.replicated is not None
        self._begin()
        if self.keeps_images:
            with self._condition:
                self._keep(range(len(self.replicated.parameters)))
                self._condition.notify_all()
        self._open_window()
        try:
            yield
        finally:
            self._close_window()
        with self._condition:
            self._count()
        self._end()

    def _begin(self) -> None:
        inject.point("update.before")
        self.outside.see(pieces=True)
        self._fence()
        with self._condition:
            self._condition.wait_for(lambda: self._frozen == 0)
            self._updating = True
        self._in_batch += 1

    def _begin_step(self, optimizer: Optimizer) -> None:
        self._begin()
        if self._skip:
            # The state contains this update: without gradients, torch's optimizers leave every parameter alone.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._stash.append((parameter, parameter.grad))
                        parameter.grad = None
        elif self.keeps_images:
            assert self.replicated is not None
            self._keep([self.replicated.index_of(p) for group in optimizer.param_groups for p in group["params"]])
        if not self._skip:
            self.followers.begin(self._applied, optimizer)
        self._open_window()

    def _keep(self, places: Iterable[int]) -> None:
        assert self.replicated is not None
        self._images.append((self._applied, {i: self.replicated.parameters[i].detach().clone() for i in places}))

    def _open_window(self) -> None:
        self._window = inject.update_window()
        self._window.__enter__()

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.__exit__(None, None, None)
            self._window = None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._mine(optimizer):
            return
        self._close_window()
        with self._condition:
            if self._skip:
                for parameter, grad in self._stash:
                    parameter.grad = grad
                self._stash.clear()
                self._skip -= 1
                if self._newest:
                    self._forward_images()
            self._count()
        self._clean[id(optimizer)] = [(id(g), g._version) for g in _grads(optimizer)]
        self._end()

    def _count(self) -> None:
        """Under the lock: an update is complete."""
        self.outside.updated()
        self._applied += 1
        self.followers.updated()
        if self._applied <= self._highest:
            self.recomputed += 1  # went through an update it had been through before
        self._highest = max(self._highest, self._applied)
        self._updating = False
        self._condition.notify_all()

    def _end(self) -> None:
        inject.point("update.after")
        self._after_each()

    def _forward_images(self) -> None:
        """An update was left out: put its parameters where they were after it."""
        done = next((params for version, params in self._images if version == self._applied), {})
        for place in done:
            later = next(
                (params[place] for version, params in self._images if version > self._applied and place in params), None
            )
            self._put({place: later if later is not None else self._newest[place]})
        if self._skip == 0:
            self._newest = {}


def _grads(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
