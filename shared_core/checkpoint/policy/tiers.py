"""Several tiers: host memory survives faults of processes, storage those of machines."""

from __future__ import annotations

from collections.abc import Sequence

from shared_core.checkpoint.policy.situation import Decision, Policy, Situation


def due_tier(policy: Policy, tiers: Sequence[tuple[str, Situation]]) -> tuple[str | None, Decision]:
    """The deepest tier at which a checkpoint is due now, or None; a deeper one serves the shallower tiers too.

    Each tier is asked by itself, with the hazard of those faults that need it and with its own cost. With Young's rule
    that makes ``tau1 = sqrt(2 c1 / lambda_soft)`` and ``tau2 = sqrt(2 c2 / lambda_hard)``.

    Args:
        policy: asked for each.
        tiers: name and situation of each, the shallowest first; at least one.
    """
    for name, situation in reversed(tiers):
        decision = policy.due(situation)
        if decision.due:
            return name, decision
    return None, decision
