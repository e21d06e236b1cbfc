"""The simulated device is compiled before tests that need it; without a compiler they are skipped with one line."""

from __future__ import annotations

import pytest
from simdev_build import CannotBuild, library


@pytest.fixture(scope="session")
def simulated() -> str:
    """The simulated device can be used; its name."""
    try:
        library()
    except CannotBuild as why:
        pytest.skip(str(why))
    return "sim"
