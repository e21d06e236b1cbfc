"""Faults as data: validation, text form, drawing."""

from __future__ import annotations

import pytest

from shared_core.errors import ConfigError
from shared_core.faults import ANY_STEP, Fault
from shared_core.faults.spec import KINDS, POINTS, dumps, loads
from tests.support.draws import random_faults


def test_text_form_gives_the_same_faults() -> None:
    late = Fault(0, ANY_STEP, "join", "os._exit", incarnation=1, delay_s=0.5)
    faults = [Fault(1, 3, "bucket", "SIGKILL", nth=2), late, Fault(0, 3, "bucket", "SIGKILL", after=0)]
    assert loads(dumps(faults)) == faults


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{]", "must be a JSON list"),
        ('{"rank": 0}', "must be a JSON list of objects, got dict"),
        ("[3]", "must be a mapping"),
        ('[{"rank": 0, "step": 1, "point": "bucket"}]', "missing kind"),
        ('[{"rank": 0, "step": 1, "pont": "bucket", "kind": "SIGKILL"}]', "did you mean 'point'?"),
        ('[{"rank": 0, "step": 1, "point": "buket", "kind": "SIGKILL"}]', "did you mean 'bucket'?"),
        ('[{"rank": 0, "step": 1, "point": "bucket", "kind": "kill"}]', "did you mean 'SIGKILL'?|one of SIGKILL"),
        ('[{"rank": -1, "step": 1, "point": "bucket", "kind": "SIGKILL"}]', "rank must be at least 0, got -1"),
        ('[{"rank": 0, "step": 1, "point": "bucket", "kind": "SIGKILL", "nth": 0}]', "nth must be at least 1"),
        ('[{"rank": "0", "step": 1, "point": "bucket", "kind": "SIGKILL"}]', "rank must be an int"),
        ('[{"rank": 0, "step": 1, "point": "bucket", "kind": "SIGKILL", "after": "0"}]', "after must be an int"),
        ('[{"rank": 0, "step": 1, "point": "bucket", "kind": "exception", "delay_s": 1}]', "remove delay_s"),
        ('[{"rank": 0, "step": 1, "point": "step_boundary", "kind": "SIGKILL", "nth": 2}]', "one step_boundary"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?").replace("._", r"\._")):
        loads(text)


def test_the_same_seed_draws_the_same_faults() -> None:
    first = [random_faults(seed, 3, 4, 12, POINTS) for seed in range(20)]
    assert first == [random_faults(seed, 3, 4, 12, POINTS) for seed in range(20)]
    assert len({dumps(faults) for faults in first}) == 20


def test_drawn_faults_leave_a_survivor() -> None:
    for seed in range(50):
        faults = random_faults(seed, 3, 4, 12, POINTS, max_nth={"bucket": 3}, only={"validation": (4, 8)})
        assert len(faults) == 3
        for fault in faults:
            assert fault.kind in KINDS
            assert 1 <= fault.nth <= (3 if fault.point == "bucket" else 1)
            assert fault.point != "validation" or fault.step in (4, 8)
            if fault.point.startswith("recovery."):
                assert any(other.step != ANY_STEP and other.rank != fault.rank for other in faults)
            near = {f.rank for f in faults if f.step == ANY_STEP or abs(f.step - fault.step) <= 1}
            assert len(near) < 4
        for rank in range(4):
            own = [fault for fault in faults if fault.rank == rank]
            assert [fault.incarnation for fault in own] == list(range(len(own)))


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match="only . of 5 faults fit"):
        random_faults(1, 5, 2, 2, ["bucket"])
    with pytest.raises(ConfigError, match="need another that causes a recovery"):
        random_faults(1, 1, 2, 2, ["recovery.frontier"])
