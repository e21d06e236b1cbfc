"""Options from code, files and the environment, and the messages for mistakes in them."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from shared_core.config import CheckpointOptions, DetectionOptions, SwiftConfig, variable_of
from shared_core.config.page import page
from shared_core.errors import ConfigError, MissingExtra


def test_defaults_are_valid_and_survive_json() -> None:
    config = SwiftConfig()
    assert config.on_failure == "replace"
    assert SwiftConfig.from_dict(json.loads(config.to_json())) == config


def test_an_unknown_option_names_the_closest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'on_failre'; did you mean 'on_failure'\?"):
        SwiftConfig.from_dict({"on_failre": "replace"})
    with pytest.raises(ConfigError, match="unknown option 'zzzz'; known options: on_failure, data, seed, stragglers"):
        SwiftConfig.from_dict({"zzzz": 1})


def test_environment() -> None:
    env = {
        "SWIFT_RECOVERY_ON_FAILURE": "restart",
        "SWIFT_RECOVERY_DETECTION_WAIT_TIMEOUT_S": "12.5",
        "SWIFT_RECOVERY_STATE_VERIFY_CHECKSUMS": "no",
        "SWIFT_RECOVERY_SEED": "7",
        "SWIFT_RECOVERY_CHECKPOINT_DIR": "/somewhere",
        "SWIFT_RECOVERY_GENERATION": "3",  # set by the launcher, no option
        "UNRELATED": "1",
    }
    config = SwiftConfig.from_env(env)
    assert (config.on_failure, config.detection.wait_timeout_s, config.state.verify_checksums) == (
        "restart",
        12.5,
        False,
    )
    assert (config.seed, config.checkpoint.dir) == (7, "/somewhere")


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown option 'wait_timeot_s'; did you mean 'detection.wait_timeout_s'"):
        SwiftConfig.from_env({"SWIFT_RECOVERY_WAIT_TIMEOT_S": "3"})


def test_order_of_sources(tmp_path: Path) -> None:
    """Variables win over the file they name, that over the launcher's options, that over code."""
    path = tmp_path / "swift.json"
    path.write_text(json.dumps({"seed": 3, "data": "seeded"}))
    base = SwiftConfig.from_dict({"seed": 1, "detection": DetectionOptions(wait_timeout_s=1.0, connect_timeout_s=1.0)})
    env = {"SWIFT_RECOVERY_CONFIG": json.dumps({"seed": 2, "detection.connect_timeout_s": 2.0})}
    assert SwiftConfig.from_env({}, base) == base
    assert SwiftConfig.from_env(env, base).seed == 2
    env["SWIFT_RECOVERY_FILE"] = str(path)
    assert SwiftConfig.from_env(env, base).seed == 3
    env["SWIFT_RECOVERY_SEED"] = "4"
    config = SwiftConfig.from_env(env, base)
    assert (config.seed, config.data, config.detection.connect_timeout_s, config.detection.wait_timeout_s) == (
        4,
        "seeded",
        2.0,
        1.0,
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("checkpoint.directory", "checkpoint.dir"),
        ("checkpoint_directory", "checkpoint.dir"),
        ("detection.wait_timeout", "detection.wait_timeout_s"),
        ("wait_timeout_s", "detection.wait_timeout_s"),
        ("on_fail", "on_failure"),
        ("checkpoint.histroy", "checkpoint.history"),
    ],
)
def test_of_an_unknown_option_the_one_that_it_begins_like_is_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown option '{name}'; did you mean '{meant}'\?"):
        SwiftConfig.from_dict({name: 1})


def test_sections_are_given_as_mappings_or_as_what_they_are() -> None:
    given: Any = {"dir": "here", "keep": 3}
    config = SwiftConfig(checkpoint=given)
    assert config.checkpoint == CheckpointOptions(dir="here", keep=3)
    assert SwiftConfig.from_dict({"checkpoint": given}) == SwiftConfig.from_dict({"checkpoint": config.checkpoint})
    with pytest.raises(ConfigError, match="unknown option 'checkpoint.kep'; did you mean 'checkpoint.keep'"):
        SwiftConfig.from_dict({"checkpoint": {"kep": 3}})
    with pytest.raises(ConfigError, match="checkpoint must be a section of options"):
        SwiftConfig.from_dict({"checkpoint": "here"})


def test_every_option_has_a_variable_and_a_line_on_the_page() -> None:
    text = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    assert page() in text, "run python -m shared_core.config.page and put what it prints into docs/configuration.md"
    for name, value in SwiftConfig().items():
        if value is not None:
            assert SwiftConfig.from_env({variable_of(name): str(value)}) == SwiftConfig(), name


def test_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "swift.yaml"
    path.write_text("on_failure: restart\ncheckpoint: {every_steps: 50}\nstate.verify_checksums: false\n")
    config = SwiftConfig.from_file(path)
    changed = {"on_failure": "restart", "checkpoint.every_steps": 50, "state.verify_checksums": False}
    assert config.changed == changed


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
