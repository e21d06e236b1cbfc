"""The parameters of a stage as they were before its last update.

A stage makes its update when its own gradients are complete. If a worker of it fails then together with its neighbor
in the pipeline, and the neighbor's stage has no sum yet, what passed between the two has to be made again: with these
parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shared_core.reroute.step import StageModel, Step


class FormerParameters:
    """Keeps them, in as much memory as the parameters take."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._kept: list[nn.Parameter] = []
        self._step = -1

    def keep(self, step: Step) -> None:
        """Right before the update of a step."""
        parameters = self._model.parameters
        if not self._kept:
            self._kept = [nn.Parameter(torch.empty_like(parameter)) for parameter in parameters]
        with torch.no_grad():
            for kept, parameter in zip(self._kept, parameters, strict=True):
                kept.copy_(parameter)
        self._step = step.number

    @contextmanager
    def of(self, step: Step) -> Iterator[None]:
        """While it is entered, the layers compute as they did in a step that has its sum; no gradient of it stays."""
        module, parameters = self._model.module, self._model.parameters
        gradients, training = [parameter.grad for parameter in parameters], module.training
        assert not step.updated or self._step == step.number, (self._step, step.number)
        # The layers get other parameters: those of now stay what they are for graphs of the next step, and for the
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
    """Give layers other parameters in place of theirs."""
    for layer in module.modules():
        for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in others:
                setattr(layer, name, others[parameter])
