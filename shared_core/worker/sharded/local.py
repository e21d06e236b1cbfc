"""What one rank holds of a tensor that may be divided over ranks."""

from __future__ import annotations

from typing import Any

import torch


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this is a ``DTensor``, without importing that class."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Any) -> torch.Tensor:
    """All of a tensor, or this rank's part of a ``DTensor``. It shares memory with the tensor."""
    if not is_distributed(tensor):
        return tensor  # type: ignore[no-any-return]
    if not torch.is_grad_enabled():
        return tensor.to_local()  # type: ignore[no-any-return]
    with torch.no_grad():  # with gradients it would be another tensor at each call
        return tensor.to_local()  # type: ignore[no-any-return]
