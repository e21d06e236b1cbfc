"""What cannot be undone is refused, before anything has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from undoing import bits, build, fill, network

from shared_core.errors import UnsupportedOptimizer
from shared_core.worker.state.undo import Undo
from tests.support.digest import digest


class Noisy(torch.optim.SGD):
    """Rounds stochastically with its own generator."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.generator = torch.Generator()


def test_optimizers_that_cannot_be_undone_are_refused() -> None:
    net = network()
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: torch.optim.LBFGS(net.parameters()), "LBFGS evaluates its closure several times"),
        (lambda: torch.optim.SparseAdam(list(net.parameters())), "SparseAdam takes sparse gradients only"),
        (lambda: torch.optim.SGD(net.parameters(), differentiable=True), "differentiable=True"),
        (lambda: Noisy(net.parameters()), "Noisy.generator is a Generator"),
        (lambda: nn.Linear(1, 1), "Linear is not a torch.optim.Optimizer; if it wraps one, give that one"),
    ]
    for make, message in cases:
        with pytest.raises(UnsupportedOptimizer, match=message):
            Undo([make()])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[next(net.parameters())]["sketch"] = {1, 2}
    with pytest.raises(UnsupportedOptimizer, match=r"SGD.state\['sketch'\] is a set"):
        Undo([optimizer])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(row=st.integers(0, 5))
def test_sparse_gradients_are_refused_before_anything_changes(name: str, row: int) -> None:
    torch.manual_seed(0)
    net = nn.Embedding(6, 3, sparse=True)
    optimizer = build(name, net.parameters(), lr=0.1)
    undo = Undo([optimizer])
    undo.arm()
    original = bits([net.weight], optimizer)
    net(torch.tensor([row])).sum().backward()
    with pytest.raises(UnsupportedOptimizer, match=r"shape \(6, 3\) has a sparse gradient; \w+ cannot be undone"):
        optimizer.step()
    assert bits([net.weight], optimizer) == original
    with pytest.raises(UnsupportedOptimizer, match="sparse gradient"):
        Undo([optimizer])
    undo.disarm()
    optimizer.step()


def test_state_that_appears_later_and_cannot_be_kept_is_refused_before_the_step() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    undo = Undo([optimizer])
    undo.arm()
    optimizer.state[next(net.parameters())]["generator"] = torch.Generator()
    fill(net, 0)
    parameters = digest(list(net.parameters()))
    with pytest.raises(UnsupportedOptimizer, match=r"SGD.state\['generator'\] is a Generator"):
        optimizer.step()
    assert digest(list(net.parameters())) == parameters and undo.undo() == 0


def test_a_step_that_is_given_other_tensors_to_change_is_refused() -> None:
    class Writes(torch.optim.SGD):
        def step(self, closure: Any = None, output_params: Any = None) -> Any:  # as DeepSpeed's LAMB
            return super().step(closure)

    net = network()
    optimizer = Writes(net.parameters(), lr=0.1)
    undo = Undo([optimizer])
    undo.arm()
    fill(net, 0)
    with pytest.raises(UnsupportedOptimizer, match="was given more than a closure"):
        optimizer.step(output_params=[])
