"""Gradients that a batch leaves behind, and that the next adds to, are state of the step boundary."""

from __future__ import annotations

import pytest
from harness import Jobs

from shared_core.faults import Fault

FAULTS = {
    "discriminators_part": Fault(1, 5, "update.before", "SIGKILL", nth=2),
    "generators_backward": Fault(0, 7, "bucket", "SIGKILL"),
    "the_newcomer_too": Fault(1, 9, "bucket", "SIGKILL"),
}


@pytest.mark.parametrize("first", ["generator", "discriminator"])
@pytest.mark.parametrize("way", ["plain", "view", "accelerate", "lightning"])
def test_a_gan_ends_with_the_same_bits(way: str, first: str, jobs: Jobs) -> None:
    faults = [Fault(1, 5, "update.before", "SIGKILL", nth=2), Fault(0, 8, "bucket", "SIGKILL")]
    jobs.check("gan.py", faults=faults, args=[way, first])
