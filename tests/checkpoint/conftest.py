"""Fixtures of tests of checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder whose files need no disk: where a test writes hundreds of them."""
    path = Path(tempfile.mkdtemp(prefix="test-checkpoint-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)
