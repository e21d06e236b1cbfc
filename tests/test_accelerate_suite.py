"""Accelerate's own scripts pass with the plugin, if they pass without; copies of an ``Accelerator`` can be made."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from accelerate_suite import PACKAGE, downloads, modules, run
from harness import Jobs

from shared_core.faults import Fault
from shared_core.worker.program.trained import ForwardHook

#: Longest time of one script, in seconds.
LIMIT_S = 600.0


@pytest.mark.nightly
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("module", [module.removeprefix(f"{PACKAGE}.") for module in modules()])
def test_what_passes_stock_passes_with_the_plugin(module: str) -> None:
    if downloads(f"{PACKAGE}.{module}"):
        pytest.skip("it downloads models or data")
    stock = run(f"{PACKAGE}.{module}", "stock", LIMIT_S)
    if not stock.passed:
        pytest.skip(f"it does not pass stock: {stock.why}")
    ours = run(f"{PACKAGE}.{module}", "plugin", LIMIT_S)
    assert ours.passed, ours.why


@pytest.mark.nightly
def test_copies_of_an_accelerator_can_be_made_while_it_trains(jobs: Jobs) -> None:
    """They are made in the failed worker's place, too, and change nothing."""
    jobs.check("acc_copies.py", faults=[Fault(1, 4, "bucket", "SIGKILL")])


def test_a_copy_of_a_module_has_hooks_that_do_nothing() -> None:
    calls: list[object] = []
    net = torch.nn.Linear(2, 1)
    net.register_forward_hook(ForwardHook(lambda *args: calls.append(args)))
    for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        made(torch.ones(2))
    assert not calls
    net(torch.ones(2))
    assert len(calls) == 1
