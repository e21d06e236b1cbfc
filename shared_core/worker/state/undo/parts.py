"""A step of which some parameters have had their update before ``optimizer.step()`` is called (Swift's wait-free
update): made part by part, seen to be the step that the program asks for, and taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from shared_core.errors import Unsupported, UnsupportedOptimizer
from shared_core.worker.state.undo.undo import Undo, is_of_torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ADVICE = "make it before backward, or set state.overlapped_update=False"


@dataclass(frozen=True)
class _Done:
    """A parameter that has had its update, with the reduced gradient that was used, and its version counter after
    the update.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    version: int


class Parts:
    """Parts of the next step of one optimizer.

    Not thread-safe: the caller keeps :meth:`take_back` and :meth:`step` apart. ``also``: keeps what is overwritten for
    longer, and is told of each part, too.

    Raises:
        UnsupportedOptimizer: a step of it cannot be divided, or not be undone.
    """

    def __init__(self, optimizer: Optimizer, also: Undo | None = None) -> None:
        if not is_of_torch(optimizer):
            raise UnsupportedOptimizer(
                f"state.overlapped_update: {type(optimizer).__name__} is not one of torch.optim, so it is not known "
                "whether it treats each parameter by itself; use one of torch.optim, or leave the option off"
            )
        if any(group.get("nesterov") and group.get("foreach") for group in optimizer.param_groups):
            raise UnsupportedOptimizer(
                f"state.overlapped_update: {type(optimizer).__name__}(nesterov=True, foreach=True) changes gradients; "
                "pass foreach=False or fused=True, or leave the option off"
            )
        self._optimizer = optimizer
        self._undo = Undo([optimizer])
        self._undos = [self._undo] if also is None else [self._undo, also]
        self._done: dict[torch.Tensor, _Done] = {}
        self._settings: list[dict[str, Any]] = []

    @property
    def torn(self) -> bool:
        return bool(self._done)

    def step(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Update those of these parameters that the optimizer has, in place, and call no hook. Their ``.grad`` is
        afterwards what it was.

        Args:
            parameters: each at most once in a step.
            gradients: reduced ones, of the same shapes; they must not change before the step is complete.

        Raises:
            UnsupportedOptimizer: a gradient is sparse, or state holds something that cannot be kept.
        """
        own = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if id(p) in own]
        if not self._done:
            self._settings = _settings(self._optimizer)
        before = [p.grad for p, _ in pairs]
        try:
            for parameter, gradient in pairs:
                parameter.grad = gradient
            with only(self._optimizer, [p for p, _ in pairs]):
                for undo in self._undos:
                    undo.begin(self._optimizer)
                _bare_step(self._optimizer)
                for undo in self._undos:
                    undo.end(self._optimizer)
        finally:
            for (parameter, _), gradient_before in zip(pairs, before, strict=True):
                parameter.grad = gradient_before
        self._done.update((p, _Done(p, g, p._version)) for p, g in pairs)

    def take_back(self) -> None:
        """Undo all parts: parameters and the optimizer's state are as before the first, bit for bit."""
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(self._done)):
            self._undo.undo()
        self._done.clear()

    def check(self) -> Collection[torch.Tensor]:
        """``optimizer.step()`` begins. Returns the parameters that have had their update. Raises Unsupported if the
        step that the program asks for is not the one of which parts were made.
        """
        if not self._done:
            return ()
        if _differ(self._settings, _settings(self._optimizer)):
            raise Unsupported(_changed("a hyper-parameter of the optimizer (a learning rate?) was changed"))
        for done in self._done.values():
            shape = tuple(done.parameter.shape)
            gradient = done.parameter.grad
            if gradient is None or not _same_bits(gradient, done.gradient):
                raise Unsupported(
                    _changed(f"the gradient of a parameter of shape {shape} was changed (clipped, unscaled, removed?)")
                )
            if done.parameter._version != done.version:
                raise Unsupported(_changed(f"a parameter of shape {shape} was changed"))
        return self._done.keys()

    def commit(self) -> None:
        self._done.clear()
        self._undo.commit()


def _changed(what: str) -> str:
    return (
        f"{what} between backward and optimizer.step(), but with state.overlapped_update the update has been made "
        f"by then: {_ADVICE}"
    )


def _bare_step(optimizer: Optimizer) -> None:
    """The step without its hooks, which see whole steps only, and without what schedulers put around it."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k not in ("params",)}
        for group in optimizer.param_groups
    ]


def _differ(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    if len(before) != len(now) or any(a.keys() != b.keys() for a, b in zip(before, now, strict=True)):
        return True
    return any(
        not (torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key])
        for a, b in zip(before, now, strict=True)
        for key in a
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.element_size() not in _BITS:
        return False
    as_bits = _BITS[one.element_size()]
    return torch.equal(one.detach().view(as_bits), other.detach().view(as_bits))


@contextmanager
def only(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within it, the optimizer has only these of its parameters, in its own groups and order.

    Steps of parts add up to one whole step for every optimizer that treats each parameter by itself, as all of
    torch.optim do.
    """
    wanted = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    everything = [group["params"] for group in groups]
    chosen = []
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) in wanted]
        if group["params"]:
            chosen.append(group)
    optimizer.param_groups = chosen
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, everything, strict=True):
            group["params"] = params
