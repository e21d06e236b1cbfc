"""A dispatch mode that sees every tensor operation, for faults inside an optimizer update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class BeforeEach(TorchDispatchMode):
    def __init__(self, each: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._each = each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") != "profiler":  # the optimizer's own annotations are operations too
            self._each()
        return func(*args, **(kwargs or {}))
