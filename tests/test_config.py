"""Options from code, files and the environment, and the messages for mistakes in them."""

from __future__ import annotations

import builtins
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError, MissingExtra


def test_defaults_are_valid_and_survive_json() -> None:
    config = SwiftConfig()
    assert config.on_failure == "replace"
    assert SwiftConfig.from_dict(json.loads(config.to_json())) == config


def test_an_unknown_option_names_the_closest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'on_failre'; did you mean 'on_failure'\?"):
        SwiftConfig.from_dict({"on_failre": "replace"})
    with pytest.raises(ConfigError, match=r"unknown option 'zzzz'; known options: on_failure, replace_timeout_s"):
        SwiftConfig.from_dict({"zzzz": 1})


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        SwiftConfig(on_failure="nothing")


def test_environment() -> None:
    env = {
        "SWIFT_RECOVERY_ON_FAILURE": "restart",
        "SWIFT_RECOVERY_WAIT_TIMEOUT_S": "12.5",
        "SWIFT_RECOVERY_VERIFY_CHECKSUMS": "no",
        "SWIFT_RECOVERY_SEED": "7",
        "SWIFT_RECOVERY_CHECKPOINT_DIR": "/somewhere",
        "SWIFT_RECOVERY_GENERATION": "3",  # set by the launcher, no option
        "UNRELATED": "1",
    }
    config = SwiftConfig.from_env(env)
    assert (config.on_failure, config.wait_timeout_s, config.verify_checksums) == ("restart", 12.5, False)
    assert (config.seed, config.checkpoint_dir) == (7, "/somewhere")


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown option 'wait_timeot_s'; did you mean 'wait_timeout_s'"):
        SwiftConfig.from_env({"SWIFT_RECOVERY_WAIT_TIMEOT_S": "3"})


def test_order_of_sources(tmp_path: Path) -> None:
    """Variables win over the file they name, that over the launcher's options, that over code."""
    path = tmp_path / "swift.json"
    path.write_text(json.dumps({"seed": 3, "data": "seeded"}))
    base = SwiftConfig(seed=1, wait_timeout_s=1.0, connect_timeout_s=1.0)
    env = {"SWIFT_RECOVERY_CONFIG": json.dumps({"seed": 2, "connect_timeout_s": 2.0})}
    assert SwiftConfig.from_env({}, base) == base
    assert SwiftConfig.from_env(env, base).seed == 2
    env["SWIFT_RECOVERY_FILE"] = str(path)
    assert SwiftConfig.from_env(env, base).seed == 3
    env["SWIFT_RECOVERY_SEED"] = "4"
    config = SwiftConfig.from_env(env, base)
    assert (config.seed, config.data, config.connect_timeout_s, config.wait_timeout_s) == (4, "seeded", 2.0, 1.0)


def test_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "swift.yaml"
    path.write_text("on_failure: restart\ncheckpoint_every_steps: 50\nverify_checksums: false\n")
    config = SwiftConfig.from_file(path)
    changed = {"on_failure": "restart", "checkpoint_every_steps": 50, "verify_checksums": False}
    assert asdict(config) == asdict(SwiftConfig()) | changed


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file .*absent.json"):
        SwiftConfig.from_file(tmp_path / "absent.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a mapping of options, not list"):
        SwiftConfig.from_file(tmp_path / "list.json")
    (tmp_path / "wrong.yaml").write_text("seeed: 1\n")
    with pytest.raises(ConfigError, match="did you mean 'seed'"):
        SwiftConfig.from_file(tmp_path / "wrong.yaml")


def test_yaml_without_pyyaml_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swift.yaml").write_text("seed: 1\n")
    import_module = builtins.__import__

    def without_yaml(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "yaml":
            raise ImportError("No module named 'yaml'")
        return import_module(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_yaml)
    with pytest.raises(MissingExtra, match=r"needs PyYAML: pip install 'swift-recovery\[lightning\]'"):
        SwiftConfig.from_file(tmp_path / "swift.yaml")
