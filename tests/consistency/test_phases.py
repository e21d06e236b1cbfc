"""Workers in their phases, with losses at any moment: thousands of seeds, and the most telling ones line by line.

A failure names the seed that repeats it. The golden transcripts are renewed with ``SWIFT_GOLDEN=write``.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from cluster import Job, Stuck

from shared_core.protocol.generation import Kind
from shared_core.protocol.worker_phase import IllegalEvent

GOLDEN = Path(__file__).parents[1] / "golden" / "phases"


def simulate(on_failure: str, seed: int) -> Job:
    rng = random.Random(f"{on_failure} {seed}")
    job = Job(rng, rng.choice((2, 3, 4)), rng.randint(2, 8), on_failure, chance=0.02, most=3)
    try:
        job.run()
    except (Stuck, IllegalEvent, AssertionError, LookupError) as error:
        raise AssertionError("\n".join([*job.lines, f"on_failure {on_failure}, seed {seed}: {error!r}"])) from error
    return job


def many(on_failure: str, seeds: range) -> None:
    recovered = 0
    for seed in seeds:
        job = simulate(on_failure, seed)
        recovered += job.ledger.generation
        if job.ledger.over is not None and job.ledger.over.kind is Kind.RELEASE:
            present = job.ledger.present()
            assert all(job.workers[rank].version == job.steps for rank in present), f"seed {seed}"
    assert recovered > len(seeds) // 2, "losses did happen"


@pytest.mark.parametrize("on_failure", ["replace", "reroute", "shrink"])
def test_losses_in_any_phase(on_failure: str) -> None:
    many(on_failure, range(300))
