"""Optimizer updates as the recovery sees them: counted, held off while a replica is copied, left out where the
state already contains them.

Steps are seen through torch's public global optimizer hooks. An update begins when the step's closure has returned
(Lightning runs forward and backward inside it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shared_core.errors import Unsupported
from shared_core.faults import inject
from shared_core.worker.state.given_state import GivenState
from shared_core.worker.state.outside_changes import Outside
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.undo import Arguments, HiddenGradients, Parts, Undo, begin_after_closure
from shared_core.worker.state.unstepped import Loose
from shared_core.worker.state.update_count import Count
from shared_core.worker.state.update_gate import Gate
from shared_core.worker.state.update_images import UpdateImages


class Updates:
    """Version of the replicated state and what happens around each update.

    Attributes:
        replicated: what is trained; None before :meth:`attach`.
        outside: changes that the script makes outside updates.
        gate: keeps updates away from the state.
        given: the state as others are given it.

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
        self._after_each, self._fence = after, fence
        self._count = Count()
        self._images = UpdateImages(preimages, self._count)
        self._in_batch = 0
        self._hidden: dict[int, HiddenGradients] = {}
        self._clean: dict[int, list[tuple[int, int]]] = {}
        self._window: AbstractContextManager[Any] | None = None
        self._undo: Undo | None = None
        self._parts: Parts | None = None
        self._begun = False
        self._handles: list[Any] = []
        self.replicated: Replicated | None = None
        self.outside = Outside(preimages)
        self.gate = Gate()
        self.given = GivenState(self.gate, self._count, self._images, self.outside, fence)

    # -- facts -------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Updates the program has gone through."""
        return self._count.applied

    @property
    def state_version(self) -> int:
        """Updates the state contains: in a newcomer whose donor was ahead, more than the program has gone through."""
        return self._count.state

    @property
    def recomputed(self) -> int:
        """Updates that this process has gone through more than once; recovery in place makes none."""
        return self._count.recomputed

    @property
    def keeps_images(self) -> bool:
        """Whether parameters are kept before each update."""
        return not self.outside.active and self._images.kept  # else newcomers are given no newer ones

    def keep_images(self, *, at_once: bool = False) -> None:
        """Keep parameters before each update from the next batch top on, or at once (where the policy is ``auto``)."""
        self._images.want(at_once=at_once)

    @property
    def computes_again(self) -> bool:
        """Whether a newcomer has, at each place, the parameters that its predecessor had there."""
        return self.outside.active or self.keeps_images

    @property
    def exact(self) -> bool:
        """False while a newcomer computes with parameters that are newer than its place in the program."""
        return self._count.ahead == 0 or self._images.behind

    def attach(
        self,
        replicated: Replicated,
        *,
        undo: bool = False,
        sharded: bool = False,
        loose: Loose | None = None,
        parts: bool = False,
    ) -> None:
        """Watch the optimizers of ``replicated`` from now on.

        Args:
            replicated: what is trained.
            loose: those of its parameters that no optimizer steps. Without it changes outside updates are not looked
                for.
            undo: keep what updates overwrite until the next batch top, for :meth:`GivenState.at_version`.
            sharded: the optimizer's state is divided over the replicas, so that each publishes its own. A newcomer
                then runs every update that its predecessor's batch had, on its own shard, and is given the parameters
                at its batch top, never newer ones. Updates are what is inside :meth:`update`.
            parts: parts of an update may be made before the optimizer's step, by :meth:`make_part`.

        Raises:
            UnsupportedOptimizer: with ``undo`` or ``parts``, for an optimizer whose updates cannot be undone, or not be
                divided.
        """
        if self._undo is not None:
            self._undo.disarm()
            self._undo = None
        if undo and replicated.optimizers:
            self._undo = Undo(replicated.optimizers)
            self._undo.arm()
        for hidden in self._hidden.values():
            hidden.close()
        self._hidden = {id(optimizer): HiddenGradients(optimizer) for optimizer in replicated.optimizers}
        self._parts = Parts(replicated.optimizers[0], self._undo) if parts else None
        with self.gate.condition:
            self.replicated = replicated
            self._images.attach(len(replicated.optimizers), sharded)
            self.given.attach(replicated, sharded, self._undo, self._parts)
            self._clean.clear()
            self.outside.attach(replicated, loose)
            if not self._handles and replicated.optimizers:
                self._handles = [
                    register_optimizer_step_pre_hook(self._before),
                    register_optimizer_step_post_hook(self._after),
                ]

    # -- batch tops --------------------------------------------------------------------------------

    def resume(self, top: int, *, images: bool, outside: bool, again: bool) -> None:
        """Newcomer, at its batch top: keep what the predecessor kept; all ranks must agree.

        Args:
            top: its number.
            images: whether the predecessor kept parameters before each update.
            outside: whether it had seen changes outside updates.
            again: all workers were started again, perhaps with another script.
        """
        self._images.resume(images)
        watched = 0 if again else self.version
        self.outside.resume(top, self.version, outside, exact=not self._count.ahead, watched=watched)

    def next_batch(self) -> None:
        """A batch begins, at a recovery point or not."""
        self._refuse_torn()
        if self._in_batch > 1:
            self._images.want()
        self._in_batch = 0
        with self.gate.condition:
            self.outside.next_batch(self.version)

    def at_top(self, index: int = 0, stable: int = 0) -> None:
        """A batch top was published: images older than the one before it cannot be asked for any more.

        Args:
            index: number of the batch top.
            stable: batch top from which a newcomer may start at the earliest.
        """
        self._refuse_torn()
        if self.outside.active:
            self._fence()  # memory that is used again may be being copied
        with self.gate.condition:
            self.outside.at_top(index, self.version)
            self.outside.tops.drop_before(stable, reuse=not self.gate.held_now)
            self.gate.condition.notify_all()
        if self._undo is not None:
            self._undo.commit()
        self._images.at_top()

    def _refuse_torn(self) -> None:
        if self.torn:
            raise Unsupported(
                "a batch ends after backward without optimizer.step(), but with state.overlapped_update the update has "
                "been made by then: step after each backward that synchronizes gradients, or leave the option off"
            )

    def pending_gradients(self) -> bool:
        """Whether gradients were accumulated since the last update of their optimizer."""
        for optimizer in self.replicated.optimizers if self.replicated else ():
            grads = _grads(optimizer)
            if [(id(g), g._version) for g in grads] != self._clean.get(id(optimizer), []) and any(
                bool(g.any()) for g in grads
            ):
                return True
        return False

    # -- a newcomer takes over a state -------------------------------------------------------------

    def begin_install(self) -> None:
        """A newcomer is about to join: it is no donor until :meth:`load`."""
        self.gate.install(True)

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
            description: of the state; None for the one that is here.
            tensors: of the state.
            owned: nobody else uses them.
        """
        with self.gate.condition:
            self._count.begin(version)
            if description is not None and self.replicated is not None:
                self.replicated.load(description, tensors, owned=owned)
                self._count.begin(version, max(0, description["version"] - version))
                self._images.load(self.replicated, description, tensors, owned)
            self._images.begin(version)
            if self._undo is not None:
                self._undo.commit()
            self.gate.install(False)

    def take_back(self) -> None:
        """The last update was undone by its owner, who makes another in its place."""
        with self.gate.condition:
            self._count.take_back()

    # -- hooks -------------------------------------------------------------------------------------

    def _mine(self, optimizer: Optimizer) -> bool:
        return self.replicated is not None and any(o is optimizer for o in self.replicated.optimizers)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if not self._mine(optimizer):
            return None
        # What was made early is compared with what the program's own pre-hooks have left.
        after_hooks = self._parts is not None
        return begin_after_closure(args, kwargs, lambda: self._begin_step(optimizer), after_hooks=after_hooks)

    # -- updates made in parts ---------------------------------------------------------------------

    @property
    def torn(self) -> bool:
        """Whether parts of an update have been made that is not complete."""
        return self._parts is not None and self._parts.torn

    @property
    def may_begin(self) -> bool:
        """Whether parts of the next update can be made: not where it will be left out."""
        return self._parts is not None and self._count.ahead == 0

    def make_part(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Update some parameters before the optimizer's step, which will make the rest.

        Args:
            parameters: that have had no update since the last step.
            gradients: theirs, which do not change until the step has ended.
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
        if self.keeps_images:
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
        self._in_batch += 1

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
        if self._count.ahead:
            # The state contains this update.
            self._hidden[id(optimizer)].hide(p for group in optimizer.param_groups for p in group["params"])
        elif not begun:
            self._keep_image(optimizer)
        self._open_window()

    def _keep_image(self, optimizer: Optimizer) -> None:
        if self.keeps_images:
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

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._mine(optimizer):
            return
        self._close_window()
        with self.gate.condition:
            if self._count.ahead:
                self._count.left_out()
                assert self.replicated is not None
                self._images.forward(self.replicated)
            if self._parts is not None:
                self._parts.commit()
            self._one_more()
        self._clean[id(optimizer)] = [(id(g), g._version) for g in _grads(optimizer)]
        self._end()

    def _one_more(self) -> None:
        """Under the lock: an update is complete."""
        self.outside.updated()
        self._count.one()
        self.gate.end()

    def _end(self) -> None:
        inject.point("update.after")
        self._after_each()


def _grads(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
