"""The parts that follow what a script changes outside updates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared_core.worker.state.external_mutation import ChangeWatch
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.updates import Updates


def made() -> tuple[nn.Sequential, torch.optim.Optimizer, Replicated]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam([*net[0].parameters(), *net[1].parameters()], lr=0.1)
    return net, optimizer, Replicated([net], [optimizer])


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


CHANGES = {
    "in place": lambda net, optimizer: net[0].weight.detach().mul_(2),
    "through data": lambda net, optimizer: net[0].weight.data.mul_(2),
    "data assigned": lambda net, optimizer: setattr(net[0].weight, "data", torch.zeros(4, 3)),
    "of no optimizer": lambda net, optimizer: net[2].bias.data.add_(1),
    "state": lambda net, optimizer: optimizer.state[net[0].weight]["exp_avg"].zero_(),
    "state forgotten": lambda net, optimizer: optimizer.state.clear(),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_outside_updates_is_seen(how: str) -> None:
    net, optimizer, replicated = made()
    watch = ChangeWatch(replicated)
    assert watch.changed() is None
    step(net, optimizer)
    watch.note()
    assert watch.changed() is None
    net(torch.ones(2, 3)).sum().backward()
    optimizer.zero_grad()
    assert watch.changed() is None, "forward and backward change no parameter"
    CHANGES[how](net, optimizer)
    assert watch.changed()


def test_later_a_change_through_data_is_seen_in_time() -> None:
    net, optimizer, replicated = made()
    watch = ChangeWatch(replicated)
    for _ in range(5):
        step(net, optimizer)
        watch.note()
    seen = 0
    for _ in range(2 * len(replicated.parameters)):
        for parameter in net[:2].parameters():
            parameter.data.mul_(1.5)
        seen += watch.changed() is not None
        watch.note()
    assert seen >= len(replicated.parameters)


@pytest.fixture
def updates() -> Updates:
    return Updates()
