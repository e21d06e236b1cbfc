"""How every part of a re-routed step continues after a failure: by another attempt, on the next survivor group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from shared_core.errors import SurvivorGroupBroken

T = TypeVar("T")


def through_failures(attempt: Callable[[], T], leave_survivor_group: Callable[[], None]) -> T:
    """Call ``attempt`` until no failure interrupts it, with gradients enabled.

    Args:
        attempt: forms a survivor group where there is none, and continues where the attempt before was interrupted.
        leave_survivor_group: called when the survivor group in use is broken.
    """
    while True:
        try:
            # Evaluations come here, too, and messages of the step before may have to be differentiated.
            with torch.inference_mode(False), torch.enable_grad():
                return attempt()
        except SurvivorGroupBroken:
            leave_survivor_group()
