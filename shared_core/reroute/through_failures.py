"""How every part of a re-routed step continues after a failure: by another attempt, on the next survivor group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from shared_core.errors import SurvivorGroupBroken

T = TypeVar("T")


def through_failures(attempt: Callable[[], T], leave_survivor_group: Callable[[], None]) -> T:
    """Call ``attempt``, which continues an interrupted one, until no failure interrupts it; gradients enabled."""
    while True:
        try:
            # Evaluations come here, too, and messages of the step before may have to be differentiated.
            with torch.inference_mode(False), torch.enable_grad():
                return attempt()
        except SurvivorGroupBroken:
            leave_survivor_group()
