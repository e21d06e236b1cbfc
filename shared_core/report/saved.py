"""What answers to failures have saved against restarts from checkpoints: a pure function of a run's history.

Each number comes from the events of the run. What they do not say is not guessed: it stays None, and so does the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared_core.report.history import Answer, History, outages, stall_s


@dataclass(frozen=True)
class Saving:
    """One failure, or several that followed each other before anybody trained again.

    Attributes:
        at: when the first was noticed, in seconds since the run began.
        took_s: until all continued, and what a replacement's entry cost the others later.
        steps: that a restart would have repeated: step boundaries since the last checkpoint; None if unknown.
        restart_s: what a restart would have taken, by the assumptions; None if unknown.
    """

    failed: tuple[int, ...]
    at: float
    took_s: float
    steps: int | None
    restart_s: float | None

    @property
    def saved_s(self) -> float | None:
        """Seconds; negative where a restart would have been faster."""
        return None if self.restart_s is None else self.restart_s - self.took_s


@dataclass(frozen=True)
class Savings:
    """All of them, and what they rest on. ``each``: one for each failure that was answered without a restart, or chain
    of such failures.
    """

    each: tuple[Saving, ...]
    assumptions: tuple[str, ...]

    @property
    def saved_s(self) -> float | None:
        """In all; None where one of them is unknown, or there is none."""
        known = [one.saved_s for one in self.each if one.saved_s is not None]
        return sum(known) if known and len(known) == len(self.each) else None


def savings(found: History, every: int | None = None) -> Savings:
    """What a run has saved: of each answer that kept survivors in place, and was completed. ``every``: steps between
    two checkpoints, in the place of those that the run has made.
    """
    start_s, how = _restart_s(found)
    in_place = [one for one in outages(found.answers) if one[-1].recovery.answer in ("replace", "drain", "reroute")]
    each = tuple(_saving(found, one, start_s, every) for one in in_place)
    return Savings(each, _assumptions(found, start_s, how, every) if each else ())


def has_checkpoints(found: History) -> bool:
    """Whether a run has made checkpoints, or continued from one. Against none nothing is compared."""
    return bool(found.checkpoints) or any(mark.what for mark in found.begins)


def _saving(found: History, outage: Sequence[Answer], start_s: float | None, every: int | None) -> Saving:
    at, took_s = outage[0].at, stall_s(outage)
    failures = [failure for one in outage for failure in one.recovery.failures]
    reached = [failure.boundaries for failure in failures if failure.boundaries is not None]
    steps = None
    if reached and every is not None:
        steps = max(reached) % every
    elif reached and has_checkpoints(found):
        steps = max(0, max(reached) - _last_line(found, at))
    restart_s = None
    if start_s is not None and steps is not None and (steps == 0 or found.step_s is not None):
        restart_s = start_s + steps * (found.step_s or 0.0)
    return Saving(tuple(sorted({failure.rank for failure in failures})), at, took_s, steps, restart_s)


def _last_line(found: History, at: float) -> int:
    """Step boundary from which a restart at that time would have continued."""
    lines = [mark for mark in (*found.begins, *found.checkpoints, *found.turns) if mark.at <= at]
    known = [mark.boundary for mark in sorted(lines, key=lambda mark: mark.at) if mark.boundary is not None]
    return known[-1] if known else 0


def _restart_s(found: History) -> tuple[float | None, str]:
    """What starting all workers again takes, and how that is known."""
    restarts = [one.recovery for one in found.answers if one.recovery.answer == "restart"]
    measured = [stall for one in restarts if (stall := one.longest_stall_s) is not None]
    if measured:
        return sum(measured) / len(measured), "the mean of the restarts of this run"
    return found.startup_s, "what the first start of this run took, from when all workers ran to their first batch"


def _assumptions(found: History, start_s: float | None, how: str, every: int | None) -> tuple[str, ...]:
    starting = "The events do not say how long starting takes, so nothing is estimated."
    if start_s is not None:
        starting = (
            f"Starting all workers again takes {start_s:.2f} s: {how}. Time in a queue and to read a checkpoint is "
        )
        starting += "left out." if how.startswith("what") else "left out, beyond what those restarts had of it."
    pace = "The events do not say how long a step takes, so failures with steps to repeat are not estimated."
    if found.step_s is not None:
        pace = (
            f"A step takes {found.step_s:.4g} s: the mean of {found.measured_steps} steps of this run, between "
            "failures."
        )
    whence = "A restart would load the newest checkpoint before the failure, or begin again where there is none."
    if every is not None:
        whence = f"A restart would load a checkpoint made every {every} steps, as asked for; its cost is left out."
    elif not has_checkpoints(found):
        whence = "The events name no checkpoint, so nothing is estimated: --checkpoint-every STEPS sets an interval."
    return (
        f"{whence} Checkpoints that the script writes itself are not in the events.",
        "A restart repeats the steps since then, up to where the failed worker was.",
        starting,
        pace,
        "A failure is noticed as early in both cases; time before that is left out.",
    )
