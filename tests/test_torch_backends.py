"""All tests of torch's own suite for backends that pass on plain gloo on a CPU pass over this product."""

from __future__ import annotations

import pytest
from suites import torch_backends


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_what_passes_on_plain_gloo_passes_here() -> None:
    pytest.importorskip("expecttest")
    stock = torch_backends.run(torch_backends.names(), stock=True)
    passing = [name for name, (outcome, _) in stock.items() if outcome == "passed"]
    assert len(passing) > 90, torch_backends.table(stock, stock)
    here = torch_backends.run(passing, stock=False)
    assert all(outcome == "passed" for outcome, _ in here.values()), torch_backends.table(stock, here)
