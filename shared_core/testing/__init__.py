"""Test tools that users may use too: the fault injector, digests of training state, and the soak test.

Light to import: the injector is part of the core's hot path, so nothing here imports torch.
"""

from __future__ import annotations

from shared_core.testing.faults import ANY_STEP, Fault, random_faults
from shared_core.testing.inject import FaultInjected, arm, disarm, point

__all__ = ["ANY_STEP", "Fault", "FaultInjected", "arm", "disarm", "point", "random_faults"]
