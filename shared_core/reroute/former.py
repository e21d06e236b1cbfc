"""The parameters of a stage as they were before its last update.

A stage makes its update when its own gradients are complete. If a worker of it then fails together with its neighbor in
the pipeline, and the neighbor's stage has no sum yet, their messages have to be made again with these parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shared_core.reroute.step import StageModel, Step


class FormerParameters:
    """Keeps them in one extra copy of the parameters, on their device."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._kept: list[nn.Parameter] = []
        self._step = -1

    def keep(self, step: Step) -> None:
        """Copy the parameters; call it right before the update of ``step``."""
        parameters = self._model.parameters
        if not self._kept:
            self._kept = [nn.Parameter(torch.empty_like(parameter)) for parameter in parameters]
        with torch.no_grad():
            for kept, parameter in zip(self._kept, parameters, strict=True):
                kept.copy_(parameter)
        self._step = step.number

    @contextmanager
    def of(self, step: Step) -> Iterator[None]:
        """Inside, the layers compute as they did in ``step``, which has its sum. Afterwards ``.grad`` is as before."""
        module, parameters = self._model.module, self._model.parameters
        gradients, training = [parameter.grad for parameter in parameters], module.training
        assert not step.updated or self._step == step.number, (self._step, step.number)
        # The layers get other parameters: the present ones stay unchanged for graphs of the next step, and for the
        # thread that copies them to a replacement.
        _exchange(module, dict(zip(parameters, self._kept, strict=True)) if step.updated else {})
        if not training:  # the program evaluates by now; DeepSpeed's calls set all layers at once, too
            module.train()
        try:
            yield
        finally:
            _exchange(module, dict(zip(self._kept, parameters, strict=True)) if step.updated else {})
            if not training:
                module.eval()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for kept in self._kept:
                kept.grad = None


def _exchange(module: nn.Module, others: dict[nn.Parameter, nn.Parameter]) -> None:
    for layer in module.modules():
        for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in others:
                setattr(layer, name, others[parameter])
