"""Pre-images: values as they were, and how to put them back into the same objects."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shared_core.errors import UnsupportedOptimizer

#: Puts a value back and returns it: the same object where it can be changed in place.
Restore = Callable[[], Any]

#: What a value is, for messages: text, or (what it lies in, its key there).
Name = str | tuple[Any, Any]

_CONSTANT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)


def _text(what: Name) -> str:
    return what if isinstance(what, str) else f"{_text(what[0])}[{what[1]!r}]"


def _same(value: Any) -> Any:
    return value


class Buffers:
    """Memory for copies of tensors, one buffer a tensor, on its device, kept from one step to the next."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._used: set[int] = set()
        self._more: list[torch.Tensor] = []

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """A buffer with the tensor's shape and dtype, contents undefined."""
        key = id(tensor)
        if key in self._used:  # several parameters share it, and it is copied before the update of each
            self._more.append(torch.empty_like(tensor))
            return self._more[-1]
        known = self._of.get(key)
        if known is None or known[0] is not tensor or known[1].shape != tensor.shape or known[1].dtype != tensor.dtype:
            known = self._of[key] = (tensor, torch.empty_like(tensor))
        self._used.add(key)
        return known[1]

    def release(self, keep: bool) -> None:
        """No copy is needed any more. Free what had no use this time, or all if not ``keep``."""
        if not keep:
            self._of.clear()
        elif self._used and len(self._used) != len(self._of):
            self._of = {key: self._of[key] for key in self._used}
        self._used.clear()
        self._more.clear()

    @property
    def nbytes(self) -> int:
        buffers = [*self._more, *(buffer for _, buffer in self._of.values())]
        return sum(buffer.nbytes for buffer in buffers)


class Images:
    """Values as they are now. Tensors are copied by :meth:`copy`, all in one call, to ``buffers``."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def add(self, value: Any, what: Name) -> Restore:
        """Note a value: a tensor, a constant, or lists, tuples and dictionaries of these. Returns what puts it back
        into the same objects, valid after :meth:`copy`. Raises UnsupportedOptimizer if the value is something else,
        or a sparse tensor; ``what`` names it.
        """
        if isinstance(value, torch.Tensor):
            return self._add_tensor(value, what)
        if isinstance(value, _CONSTANT):
            return partial(_same, value)
        if isinstance(value, dict):
            parts = [(key, self.add(entry, (what, key))) for key, entry in value.items()]

            def restore_mapping() -> Any:
                entries = {key: restore() for key, restore in parts}
                value.clear()
                value.update(entries)
                return value

            return restore_mapping
        if isinstance(value, list):
            items = [self.add(entry, (what, i)) for i, entry in enumerate(value)]

            def restore_list() -> Any:
                value[:] = [restore() for restore in items]
                return value

            return restore_list
        if type(value) is tuple:
            members = [self.add(entry, (what, i)) for i, entry in enumerate(value)]
            return lambda: tuple(restore() for restore in members)
        raise UnsupportedOptimizer(
            f"{_text(what)} is a {type(value).__name__}: what an update changes in it cannot be seen, so the "
            "update could not be undone. Use an optimizer that keeps tensors and plain data only, or leave undo off."
        )

    def _add_tensor(self, tensor: torch.Tensor, what: Name) -> Restore:
        if tensor.layout is not torch.strided:
            raise UnsupportedOptimizer(
                f"{_text(what)} is a sparse tensor ({tensor.layout}); only dense ones can be undone. "
                "Use dense gradients (nn.Embedding(sparse=False)), or leave undo off."
            )
        place = len(self._tensors)
        self._tensors.append(tensor)

        def restore_tensor() -> torch.Tensor:
            tensor.detach().copy_(self._copies[place])
            return tensor

        return restore_tensor

    @torch.no_grad()
    def copy(self) -> None:
        self._copies = [self._buffers.take(tensor) for tensor in self._tensors]
        if self._copies:
            torch._foreach_copy_(self._copies, self._tensors)
