"""Fixtures of tests of checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_core.checkpoint.spool import Spool


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder whose files need no disk: where a test writes hundreds of them."""
    path = Path(tempfile.mkdtemp(prefix="test-checkpoint-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    job = tmp_path / "job"
    job.mkdir()
    return Spool(job / "checkpoints")


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """Where checkpoints are written."""
    return tmp_path / "storage"
