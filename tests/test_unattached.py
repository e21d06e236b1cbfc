"""``attach()`` without a model: what is registered is enough, and what is not is an error at once."""

from __future__ import annotations

import pytest
from harness import Jobs

from shared_core.faults import Fault


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(0, 14, "collective.before", "SIGKILL", nth=2), marks=pytest.mark.nightly),
        Fault(1, 1, "collective.after", "SIGKILL"),
    ],
    ids=str,
)
def test_a_registered_model_is_put_back(fault: Fault, jobs: Jobs) -> None:
    jobs.check("unattached.py", faults=[fault])


def test_a_wrapped_model_that_is_not_attached_is_an_error_at_once(jobs: Jobs) -> None:
    result = jobs.run("unattached.py", args=["--ddp"])
    assert result.status == 1, result.tail()
    assert "call shared_core.attach(model, optimizer) before training, with the wrapper" in result.stderr, result.tail()
