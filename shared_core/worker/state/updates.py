"""Optimizer updates as the recovery sees them: counted, held off while a replica is copied, left out where the state
already contains them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from shared_core.worker.state.external_mutation import ExternalMutation
from shared_core.worker.state.given_state import GivenState
from shared_core.worker.state.incremental_copy import Followers
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.shared_images import SharedImages
from shared_core.worker.state.undo import Parts, Undo
from shared_core.worker.state.unoptimized import UnoptimizedParameters
from shared_core.worker.state.update_count import Count
from shared_core.worker.state.update_gate import UpdateGate
from shared_core.worker.state.update_images import UpdateImages
from shared_core.worker.state.update_steps import UpdateSteps


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
        self._fence = fence
        self._count = Count()
        self._undo: Undo | None = None
        self._stays = False
        self.replicated: Replicated | None = None
        self.outside, self.followers = ExternalMutation(preimages), Followers()
        self._images = UpdateImages(preimages, self._count, stable, self.outside, shared)
        self.gate = UpdateGate()
        self.given = GivenState(self.gate, self._count, self._images, self.outside, fence)
        self.steps = UpdateSteps(
            self.gate, self._count, self._images, self.outside, self.followers, before, after, fence, issued
        )

    # -- facts -------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Updates the program has gone through."""
        return self._count.applied

    @property
    def state_version(self) -> int:
        """Updates the state contains: in a replacement whose donor was ahead, more than the program
        has gone through.
        """
        return self._count.state

    @property
    def recomputed(self) -> int:
        """Updates that this process has gone through more than once; recovery in place makes none."""
        return self._count.recomputed

    @property
    def keeps_images(self) -> bool:
        return self._images.needed

    def keep_images(self, *, at_once: bool = False) -> None:
        """Keep parameters before each update from the next step boundary on, or at once (where the
        policy is ``auto``).
        """
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
            undo: keep what updates overwrite until the next step boundary, for :meth:`GivenState.at_version`.
            sharded: the optimizer's state is divided over the replicas, so that each publishes its own. A replacement
                then runs every update that the failed worker's batch had, on its own shard, and is given the parameters
                at its step boundary, never newer ones. Updates are what is inside :meth:`UpdateSteps.update`.
            own: parameters and optimizer state are divided over the ranks: each publishes its shard, and nobody is
                given one.
            parts: parts of an update may be made before the optimizer's step, by :meth:`UpdateSteps.make_part`.
            summed: identities (``id``) of parameters whose gradients are the same on all ranks, because each calls
                :meth:`share_images` and gives its own before an update.
            refuse: ends what cannot continue; called with a reason.

        Raises:
            UnsupportedOptimizer: with ``undo`` or ``parts``, for an optimizer whose updates cannot be undone, or not
                be divided.
        """
        if self._undo is not None:
            self._undo.disarm()
            self._undo = None
        if undo and replicated.optimizers:
            self._undo = Undo(replicated.optimizers)
            self._undo.arm()
        made = Parts(replicated.optimizers[0], self._undo) if parts else None
        with self.gate.condition:
            self.replicated = replicated
            self.followers.able = not sharded and not own and made is None
            stepped = replicated.stepped()
            same = {i: p for i, p in enumerate(replicated.parameters) if id(p) in stepped}
            same = same if stepped.issubset(summed) else {}
            self._images.attach(len(replicated.optimizers), sharded, own, same=same)
            self.given.attach(None if own else replicated, sharded, self._undo, made)
            self.outside.attach(replicated, unoptimized)
            self.steps.attach(replicated, made, own, refuse)

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
        if self.steps.in_batch > 1:
            self._images.want()
        self.steps.next_batch()
        with self.gate.condition:
            self.outside.next_batch(self.version)

    def at_boundary(self, index: int = 0, stable: int = 0) -> None:
        """Step boundary ``index`` was published; a replacement may start at ``stable`` at the earliest. Raises
        Unsupported in the middle of an update.
        """
        self.steps.refuse_torn()
        if self.outside.active:
            self._fence()  # memory that is used again may be being copied
        with self.gate.condition:
            self.outside.at_boundary(index, self.version)
            self.outside.boundaries.drop_before(stable, reuse=not self.gate.held_now)
            self.gate.condition.notify_all()
        if self._undo is not None:
            self._undo.commit()
        self._images.at_boundary(index)

    # -- a replacement takes over a state -------------------------------------------------------------

    def begin_install(self) -> None:
        """A replacement is about to join: it is no donor until :meth:`load`."""
        self.gate.install(True)

    def stay(self) -> None:
        """This process is a copy of the worker whose place it takes: it is given no state that it has, until
        :meth:`load`.
        """
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
        """Take over a donor's state at a step boundary of ``version``, in place; updates that the state already
        contains will do nothing.

        Args:
            description: of the state; None for the one that is here. With ``here`` the state has come before.
            owned: nobody else uses the tensors, so they are not copied.
        """
        self.steps.show_state()
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
        self.steps.hide_newer_state()

    def take_back(self) -> None:
        """The last update was undone by its owner, who makes another in its place."""
        with self.gate.condition:
            self._count.take_back()
            self.followers.taken_back(self.version)
