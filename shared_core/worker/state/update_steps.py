"""What happens around each update of the optimizers, whole or made in parts.

Steps are seen through torch's public global optimizer hooks. An update begins when the step's closure has returned
(Lightning runs forward and backward inside it).
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shared_core.errors import RecoveryFailed, Unsupported
from shared_core.faults import inject
from shared_core.worker.sharded.local import local_part
from shared_core.worker.state.external_mutation import ExternalMutation
from shared_core.worker.state.incremental_copy import Followers
from shared_core.worker.state.newer_state import NewerState, kept_beside
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.support import not_attached
from shared_core.worker.state.undo import Arguments, HiddenGradients, Parts, begin_after_closure
from shared_core.worker.state.update_count import Count
from shared_core.worker.state.update_gate import UpdateGate
from shared_core.worker.state.update_images import UpdateImages
from shared_core.worker.variables.hooks import is_hook_of_script


class UpdateSteps:
    """Updates as they are made: held off while the state is copied, left out where the state contains them. The
    program's thread calls.

    Args:
        fence: blocks until what is being copied may be changed.
        issued: how many collectives the program has begun.

    Attributes:
        in_batch: updates that have begun in the present batch.
    """

    def __init__(
        self,
        gate: UpdateGate,
        count: Count,
        images: UpdateImages,
        outside: ExternalMutation,
        followers: Followers,
        before: Callable[[], None],
        after: Callable[[], None],
        fence: Callable[[], None],
        issued: Callable[[], int],
    ) -> None:
        self._gate, self._count, self._images, self._outside = gate, count, images, outside
        self._followers, self._before_each, self._after_each, self._fence = followers, before, after, fence
        self._issued = issued
        self._issued_before = 0
        self.in_batch = 0
        self._begun = self._own = False
        self._parts: Parts | None = None
        self._replicated: Replicated | None = None
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

    def attach(
        self, replicated: Replicated, parts: Parts | None, own: bool = False, refuse: Callable[[str], Any] | None = None
    ) -> None:
        """Watch the optimizers of ``replicated`` from now on. ``parts`` is given where parts of an update may be made
        early; ``own``: the state is divided over the ranks; ``refuse`` ends what cannot continue, for a reason.
        """
        self._own, self._refuse = own, refuse or _raise
        for hidden in self._hidden.values():
            hidden.close()
        self._hidden = {
            id(each): HiddenGradients(each, partial(self._step_made, each)) for each in replicated.optimizers
        }
        self._replicated, self._parts = replicated, parts
        self._clean.clear()
        if not self._handles and replicated.parameters:
            self._handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]

    def next_batch(self) -> None:
        """A batch begins; see :meth:`refuse_torn`."""
        self.refuse_torn()
        self.in_batch = 0

    def refuse_torn(self) -> None:
        """A batch ends. Raises Unsupported in the middle of an update."""
        if self.torn:
            raise Unsupported(
                "a batch ends after backward without optimizer.step(), but with state.overlapped_update the update has "
                "been made by then: step after each backward that synchronizes gradients, or leave the option off"
            )

    def pending_gradients(self) -> set[int]:
        """Numbers of the optimizers for which gradients were accumulated since their last update."""
        pending = set()
        for number, optimizer in enumerate(self._replicated.optimizers if self._replicated else ()):
            grads = _grads(optimizer)
            if [(id(g), g._version) for g in grads] == self._clean.get(id(optimizer), []):
                continue
            # Of shards one may be zero and another not, and all ranks must agree.
            if (grads and self._own) or any(bool(g.any()) for g in grads):
                pending.add(number)
        return pending

    # -- a whole update ----------------------------------------------------------------------------

    def _mine(self, optimizer: Optimizer) -> bool:
        return self._replicated is not None and any(o is optimizer for o in self._replicated.optimizers)

    def _seen_by(self, optimizer: Optimizer) -> tuple[int, dict[str, int]]:
        """How many updates have been made, and the version counters of those of its parameters that are attached."""
        replicated = None if self._own else self._replicated
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
        """Update some parameters in place before the optimizer's step, which will make the rest. They have had no
        update since the last step, and ``gradients`` do not change until the step has ended. Blocks while the state
        is held.
        """
        assert self._parts is not None and self._replicated is not None
        if self._begun:
            self._fence()
            self._gate.begin()
        else:
            self._begin()
            self._begun = True
            self._keep_image(self._replicated.optimizers[0])
        with inject.update_window():
            self._parts.step(parameters, gradients)
        with self._gate.condition:
            self._outside.part_updated()
            self._gate.end()

    @contextmanager
    def update(self) -> Iterator[None]:
        """One update of a sharded stage is made in here: its shard is stepped, and parameters come from all shards."""
        assert self._replicated is not None
        self._begin()
        if self._images.needed:
            with self._gate.condition:
                self._images.keep(self._replicated, range(len(self._replicated.parameters)))
                self._gate.condition.notify_all()
        self._open_window()
        try:
            yield
        finally:
            self._close_window()
        with self._gate.condition:
            self._one_more()
        self._end()

    def _begin(self) -> None:
        inject.point("update.before")
        self._outside.see(pieces=True)
        self._fence()
        self._gate.begin()
        self._before_each()
        self.in_batch += 1

    def _begin_step(self, optimizer: Optimizer) -> None:
        begun, self._begun = self._begun, False
        if begun:
            self._outside.see()
            self._fence()
            self._gate.begin()
        else:
            self._begin()
        if self._parts is not None:
            self._hidden[id(optimizer)].hide(self._parts.check())
        self._issued_before = self._issued()
        if not steps_as_torch(optimizer) and any(map(is_hook_of_script, optimizer._optimizer_step_pre_hooks.values())):
            self._outside.expect()  # such a hook may look at its state, which a replacement would have newer
        self._kept = None if self._outside.active or steps_as_torch(optimizer) else kept_beside(optimizer)
        if self._count.ahead:
            # The state contains this update. Pre-hooks of the program are still to come.
            if steps_as_torch(optimizer):
                self._hidden[id(optimizer)].hide(p for group in optimizer.param_groups for p in group["params"])
            else:
                self.show_state()
                self._before_own = Before(optimizer)
        elif not begun:
            self._keep_image(optimizer)
        if not self._count.ahead:
            self._followers.begin(self._count.applied, optimizer)
        self._open_window()

    def _keep_image(self, optimizer: Optimizer) -> None:
        if self._images.needed:
            assert self._replicated is not None
            places = [self._replicated.index_of(p) for group in optimizer.param_groups for p in group["params"]]
            self._images.keep(self._replicated, places)

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
            self._outside.expect()
        self._kept = None
        if self._issued() != self._issued_before and self._mine(optimizer) and not steps_as_torch(optimizer):
            assert self._replicated is not None
            if self._outside.expect():
                self._replicated.divide(optimizer)
        if not self._count.ahead or not self._mine(optimizer):
            return
        with self._gate.condition:
            if self._before_own is not None:
                self._before_own.put_back()
                self._before_own = None
            self._count.left_out()
            assert self._replicated is not None
            self._images.forward(self._replicated)
        self.show_state()
        self.hide_newer_state()

    def waits(self) -> None:
        """Others are waited for. In the step of an optimizer of the script that may be until there is a replacement: it
        is given the state of its step boundary, as half an update is here. Any thread.
        """
        if self._kept is not None:
            self._outside.expect()

    def show_state(self) -> None:
        """Undoes :meth:`hide_newer_state`."""
        for each in self._replicated.optimizers if self._replicated is not None else ():
            if isinstance(each.state, NewerState):
                each.state = each.state.plain

    def hide_newer_state(self) -> None:
        """While the state contains updates that the program is to make: the script does not see that of optimizers."""
        for each in self._replicated.optimizers if self._count.ahead and self._replicated is not None else ():
            if type(vars(each).get("state")) is defaultdict:
                each.state = NewerState(each.state, partial(self._refuse, _NEWER.format(type(each).__name__)))

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._mine(optimizer):
            self._refuse_untracked(optimizer)
            return
        self._close_window()
        with self._gate.condition:
            if self._parts is not None:
                self._parts.commit()
            self._one_more()
        self._clean[id(optimizer)] = [(id(g), g._version) for g in _grads(optimizer)]
        self._end()

    def _one_more(self) -> None:
        """An update is complete. Callers hold the lock."""
        self._outside.updated()
        self._count.one()
        self._followers.updated()
        self._gate.end()

    def _end(self) -> None:
        inject.point("update.after")
        self._after_each()


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
    """Whether its step is one of torch's own."""
    return str(inspect.unwrap(type(optimizer).step).__module__).startswith("torch.")


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
        """The step was made: take it back."""
        for parameter, value, state in self._values:
            parameter.data.copy_(value)
            if state is None:
                self._optimizer.state.pop(parameter, None)
            else:
                mine = self._optimizer.state[parameter]
                mine.clear()
                mine.update(state)
