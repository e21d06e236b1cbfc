"""Random faults in pipelines, with and without replicas: a few in every run of the tests, many at night."""

from __future__ import annotations

import pytest

from shared_core.faults.spec import KINDS
from tests.support import draws, soak


def test_a_run_is_a_function_of_its_seed_and_number() -> None:
    models = tuple(draws.PIPELINES)
    plans = [draws.plan(3, number, models, 4, None, KINDS) for number in range(500)]
    assert plans == [draws.plan(3, number, models, 4, None, KINDS) for number in range(500)]
    assert {plan.strikes for plan in plans} == {1, 2, 3}
    faults = [fault for plan in plans for fault in plan.faults]
    assert {fault.rank for fault in faults} == set(range(6)) and {fault.kind for fault in faults} == set(KINDS)
    assert {"pipe.forward", "pipe.backward", "update.during", "checkpoint.write"} <= {fault.point for fault in faults}
    # Replacements are struck while they replay, and neighbours at once.
    assert any(fault.incarnation for fault in faults)
    assert any(len({f.step for f in plan.faults}) == 1 and len({f.rank for f in plan.faults}) == 3 for plan in plans)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_random_faults() -> None:
    assert soak.main(["--model", "pipelines", "--faults", "60"]) == 0
