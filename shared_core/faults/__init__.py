"""Faults on purpose: the core and the adapters call :func:`point` at named places, where an armed fault strikes.

``spec``: faults as data. ``inject``: arming and striking. ``dispatch``: between tensor operations. Light
to import: the injector is part of the hot path, so nothing here imports torch but ``dispatch``, when it is needed.
"""

from __future__ import annotations

from shared_core.faults.inject import FaultInjected, arm, disarm, point
from shared_core.faults.spec import ANY_STEP, Fault

__all__ = ["ANY_STEP", "Fault", "FaultInjected", "arm", "disarm", "point"]
