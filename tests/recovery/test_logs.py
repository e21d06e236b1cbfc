"""Which ranks start again together."""

from __future__ import annotations

import pytest

from shared_core.errors import ConfigError
from shared_core.recovery.logs import together


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
    with pytest.raises(ConfigError, match="log_groups"):
        together(wrong, 0, 8, 4)
