"""Steps of optimizers: when the update begins (after the closure, if there is one; Lightning's runs forward and
backward), and what it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

#: What a step pre-hook is given and may return in its place.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def begin_after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], begin: Callable[[], None], *, after_hooks: bool = False
) -> Arguments | None:
    """For a step pre-hook with these arguments: have ``begin`` called now, or when the closure has returned. Returns
    what the hook is to return. With ``after_hooks`` it is called, also without a closure, when all pre-hooks have
    been called.
    """
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None and not after_hooks:
        begin()
        return None

    def then_begin() -> Any:
        result = closure() if closure is not None else None
        begin()
        return result

    return (args[0],), {**kwargs, "closure": then_begin}


class HiddenGradients:
    """Hides gradients from the rest of the present step: without one, torch's optimizers leave a parameter alone. The
    program's own post-hooks see them again. ``stepped`` is called after each step, before these hooks.
    """

    def __init__(self, optimizer: Optimizer, stepped: Callable[[], None]) -> None:
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stepped = stepped
        self._handle = optimizer.register_step_post_hook(self._show)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._handle.id, last=False)

    def hide(self, parameters: Iterable[torch.Tensor]) -> None:
        """Hide the gradients of these parameters, those that have one, until the step has ended."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _show(self, *_: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        self._stepped()

    def close(self) -> None:
        self._handle.remove()
