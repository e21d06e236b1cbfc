"""JSON that something else may have written, or that is damaged."""

from __future__ import annotations

import json
from typing import Any


def parse(raw: str | bytes | bytearray) -> Any:
    """What ``raw`` says. Raises ValueError where it is not JSON, or nested too deeply."""
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def is_count(value: Any) -> bool:
    """Whether a value is a whole number of at least 0; ``true`` is none."""
    return type(value) is int and value >= 0
