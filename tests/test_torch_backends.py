"""What passes of torch's own suite for backends on plain gloo on a CPU passes here, with failures too."""

from __future__ import annotations

import pytest
from suites import torch_backends
from suites.torch_backends import CONTROL


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_what_passes_on_plain_gloo_passes_here() -> None:
    """The suite attaches nothing, so no test of it has a step boundary; one that had loses a worker there."""
    pytest.importorskip("expecttest")
    stock = torch_backends.run(torch_backends.names(), stock=True)
    passing = [name for name, one in stock.items() if one.how == "passed"]
    assert len(passing) > 90, torch_backends.table(stock, stock)
    here = torch_backends.run(passing, stock=False, kill=True)
    assert all(one.how == "passed" for one in here.values()), torch_backends.table(stock, here, kill=True)
    assert not [name for name, one in here.items() if one.killed]
    assert sum(one.trains for one in here.values()) > 10


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_control_a_test_with_a_step_boundary_loses_a_worker_there() -> None:
    pytest.importorskip("expecttest")
    control = torch_backends.run([CONTROL], stock=False, processes=2, kill=True)[CONTROL]
    assert control.how == "passed" and control.killed and control.trains, control
