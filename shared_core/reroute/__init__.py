"""Re-routing: its data-parallel peers compute the micro-batches of a failed worker (ReCycle, arXiv 2405.14009).

Names are imported on first use: planning needs Python alone, so ``swiftctl plan`` runs without torch and OR-tools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_core.lazy import lazily

if TYPE_CHECKING:
    from shared_core.reroute.data_parallel import Outcome, Shares, start_alike, steps_of

__all__ = ["Outcome", "Shares", "start_alike", "steps_of"]

__getattr__ = lazily(__name__, {"shared_core.reroute.data_parallel": ("Outcome", "Shares", "start_alike", "steps_of")})
