"""Rank-local state of what is attached: buffers, modes, parameter groups of the optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared_core.worker.state.layers import Layers
from shared_core.worker.state.replicated import Replicated


class Attached:
    """What belongs to the attached modules and optimizers, and is neither a parameter nor an optimizer's state of one.

    Args:
        alike: all ranks have the same modules; else groups are known by their number only, and modes by nothing.

    Attributes:
        layers: what is not a tensor in them.
    """

    def __init__(self, modules: Sequence[nn.Module], replicated: Replicated, *, alike: bool = True) -> None:
        self._replicated, self._alike = replicated, alike
        self._owners: list[tuple[str, nn.Module]] = []
        # A wrapper comes last: a replacement may not have it, where the failed worker was between two calls.
        wrappers = {number: each for number, each in enumerate(modules) if isinstance(each, DistributedDataParallel)}
        bare = {number: wrappers[number].module if number in wrappers else each for number, each in enumerate(modules)}
        seen: set[int] = set()
        for number, module in bare.items():
            for path, child in module.named_modules():
                if id(child) not in seen:
                    seen.add(id(child))
                    self._owners.append((f"{number}.{path}.", child))
        self.layers = Layers(dict(self._owners))
        self._owners += [(f"{number}.wrapper.", each) for number, each in wrappers.items()]

    # -- buffers ---------------------------------------------------------------------------------------

    def buffers(self) -> dict[str, torch.Tensor]:
        """Live buffers by name, those that were assigned since as they are now."""
        return {
            f"{path}{name}": buffer
            for path, owner in self._owners
            for name, buffer in owner._buffers.items()
            if buffer is not None
        }

    def restore_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy values to the buffers. Where shape or dtype differ, the value itself becomes the buffer; those that the
        script has registered since are added.
        """
        added: dict[str, list[str]] = {}
        for where in values:
            path, dot, name = where.rpartition(".")
            added.setdefault(path + dot, []).append(name)
        for path, owner in self._owners:
            for name in [*owner._buffers, *added.get(path, ())]:
                buffer, value = owner._buffers.get(name), values.get(f"{path}{name}")
                if value is None:
                    continue
                if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
                    buffer.data.copy_(value)  # .data: a backward may be under way, and this is not part of it
                else:
                    owner._buffers[name] = value

    # -- modes -----------------------------------------------------------------------------------------

    def modes(self) -> tuple[bytes, bytes]:
        """Which modules are in training mode, and which parameters require gradients: a byte each."""
        if not self._alike:
            return b"", b""
        training = bytes([owner.training for _, owner in self._owners])
        return training, bytes([p.requires_grad for p in self._replicated.parameters])

    def restore_modes(self, values: tuple[bytes, bytes]) -> None:
        training, gradients = values
        for (_, owner), mode in zip(self._owners, training, strict=False):
            owner.training = bool(mode)
        for parameter, has in zip(self._replicated.parameters, gradients, strict=False):
            if parameter.requires_grad != bool(has):
                parameter.requires_grad_(bool(has))

    # -- gradients -------------------------------------------------------------------------------------

    def with_gradients(self) -> bytes:
        """Which parameters have a gradient, be it zero: a byte each."""
        return bytes([p.grad is not None for p in self._replicated.parameters]) if self._alike else b""

    def restore_gradients(self, values: bytes) -> None:
        """Give the same parameters one, of zeros. Optimizers also step those whose gradient is zero, by weight decay
        and momentum, and leave out those that have none.
        """
        for parameter, has in zip(self._replicated.parameters, values, strict=False):
            if has and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    # -- groups ----------------------------------------------------------------------------------------

    def groups(self) -> list[list[dict[str, Any]]]:
        """What the optimizers' groups hold: learning rates and the like, and the places of their parameters. Raises
        Unsupported for a parameter that was not attached.
        """
        return [[self._group(group) for group in o.param_groups] for o in self._replicated.optimizers]

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        values = {key: value for key, value in group.items() if key != "params"}
        if self._alike:
            values["params"] = self._replicated.places_of(group["params"])
        return values

    def restore_groups(self, values: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Inverse of :meth:`groups`; groups that the script has added or removed since the start are, too."""
        for optimizer, stored in zip(self._replicated.optimizers, values, strict=False):
            groups = optimizer.param_groups
            if self._alike:
                del groups[len(stored) :]
                groups += [{} for _ in range(len(stored) - len(groups))]
            for group, theirs in zip(groups, stored, strict=True):
                group.update(theirs)
                if self._alike:
                    group["params"] = [self._replicated.parameters[place] for place in theirs["params"]]
