"""The parameters before the last update: layers compute with them, and those of now stay untouched."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from shared_core.reroute.step import FormerParameters, Step


@dataclass
class Layers:
    module: nn.Module
    parameters: list[nn.Parameter]


def stage() -> nn.Module:
    """With a parameter that is not trained, and one that two layers have."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    module = nn.Sequential(first, nn.ReLU(), nn.Sequential(second, nn.Linear(8, 4)), nn.Dropout(0.5))
    first.bias.requires_grad_(False)
    return module


def computed(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and gradient of the input."""
    torch.manual_seed(1)
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y.square().sum().backward()
    assert leaf.grad is not None
    return y.detach(), leaf.grad


@pytest.mark.parametrize("evaluates", [False, True])
def test_layers_compute_as_before_the_update(evaluates: bool) -> None:
    module, x = stage(), torch.randn(3, 8)
    parameters = [p for p in module.parameters() if p.requires_grad]
    former, step = FormerParameters(cast(Any, Layers(module, parameters))), Step(4)
    former.keep(step)
    wanted = computed(copy.deepcopy(module), x)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.1)
            parameter.grad = torch.full_like(parameter, 2.0)
    step.updated = True
    now, following = [p.clone() for p in parameters], module(x)  # a forward of the next step
    module.train(not evaluates)
    before = computed(copy.deepcopy(module), x)
    with former.of(step):
        got = computed(module, x)
        assert all(torch.equal(*pair) for pair in zip(parameters, now, strict=True)), "others may be reading them"
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    assert not torch.equal(got[0], before[0])
    assert all(bool((p.grad == 2.0).all()) for p in parameters if p.grad is not None)
    assert module.training is not evaluates
    assert [id(p) for p in module.parameters() if p.requires_grad] == [id(p) for p in parameters]
    assert all(torch.equal(*pair) for pair in zip(computed(copy.deepcopy(module), x), before, strict=True))
    following.sum().backward()


def test_a_stage_that_has_its_sum_and_no_update_computes_with_what_it_has() -> None:
    module, x = stage(), torch.randn(3, 8)
    parameters = [p for p in module.parameters() if p.requires_grad]
    former, wanted = FormerParameters(cast(Any, Layers(module, parameters))), computed(copy.deepcopy(module), x)
    with former.of(Step(4)):
        got = computed(module, x)
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    assert all(parameter.grad is None for parameter in parameters)
