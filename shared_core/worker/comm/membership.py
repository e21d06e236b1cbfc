"""This rank's place in a group, and its connections."""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

from shared_core.protocol.members import members_text
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.comm.places import GroupPlaces


class Membership:
    """What is known of a group without what runs in it. The runtime's lock guards it.

    Attributes:
        name: unique in the job and equal on all members.
        id: CRC32 of the name.
        rank: of this process in the group.
        ranks: global ranks of the members, in group order.
        members: ``ranks`` as a short text.
        inner: the gloo group of the live generation; None while there is none.
        inflight: operations that gloo has not yet finished or failed.
        places: from where its members have called; None where nobody compares that.
    """

    def __init__(self, name: str, rank: int, size: int, ranks: tuple[int, ...], timeout: timedelta) -> None:
        self.rank, self.size, self.ranks, self.timeout = rank, size, ranks, timeout
        self.members = members_text(ranks)
        self.rename(name)
        self.inner: InnerGroup | None = None
        self.inflight = 0
        self.places: GroupPlaces | None = None

    def rename(self, name: str) -> None:
        self.name, self.id = name, zlib.crc32(name.encode())

    def cut(self) -> None:
        """Drop its connections, if it has any. Callers hold the lock."""
        inner, self.inner = self.inner, None
        if inner is not None:
            inner.discard()

    @property
    def pg(self) -> Any:
        assert self.inner is not None
        return self.inner.pg
