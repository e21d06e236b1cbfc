"""Measured durations of the first steps, from which the planner's times are made."""

from __future__ import annotations

from statistics import median

from shared_core.errors import ConfigError
from shared_core.schedule.schedule import Kind

#: Name of transfers among the samples; the others are named as the kinds of actions.
COMMUNICATION = "communication"
_NAMES = (*(kind.value for kind in Kind), COMMUNICATION)
#: Samples kept of each sort; later ones are not looked at.
_KEPT = 64


class Profile:
    """Samples of durations of one worker, in seconds."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {}

    def add(self, kind: Kind | str, seconds: float) -> None:
        """One duration of an action, or of a transfer (``COMMUNICATION``).

        Raises:
            ConfigError: there is no such kind, or the duration is negative or not finite.
        """
        name = str(kind)
        if name not in _NAMES:
            raise ConfigError(f"{name!r} is not profiled; choose one of {', '.join(_NAMES)}")
        if not 0 <= seconds < float("inf"):
            raise ConfigError(f"a duration of {name} must be a finite number of at least 0, got {seconds!r}")
        there = self._samples.setdefault(name, [])
        if len(there) < _KEPT:
            there.append(seconds)

    def medians(self) -> dict[str, float]:
        """Of each sort of samples, by name."""
        return {name: median(samples) for name, samples in self._samples.items()}
