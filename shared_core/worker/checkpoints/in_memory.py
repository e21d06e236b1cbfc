"""Snapshots in the machines' memories, seen from a worker; :mod:`~shared_core.launcher.neighbour` keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from shared_core.errors import CorruptFile
from shared_core.plain_json import is_count, parse
from shared_core.system.snapshot_wire import GET, LIST, PART, SIZE, Key, ask, receive_bytes
from shared_core.system.wire import connect

#: Longest wait for another machine's list, in seconds.
_LIST_S = 10.0
#: Machines that are asked at once.
_AT_ONCE = 16


@dataclass(frozen=True)
class _Source:
    machine: str
    secret: bytes
    where: str
    key: Key
    rank: int
    world_size: int
    files: tuple[str, ...]
    meta: Mapping[str, Any]

    def read(self, name: str) -> bytes:
        with connect(self.machine, self.secret) as link:
            ask(link, GET, {"where": self.where, "key": self.key, "name": name})
            size = SIZE.unpack(link.data(PART, SIZE.size))[0]
            if size < 0:
                raise ConnectionError("it is gone")
            return receive_bytes(link, size)


def find_in_memory(
    machines: Iterable[str | None], rank: int, world_size: int, secret: bytes
) -> list[tuple[int, Mapping[str, Any], Callable[[str], bytes]]]:
    """Snapshots in any machine's memory with a rank's part, oldest first: step, meta, and a reader of its files.

    Machines that do not answer are passed over. A reader takes a file from any machine that has it, or
    raises CorruptFile.
    """
    names = [machine for machine in machines if machine is not None]
    if not names:
        return []
    with ThreadPoolExecutor(min(len(names), _AT_ONCE), "swift-near") as pool:
        held = [source for found in pool.map(lambda name: _held_by(name, secret), names) for source in found]
    mine = {
        json.dumps([each.key, each.meta]): each for each in held if (each.rank, each.world_size) == (rank, world_size)
    }
    found = []
    for each in sorted(mine.values(), key=lambda each: each.key):
        sources = [other for other in held if other.key == each.key and other.meta == each.meta]
        found.append((each.key[1], each.meta, _reader(sources)))
    return found


def _held_by(machine: str, secret: bytes) -> list[_Source]:
    """Empty if the machine cannot be asked; that takes at most ``_LIST_S`` and the time to connect."""
    try:
        with connect(machine, secret) as link:
            link.settimeout(_LIST_S)
            ask(link, LIST, {})
            return [_source(machine, secret, one) for one in parse(link.receive().data)]
    except (OSError, KeyError, TypeError, ValueError):
        return []


def _source(machine: str, secret: bytes, one: dict[str, Any]) -> _Source:
    """Check and convert one entry of a machine's list; raises ValueError, TypeError or KeyError if it is damaged."""
    found = _Source(machine, secret, **(one | {"key": tuple(one["key"])}))
    whole = (*found.key, found.rank, found.world_size)
    if not (len(found.key) == 2 and all(map(is_count, whole)) and isinstance(found.meta, dict)):
        raise ValueError("no snapshot of ours")
    if not isinstance(found.files, list) or not all(isinstance(name, str) for name in found.files):
        raise ValueError("no files of a snapshot")
    return found


def _reader(sources: list[_Source]) -> Callable[[str], bytes]:
    def read(name: str) -> bytes:
        why = "no machine has it"
        for source in sources:
            if name in source.files:
                try:
                    return source.read(name)
                except OSError as error:
                    why = f"{source.machine}: {error}"
        raise CorruptFile(f"{name} cannot be read from any machine's memory ({why})")

    return read
