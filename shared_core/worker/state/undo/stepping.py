"""When an optimizer's update begins: after the closure, if ``step`` has one; Lightning's runs forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: What a step pre-hook is given and may return in its place.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def begin_after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], begin: Callable[[], None], *, after_hooks: bool = False
) -> Arguments | None:
    """For a step pre-hook with these arguments: have ``begin`` called now, or when the closure has returned. Returns
    what the hook is to return. With ``after_hooks`` it is called, also without a closure, when all pre-hooks have
    been called.
    """
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None and not after_hooks:
        begin()
        return None

    def then_begin() -> Any:
        result = closure() if closure is not None else None
        begin()
        return result

    return (args[0],), {**kwargs, "closure": then_begin}
