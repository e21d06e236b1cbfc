"""Re-routing: the micro-batches of a failed worker are computed by its data-parallel peers (ReCycle, arXiv 2405.14009).

What adapters use of it, data-parallel steps, is imported on first use: planning needs Python alone, so ``swiftctl
plan`` runs where neither torch nor OR-tools is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_core.lazy import lazily

if TYPE_CHECKING:
    from shared_core.reroute.data_parallel import Outcome, steps_of
    from shared_core.reroute.shares import Shares, start_alike

__all__ = ["Outcome", "Shares", "start_alike", "steps_of"]

__getattr__ = lazily(
    __name__,
    {
        "shared_core.reroute.data_parallel": ("Outcome", "steps_of"),
        "shared_core.reroute.shares": ("Shares", "start_alike"),
    },
)
