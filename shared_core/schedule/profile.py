"""Measured durations of the first steps become the planner's times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from shared_core.errors import ConfigError
from shared_core.schedule.schedule import Kind
from shared_core.schedule.timing import StageTimes, Times

#: Name of transfers among the samples; the others are named as the kinds of actions.
COMMUNICATION = "communication"
_NAMES = (*(kind.value for kind in Kind), COMMUNICATION)


@dataclass
class Profile:
    """Samples of durations, in seconds.

    Attributes:
        skip: samples of each sort that are left out at first: allocators and caches warm up.
        keep: samples kept of each sort; later ones are not looked at.
        samples: by stage and name.
    """

    skip: int = 1
    keep: int = 64
    samples: dict[tuple[int, str], list[float]] = field(default_factory=dict)

    def add(self, stage: int, kind: Kind | str, seconds: float) -> None:
        """One duration of an action at a stage, or of a transfer (``COMMUNICATION``) from it.

        Raises:
            ConfigError: there is no such kind, or the duration is negative or not finite.
        """
        name = str(kind)
        if name not in _NAMES:
            raise ConfigError(f"{name!r} is not profiled; choose one of {', '.join(_NAMES)}")
        if not 0 <= seconds < float("inf"):
            raise ConfigError(f"a duration of {name} must be a finite number of at least 0, got {seconds!r}")
        there = self.samples.setdefault((stage, name), [])
        if len(there) < self.skip + self.keep:
            there.append(seconds)

    @property
    def complete(self) -> bool:
        """Whether there are enough samples of all sorts that were seen at all."""
        return bool(self.samples) and all(len(one) >= self.skip + self.keep for one in self.samples.values())

    def times(self, stages: int) -> Times:
        """Medians. Where I and W were not measured, half of B each; B is their sum where it was not.

        Raises:
            ConfigError: a stage has no samples of F, or none of B nor of I and W.
        """
        found = []
        for stage in range(stages):
            forward, whole = self._median(stage, Kind.F), self._median(stage, Kind.B)
            first, second = self._median(stage, Kind.I), self._median(stage, Kind.W)
            if forward is None or (whole is None and (first is None or second is None)):
                raise ConfigError(f"stage {stage} has not been measured yet: F and B, or F, I and W, are needed")
            if whole is not None:
                first = whole / 2 if first is None else first
                second = max(0.0, whole - first) if second is None else second
            assert first is not None and second is not None
            optimizer = self._median(stage, Kind.OPT)
            found.append(StageTimes(forward, first, second, 0.0 if optimizer is None else optimizer, whole))
        transfers = [
            seconds for (_, name), one in self.samples.items() if name == COMMUNICATION for seconds in self._used(one)
        ]
        return Times(tuple(found), median(transfers) if transfers else 0.0)

    def medians(self, stage: int) -> dict[str, float]:
        """Of each sort of samples of a stage, by name."""
        return {name: median(self._used(one)) for (at, name), one in self.samples.items() if at == stage and one}

    def _used(self, samples: list[float]) -> list[float]:
        return samples[self.skip :] or samples

    def _median(self, stage: int, kind: Kind) -> float | None:
        samples = self.samples.get((stage, kind.value))
        return median(self._used(samples)) if samples else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, or to be sent to the worker that plans."""
        named = {f"{stage} {name}": samples for (stage, name), samples in self.samples.items()}
        return {"skip": self.skip, "keep": self.keep, "samples": named}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """Reverse of ``to_dict``.

        Raises:
            ConfigError: it is not a profile.
        """
        try:
            profile = cls(int(data["skip"]), int(data["keep"]))
            if profile.skip < 0 or profile.keep < 0:
                raise ValueError("it skips or keeps less than no samples")
            for key, samples in data["samples"].items():
                stage, _, name = key.partition(" ")
                for seconds in samples:
                    profile.add(int(stage), name, float(seconds))
            profile.samples = {key: samples for key, samples in profile.samples.items() if samples}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"this is not a profile: {error}") from error
        return profile

    @classmethod
    def merge(cls, profiles: Iterable[Profile]) -> Profile:
        """All samples of several workers together, each without what it skips."""
        merged = cls(skip=0, keep=0)
        for profile in profiles:
            for key, samples in profile.samples.items():
                merged.samples.setdefault(key, []).extend(profile._used(samples))
        merged.keep = max((len(samples) for samples in merged.samples.values()), default=0)
        return merged
