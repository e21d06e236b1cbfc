"""Gradients that a batch leaves behind, and that the next adds to, are state of the step boundary."""

from __future__ import annotations

import pytest
import torch
from harness import Jobs, few
from torch import nn

from shared_core.faults import Fault
from shared_core.worker.state.attached import LeftoverGradients
from shared_core.worker.state.replicated import Replicated
from tests.support.runner import Mismatch


@pytest.mark.parametrize(
    ("way", "first"),
    [
        ("plain", "generator"),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (("view", "discriminator"), ("accelerate", "generator"), ("lightning", "discriminator"))
        ),
    ],
)
def test_a_gan_ends_with_the_same_bits(way: str, first: str, jobs: Jobs) -> None:
    faults = [Fault(1, 5, "update.before", "SIGKILL", nth=2), Fault(0, 8, "bucket", "SIGKILL")]
    jobs.check("gan.py", faults=faults, args=[way, first])


#: In the fifth batch: before its first update, and in it.
FAULTS = [Fault(1, 5, "collective.before", "SIGKILL", nth=3), Fault(0, 8, "update.before", "SIGKILL", nth=2)]


@pytest.mark.parametrize("first", few(["generator", "never"], "generator"))
def test_a_gan_of_shards_ends_with_the_same_bits(first: str, jobs: Jobs) -> None:
    jobs.check("gan.py", faults=FAULTS, args=["fsdp2", first])


@pytest.mark.nightly
def test_shards_whose_gradients_are_zeroed_in_all_batches_but_one(jobs: Jobs) -> None:
    """No rank holds what the replacement lacks; a failure in another batch changes no bit."""
    jobs.check("gan.py", faults=FAULTS[1:], args=["fsdp2", "seldom"])
    result = jobs.run("gan.py", faults=FAULTS[:1], args=["fsdp2", "seldom"])
    assert result.status == 1, result.tail()
    assert "gradients of earlier batches were not given to this replacement (parameter 0, " in result.stderr


@pytest.mark.parametrize(
    ("first", "without"), [pytest.param("never", "left", marks=pytest.mark.nightly), ("seldom", "expect")]
)
def test_control_without_it_the_bits_are_others(first: str, without: str, jobs: Jobs) -> None:
    with pytest.raises(Mismatch):
        jobs.check("gan.py", faults=FAULTS[:1], args=["fsdp2", first, "--without", without])


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_is_zeroed_first_is_published_once(set_to_none: bool) -> None:
    """Before the first batch has shown it nobody knows; after that a boundary costs no copy of the gradients."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = LeftoverGradients()
    found.attach(Replicated([net], [optimizer]))
    assert not found.left()
    published = []
    for _ in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        _step(net, optimizer)
        published.append(len(found.left()))
    assert published == [2, 0, 0, 0]


def test_what_is_added_to_is_published_whoever_is_zeroed_beside_it() -> None:
    """Two optimizers in one module, as under Lightning; once one was added to, it is published from then on."""
    nets = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    found = LeftoverGradients()
    found.attach(Replicated([nets], optimizers))
    published = []
    for number in range(5):
        optimizers[0].zero_grad()
        if number != 3:
            optimizers[1].zero_grad()
        for net, optimizer in zip(nets, optimizers, strict=True):
            _step(net, optimizer)
        published.append(sorted(found.left()))
    assert published == [[0, 1, 2, 3], [], [], [2, 3], [2, 3]]
    optimizers[1].zero_grad()
    assert not found.left(), "only those that exist"


def test_one_that_accumulates_beside_one_that_steps() -> None:
    """Its gradients are zeroed first in one batch and added to in the other: they are published in between."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = LeftoverGradients()
    found.attach(Replicated([net], [optimizer]))
    published = []
    for number in range(8):
        if number % 2 == 0:
            optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        if number % 2:
            optimizer.step()
        published.append(len(found.left({0} if number % 2 == 0 else ())))
    assert published == [2, 2, 2, 0, 2, 0, 2, 0]
