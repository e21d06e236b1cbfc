"""State of a script that follows a replacement: what its loop counts, averages or remembers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from shared_core.encoding.attributes import Holders
from shared_core.encoding.values import NotPlain, assign, decode, encode, holds_weights
from shared_core.errors import ConfigError
from shared_core.worker.variables.kinds import root_of

#: End of the names of entries for attributes that a ``state_dict`` does not hold.
_BESIDE = " beside"
_OF_MODULES = frozenset(vars(nn.Module()))


class Registered:
    """Objects and counters that a script has registered, in the order in which it did."""

    def __init__(self) -> None:
        self._all: dict[str, Any] = {}
        self._beside: dict[str, Holders] = {}
        self._counters: dict[str, SimpleNamespace] = {}

    def add(self, objects: tuple[Any, ...], values: Mapping[str, Any]) -> tuple[SimpleNamespace, bool]:
        """Register objects and counters: the counters' namespace, and whether an object holds weights."""
        counters = SimpleNamespace(**values)
        weigh = False
        for each in (*objects, *([counters] if values else [])):
            if not hasattr(each, "__dict__") and not hasattr(each, "state_dict"):
                raise ConfigError(
                    f"register() got a {type(each).__name__}, which has no state that could be put back: pass it by "
                    "name, as in counters = job.register(total=0.0)"
                )
            name = f"{len(self._all)} {type(each).__name__}"
            self._all[name] = each
            if hasattr(each, "state_dict") and (beside := _beside(each)):
                self._beside[name + _BESIDE] = Holders(beside, _OF_MODULES | _held_by(each))
            weighs = holds_weights(each)
            if each is counters and not weighs:
                self._counters[name] = counters
            weigh = weigh or weighs
        return counters, weigh

    def capture(self) -> dict[str, Any]:
        """The state of all, encoded; raises ConfigError where an object holds what cannot be published."""
        found = {name: _capture(name, each) for name, each in self._all.items()}
        return found | {name: holders.capture() for name, holders in self._beside.items()}

    def restore(self, found: Mapping[str, Any]) -> None:
        """Put back what :meth:`capture` has returned; objects that it does not hold stay."""
        for name, each in self._all.items():
            if name in found:
                _restore(each, found[name])
        for name, holders in self._beside.items():
            if name in found:
                holders.restore(found[name])

    def capture_counters(self) -> dict[str, Any]:
        """The state of the counters alone, without those that hold weights."""
        return {name: _capture(name, each) for name, each in self._counters.items()}

    def restore_counters(self, found: Mapping[str, Any]) -> None:
        for name, values in found.items():
            if name in self._counters:
                _restore(self._counters[name], values)


def _capture(name: str, each: Any) -> Any:
    try:
        return encode(each.state_dict() if hasattr(each, "state_dict") else vars(each))
    except NotPlain as error:
        raise ConfigError(
            f"the registered object {name.split()[1]!r} holds a {error}, which cannot be published for a replacement: "
            "register plain data, or give it state_dict() and load_state_dict()"
        ) from error


def _restore(each: Any, data: Any) -> None:
    if hasattr(each, "load_state_dict"):
        each.load_state_dict(decode(data))
        return
    for name, value in decode(data).items():
        setattr(each, name, assign(getattr(each, name, None), encode(value)))


def _beside(each: Any) -> dict[str, object]:
    """Objects whose attributes the ``state_dict`` of ``each`` may not hold, as of metrics of torchmetrics."""
    parts = each.named_modules() if isinstance(each, nn.Module) else [("", each)]
    return {path: part for path, part in parts if hasattr(part, "__dict__") and root_of(type(part)) != "torch"}


def _held_by(each: Any) -> frozenset[str]:
    """Attributes that its ``state_dict`` holds under their names; none for modules."""
    if isinstance(each, nn.Module):
        return frozenset()
    state = each.state_dict()
    return frozenset(name for name in state if isinstance(name, str)) if isinstance(state, Mapping) else frozenset()
