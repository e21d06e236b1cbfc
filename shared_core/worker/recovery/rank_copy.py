"""Rank-local state of one rank as another begins with it, which becomes its copy (``on_failure="reroute"``)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shared_core.encoding.plain import dumps, loads
from shared_core.worker.state.ddp_buckets import BUCKETS
from shared_core.worker.state.publications import SharedMemoryPublisher
from shared_core.worker.state.records import from_plain, plain


def pack(publisher: SharedMemoryPublisher, boundary: int, groups: Collection[str]) -> bytes:
    """What a rank has published at a step boundary, and the newest of each record that it keeps for its replacements;
    not results of operations of ``groups``, which are not for others.
    """
    newest = {
        (key.kind, key.name): (key, value)
        for key, value in publisher.records.read()
        if key.kind != BUCKETS and key.kind not in groups
    }
    return dumps((publisher.read_boundary(boundary), plain(list(newest.values()))))


def unpack(publisher: SharedMemoryPublisher, packed: bytes) -> dict[str, Any]:
    """Keep in the copy's publisher what the other has kept. Returns what it had published at the step boundary,
    by name.
    """
    parts, kept = loads(packed)
    for key, value in from_plain(kept):
        publisher.records.add(key, value)
    return parts  # type: ignore[no-any-return]
