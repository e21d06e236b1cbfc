"""Rank-local state, registered by name: captured at step boundaries, and put back in a replacement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shared_core.worker.state.generators import random_state, set_random_state
from shared_core.worker.variables.variables import Origin, Variables

Capture = Callable[[], Any]
Restore = Callable[[Any], None]

_RANDOM, _VARIABLES = "swift.random", "swift.variables"
#: Start of the names of what belongs to the modules and optimizers that are attached.
_ATTACHED = "swift."


@dataclass
class BoundaryPosition:
    """How far the program of this worker is.

    Attributes:
        entry: number of the entry call (fit, validate, test, predict); -1 before the first.
        resized: what is being restored is that of another number of workers.
        added: what is being restored is a copy of another rank's, because this one has been added.
        joining: there is a place where this worker begins, and its program has not come there yet.
        rejoined: this worker has been admitted by others that had continued without the failed worker, and nobody has
            acted on that yet.
    """

    boundaries: int = 0
    entry: int = -1
    resized: bool = False
    added: bool = False
    rejoined: bool = False
    joining: bool = False
    _origin: Origin = "same"

    @property
    def origin(self) -> Origin:
        return "other" if self.added or self.resized else self._origin

    def note_start(self, joining: bool, origin: Origin) -> None:
        self.joining, self._origin = joining, origin

    def note_rejoined(self, rejoined: bool) -> None:
        self.rejoined = rejoined

    @contextmanager
    def restoring(self, *, resized: bool, added: bool) -> Iterator[None]:
        """In here a replacement's state is put in place; see the attributes."""
        self.resized, self.added = resized, added
        try:
            yield
        finally:
            self.resized = self.added = False


@dataclass(frozen=True)
class _Part:
    capture: Capture
    restore: Restore
    forward_mutated: bool
    main: bool


class StateParts:
    """What only this rank has, by name. Random generators and the variables of the script are always among it."""

    def __init__(self, variables: Variables | None = None) -> None:
        self._parts: dict[str, _Part] = {}
        self.variables = variables or Variables(None)

    def register(
        self, name: str, capture: Capture, restore: Restore, *, forward_mutated: bool = False, main: bool = False
    ) -> None:
        """Add a part, or replace it.

        Args:
            capture: returns plain data (numbers, text, containers, tensors, numpy arrays); it is serialised at once, so
                live objects may be returned.
            restore: puts it back in a replacement, on the main thread, in the order of registration.
            forward_mutated: changed by forward; captured again before the first gradient bucket of each backward.
            main: it is rank 0's alone, also where another worker becomes rank 0.
        """
        self._parts[name] = _Part(capture, restore, forward_mutated, main)

    def unregister(self, name: str) -> None:
        """Forget a part; nothing if there is none."""
        self._parts.pop(name, None)

    def capture(self, *, forward_mutated: bool = False) -> dict[str, Any]:
        """All parts as they are now, or only those that forward changes. Random generators always."""
        wanted = {name: part for name, part in self._parts.items() if part.forward_mutated or not forward_mutated}
        parts = {name: part.capture() for name, part in wanted.items()}
        if not forward_mutated:
            parts[_VARIABLES] = self.variables.capture()
        parts[_RANDOM] = random_state()
        return parts

    def restore(self, values: Mapping[str, Any], *, attached: bool = True) -> None:
        """Put back what is in ``values``, of :meth:`capture`: variables of the script first, random generators last.
        With ``attached`` also what belongs to what is attached.
        """
        if _VARIABLES in values:
            self.variables.put_back(values[_VARIABLES])
        for name, part in self._parts.items():
            if name in values and (attached or not name.startswith(_ATTACHED)):
                part.restore(values[name])
        if _RANDOM in values:
            set_random_state(values[_RANDOM])

    def of_main(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of ``values`` that are rank 0's alone."""
        return {name: values[name] for name, part in self._parts.items() if part.main and name in values}
