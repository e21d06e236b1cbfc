"""Data sets and samplers under a framework's loop: does the script change what they hold, other than by reading?

A replacement draws the indices of a pass again, and reads batches again, with what the data set held at the script's
start. So a change made while nothing was read, which the replacement has not made, is refused.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset, Sampler

from shared_core.worker.variables.changes import digests
from shared_core.worker.variables.kinds import FRAMEWORKS, RANDOM, kind_of, root_of
from shared_core.worker.variables.writer import LookCost, ValueWriter, attributes_of, read_own

_ATOMS = (bool, int, float, str, bytes, type(None))
_MOST = 32
#: Attributes of a loader: what it reads, and in which order.
_PARTS = ("dataset", "sampler", "batch_sampler")
_KINDS: tuple[type, ...] = (Dataset, Sampler)


class DataSets:
    """Watches the data sets of one script's loaders.

    Args:
        ignored: names of attributes that do not count.
        tell: called with a name and an interval in seconds when that attribute is not looked at in each step.
    """

    def __init__(self, ignored: set[str], tell: Callable[[str, float], Any]) -> None:
        self._loaders: Callable[[], Mapping[str, Any]] = dict
        self._writer = ValueWriter(lambda _: False)
        self._writer.of_data = True
        self._ignored, self._tell = ignored, tell
        #: Checksums of what was looked at after the last read (None before the first); names that had changed when the
        #: next read began.
        self._after: dict[str, int] | None = None
        self._by_script: set[str] = set()
        self._depth = 0
        self._costs: dict[str, LookCost] = {}

    def watch(self, loaders: Callable[[], Mapping[str, Any]]) -> None:
        """Look at what these loaders read from now on. Their names must be the same in a replacement."""
        self._loaders, self._after = loaders, None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What changes inside counts as changed by reading. May be nested."""
        if self._depth == 0:
            self._look()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._after = self._checksums(lambda name: name not in self._costs or self._costs[name].is_due)

    def changed(self) -> dict[str, bytes]:
        """Names and digests of what has changed while nothing was read."""
        self._look()
        self._writer.begins = False
        return {name: self._digest(value) for name, value in self._attributes() if name in self._by_script}

    def _look(self) -> None:
        if self._after is not None:
            now = self._checksums(self._after.__contains__)
            self._by_script.update(name for name, each in self._after.items() if now.get(name, each) != each)
            self._after = now

    def _checksums(self, wanted: Callable[[str], bool]) -> dict[str, int]:
        return {name: self._checksum(name, value) for name, value in self._attributes() if wanted(name)}

    def differ(self, theirs: Mapping[str, bytes]) -> str:
        """The first name in ``theirs`` for which this process holds something else; empty if there is none."""
        if not theirs:
            return ""
        self._by_script.update(theirs)
        here = dict(self._attributes())
        wrong = [name for name, digest in theirs.items() if name not in here or self._digest(here[name]) != digest]
        return wrong[0] if wrong else ""

    def _checksum(self, name: str, value: Any) -> int:
        begun = time.thread_time()
        try:
            found = zlib.crc32(self._writer.write(value))
        except Exception:  # too much: only its length is seen
            found = len(value) if hasattr(type(value), "__len__") else 0
        if wait_s := self._costs.setdefault(name, LookCost()).looked(time.thread_time() - begun):
            self._tell(name, wait_s)
        return found

    def _digest(self, value: Any) -> bytes:
        try:
            values, rows = read_own(self._writer.write([("", "", "", "it", [value])]))
        except Exception:
            return b""
        return digests(values, rows)[""]["it"]

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for name, loader in self._loaders().items():
            todo = [(f"{name}: {part}", getattr(loader, part, None)) for part in _PARTS]
            while todo and len(seen) < _MOST:
                path, thing = todo.pop(0)
                if id(thing) in seen:
                    continue
                seen.add(id(thing))
                if isinstance(thing, (list, dict)):
                    yield path, thing
                if not (isinstance(thing, _KINDS) or kind_of(type(thing)) == "object"):
                    continue
                if root_of(type(thing)) in FRAMEWORKS - _OURS:
                    continue
                for key, value in attributes_of(thing).items():
                    below = f"{path}.{key}"
                    if isinstance(value, _KINDS):
                        todo.append((below, value))
                    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], _KINDS):
                        todo.extend((f"{below}[{i}]", each) for i, each in enumerate(value))
                    elif not isinstance(value, (*_ATOMS, *RANDOM)) and key not in self._ignored:
                        yield below, value


#: Their samplers wrap those of the script.
_OURS = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"})
