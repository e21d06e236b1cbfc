"""Files of options, as plain data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared_core.errors import ConfigError, MissingExtra
from shared_core.kinds import open_regular


def read(path: Path) -> dict[str, Any]:
    """The mapping that a ``.json`` or YAML file holds.

    Raises:
        ConfigError: it cannot be read or holds something else.
        MissingExtra: for YAML when PyYAML is not installed.
    """
    try:
        with open_regular(path) as file:
            text = file.read().decode()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be a YAML or JSON file of options: it is not text") from error
    return parse(text, str(path), is_json=path.suffix == ".json")


def parse(text: str, source: str, *, is_json: bool) -> dict[str, Any]:
    """The mapping that a text holds; errors name ``source``.

    Raises:
        ConfigError: it holds something else.
        MissingExtra: for YAML when PyYAML is not installed.
    """
    try:
        loaded = json.loads(text) if is_json else _parse_yaml(text, source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} must hold options as YAML or JSON: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{source} must hold a mapping of options, not {type(loaded).__name__}")
    return loaded


def _parse_yaml(text: str, source: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra(
            f"reading {source} needs PyYAML: pip install 'swift-recovery[lightning]', or use a .json file"
        ) from error
    try:
        return yaml.safe_load(text)
    # What its constructors raise for "!!bool x", "!!int ''" and "!!timestamp x" is no YAMLError.
    except (yaml.YAMLError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{error}") from error
