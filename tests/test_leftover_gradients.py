"""Gradients that a batch leaves behind, and that the next adds to, are state of the step boundary."""

from __future__ import annotations

import pytest
import torch
from harness import Jobs, few
from torch import nn

from shared_core.faults import Fault
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
