"""Random faults in sharded models: a few in every run of the tests, many at night."""

from __future__ import annotations

import pytest

from shared_core.faults.spec import KINDS
from tests.support import draws, soak


def test_a_run_is_a_function_of_its_seed_and_number() -> None:
    models = tuple(draws.SHARDED)
    plans = [draws.plan(3, number, models, 4, None, KINDS) for number in range(100)]
    assert plans == [draws.plan(3, number, models, 4, None, KINDS) for number in range(100)]
    assert {plan.model for plan in plans} == {"fsdp2", "hsdp", "zero3"} and {len(plan.faults) for plan in plans} == {
        1,
        2,
        3,
    }
    faults = [fault for plan in plans for fault in plan.faults]
    assert {fault.rank for fault in faults} == set(range(4)) and {fault.kind for fault in faults} == set(KINDS)
    # In gathers, reductions and updates, both replicas of a shard in one run, and replacements.
    assert {"collective.before", "collective.after", "update.during", "join"} <= {fault.point for fault in faults}
    assert any({0, 2} <= {f.rank for f in plan.faults} for plan in plans if plan.model == "hsdp")
    assert any(fault.incarnation for fault in faults)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", draws.SHARDED)
def test_many_random_faults(model: str) -> None:
    assert soak.main(["--model", model, "--faults", "60"]) == 0
