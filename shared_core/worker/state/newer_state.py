"""Optimizer state that is newer than the program: a replacement's has the update in it that is about to be left out."""

from __future__ import annotations

import sys
import types
import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from shared_core.worker.variables.kinds import of_every_optimizer
from shared_core.worker.variables.scopes import is_script
from shared_core.worker.variables.writer import ValueWriter

#: Attributes that schedulers of torch set.
_OF_SCHEDULERS = frozenset({"step", "_opt_called"})


class NewerState(defaultdict[Any, Any]):
    """Takes the place of ``optimizer.state`` meanwhile. A script that looks at it would see what the failed worker did
    not have: then ``refuse`` is called. Others may, as they know that it is newer.

    Attributes:
        plain: the dictionary whose place it takes.
    """

    def __init__(self, plain: defaultdict[Any, Any], refuse: Callable[[], Any]) -> None:
        super().__init__(plain.default_factory, plain)
        self.plain, self._refuse = plain, refuse


def _looked_at(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        if _is_script(sys._getframe(1)):
            self._refuse()
        return getattr(defaultdict, name)(self, *args)

    return method


_LOOKS = "__getitem__ __iter__ __len__ __contains__ get keys values items"
_CHANGES = "__setitem__ __delitem__ clear pop update"
for _name in f"{_LOOKS} {_CHANGES}".split():
    setattr(NewerState, _name, _looked_at(_name))


def _is_script(frame: types.FrameType | None) -> bool:
    """Whether the script reads, by itself or through torch, as ``optimizer.state_dict()`` does."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("torch."):
        frame = frame.f_back
    return frame is not None and is_script(frame.f_code, frame.f_globals)


def kept_beside(optimizer: Optimizer) -> Any:
    """A checksum of what an optimizer of the script keeps in its groups and attributes."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    out = of_every_optimizer() | _OF_SCHEDULERS
    own = {name: value for name, value in vars(optimizer).items() if name not in out}
    try:
        return zlib.crc32(ValueWriter(lambda _: False).write([groups, own]))
    except Exception:  # too much, or what cannot be written: it may have changed
        return object()
