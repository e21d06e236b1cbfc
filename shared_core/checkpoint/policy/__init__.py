"""When to make checkpoints: pure functions of what is known at a step boundary. See ``docs/checkpoints.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shared_core.checkpoint.policy.progress import Coci, CociLiteral
from shared_core.checkpoint.policy.situation import (
    Decision,
    Exponential,
    Guards,
    LossCurve,
    Policy,
    Situation,
    grown,
)
from shared_core.checkpoint.policy.timed import CheckFreq, Daly, Exact, Fixed, Young
from shared_core.checkpoint.policy.value import Value, price_of_delay
from shared_core.errors import ConfigError

#: Policies by the name of the option's value.
POLICIES: Mapping[str, Callable[..., Policy]] = {
    "value": Value,
    "fixed": Fixed,
    "young": Young,
    "daly": Daly,
    "exact": Exact,
    "checkfreq": CheckFreq,
    "coci": Coci,
    "coci_literal": CociLiteral,
}


def make_policy(name: str, **options: Any) -> Policy:
    """The policy of this name; ``fixed`` needs ``every_steps``. Raises ConfigError for an unknown policy or option."""
    if name not in POLICIES:
        raise ConfigError(f"unknown checkpoint policy {name!r}: choose from {', '.join(POLICIES)}")
    try:
        return POLICIES[name](**options)
    except TypeError as error:
        raise ConfigError(f"checkpoint policy {name!r}: {error}") from error


__all__ = [
    "POLICIES",
    "CheckFreq",
    "Coci",
    "CociLiteral",
    "Daly",
    "Decision",
    "Exact",
    "Exponential",
    "Fixed",
    "Guards",
    "LossCurve",
    "Policy",
    "Situation",
    "Value",
    "Young",
    "grown",
    "make_policy",
    "price_of_delay",
]
