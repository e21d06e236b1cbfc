"""Comparing what :mod:`shared_core.encoding.values` has encoded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def same(one: Any, two: Any) -> bool:
    """Whether two encoded values are equal, tensors by value (NaN equals NaN)."""
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return isinstance(one, Tensor) and isinstance(two, Tensor) and torch.equal(one.nan_to_num(), two.nan_to_num())
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, float) and isinstance(two, float) and math.isnan(one):
        return math.isnan(two)
    return bool(np.array_equal(one, two)) if isinstance(one, np.ndarray) else bool(one == two)
