"""Orders of passes over the data that a rank publishes: the indices, where the rest of a pass may be dealt out to
another number of workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from shared_core.encoding.plain import Piece, loads, pieces
from shared_core.errors import CorruptFile
from shared_core.loaders.reshard import loader_states, pack_indices, unpack_indices
from shared_core.worker.state.publication_file import read_file

#: Start of the names of their files.
_ORDER = "order."


class OrderFiles:
    """The orders of one rank. ``put`` and ``remove`` write and remove files in ``folder``."""

    def __init__(
        self, folder: Path, put: Callable[[str, bytes, Sequence[Piece]], object], remove: Callable[[str], None]
    ) -> None:
        self._folder, self._put, self._remove = folder, put, remove
        self._packed: dict[str, Any] = {}
        #: Of failed workers, as long as it is not known which of their step boundaries need them.
        self._left: set[str] = set()
        #: Which orders each step boundary needs.
        self._named: dict[int, frozenset[str]] = {}

    def look(self) -> None:
        self._left = {path.name for path in self._folder.glob(f"{_ORDER}*")}

    def write(self, indices: list[Any]) -> str:
        """Publish the indices of a pass over the data. Returns its name."""
        name = f"{_ORDER}{os.urandom(6).hex()}"
        self._packed[name] = pack_indices(indices)
        self._put(name, b"", pieces(self._packed[name]))
        return name

    def read(self, name: str) -> list[Any]:
        """The indices published under ``name``. Raises CorruptFile if they are damaged."""
        try:
            return unpack_indices(self.read_packed(name))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFile(f"{self._folder}/{name} holds no order of a pass: {error!r}") from error

    def read_packed(self, name: str) -> Any:
        """The indices published under ``name``, packed; quick in the process that published them."""
        if name not in self._packed:
            self._packed[name] = loads(read_file(self._folder / name)[1])
        return self._packed[name]

    def drop(self, name: str) -> None:
        self._packed.pop(name, None)
        self._remove(name)

    def note(self, boundary: int, parts: Any) -> None:
        if self._left:
            states = (state for _, state in loader_states(parts))
            self._named[boundary] = frozenset(str(each["order"]) for state in states for each in state["iterations"])

    def drop_unnamed(self, kept: Iterable[int]) -> None:
        """Remove failed workers' orders once all step boundaries that are kept are this worker's own. One that these
        still name, because its pass continues, is left to the next replacement.
        """
        kept = set(kept)
        self._named = {boundary: names for boundary, names in self._named.items() if boundary in kept}
        if self._left and self._named.keys() == kept:
            for name in self._left.difference(*self._named.values()):
                self.drop(name)
            self._left.clear()
            self._named.clear()

    def forget_boundaries(self) -> None:
        self._named.clear()


class StateOrders:
    """Where loaders publish the order of their passes; see :class:`shared_core.loaders.Orders`. ``may_drop``:
    samples may be left out when the number of workers changes; ``asked``: it may change while the job runs.
    """

    def __init__(self, files: OrderFiles, may_drop: bool, asked: bool) -> None:
        self.may_drop, self.asked = may_drop, asked
        self.write, self.read, self.drop = files.write, files.read, files.drop
