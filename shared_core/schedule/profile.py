"""Measured durations of one worker, from which the planner's times are made."""

from __future__ import annotations

from collections import deque
from statistics import median

from shared_core.errors import ConfigError
from shared_core.schedule.schedule import Kind

#: Name of transfers among the samples; other samples have the names of the kinds of actions.
COMMUNICATION = "communication"
_NAMES = (*(kind.value for kind in Kind), COMMUNICATION)
#: Samples of each sort that are kept.
_KEPT = 64


class Profile:
    """Samples of durations of one worker, in seconds, and the steps in which they were taken."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[int, float]]] = {}

    def add(self, kind: Kind | str, seconds: float, step: int = 0) -> None:
        """Note one duration of an action, or of a transfer (``COMMUNICATION``); ConfigError if it can be none."""
        name = str(kind)
        if name not in _NAMES:
            raise ConfigError(f"{name!r} is not profiled; choose one of {', '.join(_NAMES)}")
        if not 0 <= seconds < float("inf"):
            raise ConfigError(f"a duration of {name} must be a finite number of at least 0, got {seconds!r}")
        self._samples.setdefault(name, deque(maxlen=_KEPT)).append((step, seconds))

    def medians(self, since: int = 0) -> dict[str, float]:
        """Seconds by name, from the steps from ``since`` on.

        Transfers are measured once in a job: theirs has no age. Of the optimizer it is the least: others
        contain waiting.
        """
        found: dict[str, float] = {}
        for name, samples in self._samples.items():
            recent = [seconds for step, seconds in samples if step >= since or name == COMMUNICATION]
            if recent:
                found[name] = min(recent) if name == Kind.OPT else median(recent)
        return found
