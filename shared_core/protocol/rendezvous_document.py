"""The document by which the machines of a job meet: its shape."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from shared_core.protocol.codec import Count, Name, Port, damaged, decode

FORMING, RUNNING, ENDED = "forming", "running", "ended"
#: What to do about a damaged document.
ADVICE = "choose another --rdzv-id"


class _Member(TypedDict):
    name: str
    nproc: Count
    nnodes: str


class _Host(_Member, total=False):
    host: bool


class _Phase(TypedDict):
    phase: Literal["forming", "running", "ended"]


class _Document(_Phase, total=False):
    round: Count
    attempt: Count
    run: Name
    members: list[_Host]
    store: tuple[str, Port]
    beat: Count


#: Fields that a document must have in each phase.
_NEEDED = {
    FORMING: ("round", "attempt", "run", "members"),
    RUNNING: ("round", "attempt", "run", "members", "store"),
    ENDED: (),
}


def read_document(raw: bytes, key: str) -> dict[str, Any]:
    """The document; raises DamagedRecord. ``key``: where it is kept, for the message."""
    document: dict[str, Any] = decode(raw, _Document, key, ADVICE)
    phase = document["phase"]
    for name in _NEEDED[phase]:
        if name not in document:
            raise damaged(key, f"it is {phase} without {name!r}", ADVICE)
    if phase == RUNNING and not document["members"]:
        raise damaged(key, "it is running without members", ADVICE)
    return document | {"store": list(document["store"])} if "store" in document else document
