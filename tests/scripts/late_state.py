"""A module that a script imports inside its loop: it has state, and draws from generators."""

from __future__ import annotations

import random

import torch

FIRST = random.random() + float(torch.rand(()))
SEEN: list[float] = []
COUNT = 0


class Kept:
    total = 0.0


def add(value: float) -> float:
    """Changes all of it."""
    global COUNT
    COUNT += 1
    SEEN.append(value)
    Kept.total += value
    return COUNT * Kept.total
