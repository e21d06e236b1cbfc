"""Tensors of a script in the memory of what is attached, such as those of ``model.state_dict()``: they follow it.

Their values are those of the parameters, buffers and optimizer state that they show. Put back by value they would be
copies, which no longer follow; so it is said what they show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

#: Memory is looked for again after so many captures: parameters may be given other memory.
_EVERY = 8
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def _address(tensor: torch.Tensor) -> int:
    """Of its memory; 0 if it has none of its own that others could show."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()


class AttachedMemory:
    """The memory of attached modules and optimizers."""

    def __init__(self) -> None:
        self._modules: Mapping[str, nn.Module] = {}
        self._optimizers: Sequence[Optimizer] = ()
        self._at: dict[int, tuple[str, torch.Tensor]] = {}
        self._shape: list[tuple[int, int]] = []
        self._turn, self._stale = 0, True

    def attach(self, modules: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """It is that of these from now on.

        Args:
            modules: by names that a replacement gives them, too.
            optimizers: in the order that it has, too.
        """
        self._modules, self._optimizers, self._turn = dict(modules), list(optimizers), 0
        self._stale = True

    def refresh(self) -> None:
        """At a step boundary: it may be another. It is looked for when a tensor is described, if there is one."""
        shape = [(id(each.state), len(each.state)) for each in self._optimizers]
        self._stale = self._stale or self._turn == 0 or shape != self._shape
        self._shape, self._turn = shape, (self._turn + 1) % _EVERY

    def named(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return dict(self._all())

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        places: dict[int, str] = {}
        for where, module in self._modules.items():
            for name, parameter in module.named_parameters():
                places.setdefault(id(parameter), f"{where} {name}")
                yield f"memory {where} {name}", parameter
            for name, buffer in module.named_buffers():
                yield f"memory {where} {name}", buffer
        for number, optimizer in enumerate(self._optimizers):
            for stepped, state in optimizer.state.items():
                for key, value in state.items() if id(stepped) in places else ():
                    if isinstance(value, torch.Tensor):
                        yield f"memory {number} {places[id(stepped)]} {key}", value

    def shown_by(self, tensor: torch.Tensor) -> tuple[str, int, tuple[int, ...], tuple[int, ...]] | None:
        """What a tensor shows: name, offset, sizes and strides; None if it is its own memory."""
        address = 0 if tensor.requires_grad else _address(tensor)
        if address and self._stale:
            self._at, self._stale = {_address(each): (name, each) for name, each in self._all()}, False
            self._at.pop(0, None)
        name, owner = self._at.get(address, ("", tensor))
        if not name or owner.dtype != tensor.dtype or _address(owner) != address:
            return None
        return name, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def shows(
    owner: torch.Tensor, offset: int, size: Sequence[int], stride: Sequence[int], old: Any, *, as_array: bool
) -> Any:
    """A tensor, or an array, that shows this part of another's memory: ``old`` if it does."""
    made = owner.detach().as_strided(tuple(size), tuple(stride), offset)
    if as_array:
        array = made.numpy()
        alike = isinstance(old, np.ndarray) and old.shape == array.shape and old.strides == array.strides
        return old if alike and np.may_share_memory(old, array) else array
    alike = isinstance(old, torch.Tensor) and type(old) is torch.Tensor and not old.requires_grad
    if alike and old.dtype == made.dtype and old.shape == made.shape and old.stride() == made.stride():
        return old if old.data_ptr() == made.data_ptr() else made
    return made
