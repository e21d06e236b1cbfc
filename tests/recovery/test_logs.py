"""Which ranks start again together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shared_core.errors import ConfigError
from shared_core.worker.messages.archive import Archive
from shared_core.worker.messages.disk_log import DiskLog, together


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
    env: Any = None
    log = DiskLog(env)
    assert log.together == ()
    for boundary, ranks in ((0, (1,)), (3, (0, 1)), (6, (1, 2))):
        log.regroup(ranks, boundary)
    assert log.together == (0, 1, 2)
    log.committed(6)
    assert log.together == (0, 1, 2), "a replacement may start from the checkpoint before"
    log.archive = cast(
        "Archive", SimpleNamespace(drop_before=lambda boundary: None, stats=SimpleNamespace(failed=None))
    )
    log.committed(9)
    assert log.together == (1, 2)
