"""Helpers inside workers, without a launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError, WaitTimeout
from shared_core.protocol import worker_env
from shared_core.system.jobdir import AGENT
from shared_core.worker import link


def environment(folder: Path) -> dict[str, str]:
    return {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "SWIFT_RECOVERY_JOB_DIR": str(folder),
        "SWIFT_RECOVERY_STORE": str(folder / AGENT),
        "SWIFT_RECOVERY_GENERATION": "3",
        "SWIFT_RECOVERY_INCARNATION": "1",
        "SWIFT_RECOVERY_EVENTS": str(folder / "events.jsonl"),
        "SWIFT_RECOVERY_CONFIG": SwiftConfig(seed=7).to_json(),
        "SWIFT_RECOVERY_RESTART": "5",
    }


def test_env_is_parsed(tmp_path: Path) -> None:
    me = worker_env.env(environment(tmp_path))
    assert (me.rank, me.world_size, me.generation, me.incarnation, me.restart) == (2, 4, 3, 1, 5)
    assert (me.store, me.config.seed) == (str(tmp_path / "agent"), 7)
    assert (me.prefix, me.rank_dir) == ("swift/5/", tmp_path / "rank2")
    assert not worker_env.launched({})
    with pytest.raises(ConfigError, match="not started by swiftrun"):
        worker_env.env({})


def test_a_missing_agent_is_named(tmp_path: Path) -> None:
    me = worker_env.env(environment(tmp_path))
    with pytest.raises(WaitTimeout, match=f"rank 2: no answer from the job's store at {tmp_path}/agent"):
        link.connect_store(timeout_s=0.2, where=me)
