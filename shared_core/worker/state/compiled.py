"""Compiled code that depends on what was compiled before it, which a replacement has not compiled.

``torch.compile`` makes code for the sizes that it meets first. When others come, it makes code for any size, which need
not give the same bits, and keeps the first code for the first sizes. A replacement meets the sizes of its own batches
first. So what sizes were met, and in which order, is published. A replacement that meets them in another order would
run other code than the failed worker: all workers go back to the newest checkpoint then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from shared_core.worker.comm import compat
from shared_core.worker.variables.variables import Origin

#: What was compiled for each input of each function, from the first on.
Orders = Mapping[str, list[str]]


class Compiled:
    """What Dynamo has compiled in this worker. ``origin``: whose state is being restored."""

    def __init__(self, origin: Callable[[], Origin], fall_back: Callable[[str], NoReturn]) -> None:
        self._origin, self._fall_back = origin, fall_back
        self._newest: object = None
        self._too_often = ""
        self._own: dict[str, list[str]] = {}
        self._before: Orders = {}

    def capture(self) -> dict[str, Any]:
        """What was compiled in which order, and a function that was compiled too often; plain data. May fall back."""
        compilations = compat.compilations()
        if compilations and compilations[-1] is not self._newest:
            self._newest = compilations[-1]
            self._too_often = self._too_often or next(filter(None, map(compat.compiled_too_often, compilations)), "")
            for where, sizes in compat.sizes_compiled_for().items():
                met = self._own.setdefault(where, [])
                if not met or met[-1] != sizes:
                    met.append(sizes)
            if why := differs(self._own, self._before):
                self._refuse(why)
        longer = {where: met for where, met in self._own.items() if len(met) >= len(self._before.get(where, ()))}
        return {"too often": self._too_often, "orders": {**self._before, **longer}}

    def restore(self, found: Mapping[str, Any]) -> None:
        """Where a worker failed. After a restart all compile again, and this does nothing."""
        if self._origin() != "same":
            return
        if found["too often"]:
            self._refuse(f"torch.compile has compiled {found['too often']} too often, and runs it as it is")
        self._before = found["orders"]
        if why := differs({}, self._before):
            self._refuse(why)

    def _refuse(self, why: str) -> NoReturn:
        self._fall_back(
            f"{why}: a replacement would run other code than the failed worker, with other bits. Give all batches the "
            "same sizes (drop_last=True, padding), or set torch._dynamo.config.automatic_dynamic_shapes = False"
        )


def differs(own: Orders, before: Orders) -> str:
    """Why code compiled in a process that saw ``before`` cannot run in one that saw ``own``; empty if it can."""
    for where, met in before.items():
        if compat.ANY_SIZE in met[0]:
            return f"sizes of {where} have changed within a batch, and torch.compile has compiled it for any"
        if any(mine != theirs for mine, theirs in zip(own.get(where, ()), met, strict=False)):
            return f"torch.compile has met sizes of {where} in another order than before the failure"
    return ""
