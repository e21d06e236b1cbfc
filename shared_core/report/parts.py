"""A recovery as parts that follow each other: a pure function of what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shared_core.report.timeline import Recovery


class PartKind(Enum):
    """What a recovery waits for in one of its parts; the value is for a reader."""

    DETECTION = "detection"
    END = "workers end"
    PROCESS = "new process"
    SCRIPT = "start of the script"
    AGREEMENT = "agreement"
    STATE = "state and logs"
    BATCH = "batch again"
    ADMITTING = "replacement admitted"


@dataclass(frozen=True)
class RecoveryPart:
    """One part. ``begin``: in seconds from the detection of the failure; negative before it."""

    kind: PartKind
    begin: float
    seconds: float

    @property
    def end(self) -> float:
        """In seconds from the detection of the failure."""
        return self.begin + self.seconds


def parts(one: Recovery, limit_s: float | None = None) -> list[RecoveryPart]:
    """The parts of a recovery in order, as far as events say where they end. Each begins where the one before ends, but
    for the admitting of replacements, for which those that continued stand still once more. ``limit_s``: no part
    continues for longer, in seconds from the detection; for one that another failure has ended.
    """
    found: list[RecoveryPart] = []
    struck = [failure.struck for failure in one.failures if failure.struck is not None]
    at = min(0.0, min(struck) - one.detected) if struck else 0.0
    most = float("inf") if limit_s is None else limit_s
    for kind, end in _ends(one):
        if end is not None and min(end, most) > at:
            found.append(RecoveryPart(kind, at, min(end, most) - at))
            at = min(end, most)
    for rank, admitted in sorted(one.admitted_s.items(), key=lambda entry: entry[1]):
        begin = max(at, admitted - one.admitted_stall_s.get(rank, 0.0))
        if min(admitted, most) > begin:
            found.append(RecoveryPart(PartKind.ADMITTING, begin, min(admitted, most) - begin))
            at = min(admitted, most)
    return found


def _ends(one: Recovery) -> list[tuple[PartKind, float | None]]:
    """Where parts end, in seconds from the detection; None where nobody said so."""
    last = one.longest_stall_s
    struck = any(failure.struck is not None for failure in one.failures)
    detected = 0.0 if struck else None
    if one.ended_s is not None:
        return [
            (PartKind.DETECTION, detected),
            (PartKind.END, one.ended_s),
            (PartKind.PROCESS, one.started_s),
            (PartKind.SCRIPT, one.began_s),
            (PartKind.BATCH, last),
        ]
    if one.answer == "reroute":  # nobody waits for the replacement
        return [
            (PartKind.DETECTION, detected),
            (PartKind.AGREEMENT, one.slowest_survivor_ready_s),
            (PartKind.BATCH, last),
        ]
    joins = [
        start + one.user_start_s[rank] for rank, start in one.replacement_start_s.items() if rank in one.user_start_s
    ]
    formed = max(one.formed_s.values(), default=None)
    moved = [one.formed_s[rank] - took for rank, took in one.exchange_s.items() if rank in one.formed_s]
    return [
        (PartKind.DETECTION, detected),
        (PartKind.PROCESS, max(one.replacement_start_s.values(), default=None)),
        (PartKind.SCRIPT, max(joins, default=None)),
        (PartKind.AGREEMENT, max(moved, default=None)),
        (PartKind.STATE, max([*one.replacement_ready_s.values(), *([] if formed is None else [formed])], default=None)),
        (PartKind.BATCH, last),
    ]
