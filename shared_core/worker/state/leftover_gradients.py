"""Gradients that a batch leaves behind: state of the step boundary where the next batch adds to them.

Most programs zero them first. Then they are no state, and copying them at each boundary would cost time for nothing. So
they are published until the smallest parameter of each group has shown what the program does with them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shared_core.worker.state.replicated import Replicated


class _GradientGroup:
    """Parameters, by place, of one model that the same optimizers, by number, step: zeroed together."""

    def __init__(self, optimizers: Collection[int], members: Mapping[int, torch.Tensor]) -> None:
        self._optimizers, self._members = frozenset(optimizers), members
        #: Whether the program zeroes them first: where they have changed since their update, and where not. A program
        #: that accumulates over several batches does both. Not there before a batch has shown it.
        self._zeroed: dict[bool, bool] = {}
        self._watched: torch.Tensor | None = None
        self._handle: Any = None
        self._pending: bool | None = None  # of the boundary that no gradient has come after yet

    def left(self, pending: Collection[int]) -> dict[int, torch.Tensor]:
        """What the next batch may add to, live; from here on it is watched what it does."""
        changed = not self._optimizers.isdisjoint(pending)
        zeroed = self._zeroed.get(changed)
        if zeroed and self._watched is not None and self._watched.grad is not None:
            self._pending = changed
            return {}
        found = {place: p.grad for place, p in self._members.items() if p.grad is not None}
        if found and zeroed is not False:
            self._watch(min(found, key=lambda place: (found[place].numel(), place)))
            self._pending = changed
        return {} if zeroed else {place: grad for place, grad in found.items() if bool(grad.any())}

    def _watch(self, place: int) -> None:
        if self._watched is None or self._watched.grad is None:
            self.close()
            self._watched = self._members[place]
            self._handle = self._watched.register_hook(self._added) if self._watched.requires_grad else None

    def _added(self, _gradient: torch.Tensor) -> None:
        """Hook: a gradient is about to be added to what is there."""
        if self._pending is None or self._watched is None:
            return
        changed, self._pending = self._pending, None
        old = self._watched.grad
        self._zeroed[changed] = self._zeroed.get(changed, True) and (old is None or not bool(old.any()))

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class LeftoverGradients:
    """Gradients at the end of a batch that the next may add to, of all that is attached."""

    def __init__(self) -> None:
        self._groups: Sequence[_GradientGroup] = []

    def attach(self, replicated: Replicated | None) -> None:
        """Look at these models and optimizers from now on; None: at none."""
        for group in self._groups:
            group.close()
        self._groups = _grouped(replicated) if replicated is not None else []

    def left(self, pending: Collection[int] = ()) -> dict[int, torch.Tensor]:
        """The gradients that are state of this step boundary, by place, live: none that are zero, and none of
        parameters whose gradients the program zeroes before it adds to them. ``pending`` are the numbers of the
        optimizers whose gradients have changed since their last update.
        """
        found: dict[int, torch.Tensor] = {}
        for group in self._groups:
            found |= group.left(pending)
        return found


def _grouped(replicated: Replicated) -> list[_GradientGroup]:
    modules: dict[int, list[int]] = {id(p): [] for p in replicated.parameters}
    optimizers: dict[int, list[int]] = {id(p): [] for p in replicated.parameters}
    for number, module in enumerate(replicated.modules):
        for parameter in module.parameters():
            modules[id(parameter)].append(number)
    for number, optimizer in enumerate(replicated.optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizers[id(parameter)].append(number)
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, torch.Tensor]] = {}
    for place, parameter in enumerate(replicated.parameters):
        key = tuple(modules[id(parameter)]), tuple(optimizers[id(parameter)])
        groups.setdefault(key, {})[place] = parameter
    return [_GradientGroup(steps, members) for (_, steps), members in groups.items()]
