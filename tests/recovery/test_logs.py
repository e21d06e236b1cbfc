"""Which ranks start again together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shared_core.errors import ConfigError
from shared_core.worker.messages.disk_log import Logs, together


def test_ranks_alone_by_machine_and_named() -> None:
    assert together("worker", 3, 8, 4) == (3,)
    assert together("machine", 5, 8, 4) == (4, 5, 6, 7)
    assert together("auto", 5, 8, 4) == (4, 5, 6, 7)
    assert together("auto", 5, 8, 8) == (5,)
    assert together("0-2, 5-6,7", 1, 8, 4) == (0, 1, 2)
    assert together("0-2, 5-6,7", 6, 8, 4) == (5, 6)
    assert together("0-2, 5-6,7", 3, 8, 4) == (3,)


@pytest.mark.parametrize("wrong", ["machines", "0-8", "3-1", "0-2,2-3", "1,,2", "-1"])
def test_what_cannot_be_read_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="log.groups"):
        together(wrong, 0, 8, 4)


def test_groups_are_remembered_until_their_checkpoint_goes() -> None:
    """What was sent to a rank while it was in the group is not logged, whoever is in the group now."""
    runtime: Any = SimpleNamespace(top=0, archive=None)
    env: Any = None
    logs = Logs(env, runtime, lambda: 0, lambda reason: None)
    assert logs.together == ()
    for runtime.top, ranks in ((0, (1,)), (3, (0, 1)), (6, (1, 2))):
        logs.regroup(ranks)
    assert logs.together == (0, 1, 2)
    logs._committed(6)
    assert logs.together == (0, 1, 2), "a newcomer may start from the checkpoint before"
    runtime.archive = SimpleNamespace(drop_before=lambda top: None, stats=SimpleNamespace(failed=None))
    logs._committed(9)
    assert logs.together == (1, 2)
