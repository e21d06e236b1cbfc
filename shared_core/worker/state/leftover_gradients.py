"""Gradients that a batch leaves behind: state of the step boundary where the next batch adds to them.

Most programs zero them first. Then they are no state, and copying them at each boundary would cost time for nothing. So
they are published until the smallest parameter of each group has shown what the program does with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shared_core.worker.state.replicated import Replicated


class _Group:
    """Parameters that the program zeroes together: those of one model that the same optimizers step.

    Args:
        members: parameters by place.
    """

    def __init__(self, members: Mapping[int, torch.Tensor]) -> None:
        self._members = members
        self._zeroed: bool | None = None  # not known before a batch has shown it
        self._watched: torch.Tensor | None = None
        self._handle: Any = None
        self._first = False

    def left(self) -> dict[int, torch.Tensor]:
        """What the next batch may add to; from here on it is watched what it does."""
        found = {place: p.grad for place, p in self._members.items() if p.grad is not None}
        if found and self._zeroed is not False:
            self._watch(min(found, key=lambda place: (found[place].numel(), place)))
        return {} if self._zeroed else {place: grad for place, grad in found.items() if bool(grad.any())}

    def _watch(self, place: int) -> None:
        if self._watched is None or self._watched.grad is None:
            self.close()
            self._watched = self._members[place]
            self._handle = self._watched.register_hook(self._added) if self._watched.requires_grad else None
        self._first = True

    def _added(self, _gradient: torch.Tensor) -> None:
        """A gradient is about to be added to what is there."""
        if not self._first or self._watched is None:
            return
        self._first = False
        old = self._watched.grad
        zeroed = old is None or not bool(old.any())
        self._zeroed = zeroed if self._zeroed is None else self._zeroed and zeroed

    def close(self) -> None:
        """Watch no longer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class LeftoverGradients:
    """Gradients at the end of a batch that the next may add to, of all that is attached."""

    def __init__(self) -> None:
        self._groups: Sequence[_Group] = []

    def attach(self, replicated: Replicated | None) -> None:
        """Look at these models and optimizers from now on; None: at none."""
        for group in self._groups:
            group.close()
        self._groups = [_Group(members) for members in _grouped(replicated)] if replicated is not None else []

    def left(self) -> dict[int, torch.Tensor]:
        """The gradients that are state of this step boundary, by place: none that are zero, and none of parameters
        whose gradients the program zeroes before it adds to them.
        """
        found: dict[int, torch.Tensor] = {}
        for group in self._groups:
            found |= group.left()
        return found


def _grouped(replicated: Replicated) -> list[dict[int, torch.Tensor]]:
    owners: dict[int, list[tuple[str, int]]] = {id(p): [] for p in replicated.parameters}
    for number, module in enumerate(replicated.modules):
        for parameter in module.parameters():
            owners[id(parameter)].append(("module", number))
    for number, optimizer in enumerate(replicated.optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners[id(parameter)].append(("optimizer", number))
    groups: dict[tuple[tuple[str, int], ...], dict[int, torch.Tensor]] = {}
    for place, parameter in enumerate(replicated.parameters):
        groups.setdefault(tuple(owners[id(parameter)]), {})[place] = parameter
    return list(groups.values())
