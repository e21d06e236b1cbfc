"""Plans of selective logging as a table."""

from __future__ import annotations

from collections.abc import Sequence

from shared_core.pipeline.grouping import GroupPlan
from shared_core.report.text import columns, in_bytes, in_seconds


def format_plans(plans: Sequence[GroupPlan], chosen: GroupPlan | None = None) -> str:
    """One row for each plan, ``chosen`` with a star. Replay is that of one step, expected over failures."""
    rows = [("logs kept", "logged a step", "replay of a step", "by the slowest group", "groups of machines")]
    for plan in plans:
        rows.append(
            (
                in_bytes(plan.storage_bytes),
                in_bytes(plan.bytes_a_step),
                in_seconds(plan.replay_s),
                in_seconds(plan.slowest_replay_s),
                format_groups(plan.groups) + (" *" if plan == chosen else ""),
            )
        )
    return columns(rows)


def format_groups(groups: Sequence[Sequence[int]]) -> str:
    """Groups of neighbours as text: ``0 1 2-4``."""
    return " ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)
