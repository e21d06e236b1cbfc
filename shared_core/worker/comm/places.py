"""Each operation's place in the program, which the members of a group compare when it ends.

Members on the same machine write their places to memory that all of them share, before an operation begins; whoever
sees it end sees the places of all who took part. So nothing is sent, and what was mixed reaches nobody.
"""

from __future__ import annotations

import mmap
import struct
import threading
from pathlib import Path

from shared_core.errors import PlaceMismatch
from shared_core.protocol.place import AFTER, SIZE, CollectivePlace, apart
from shared_core.resources import map_file
from shared_core.worker.comm.compat import in_backward

#: Operations, and messages of each member, whose places are kept.
_OPERATIONS, _MESSAGES = 512, 256
#: Operations whose places are told to other machines.
_TOLD = 256
#: In front of a place: sequence number + 1 of the operation; that of the message, and a number for its channel.
_SEQ, _KEY = struct.Struct("<I"), struct.Struct("<II")
_ENTRY, _MESSAGE = _SEQ.size + SIZE, _KEY.size + SIZE
#: At the beginning of the memory: the program itself has its ranks at different places in collectives; in messages.
_FLAGS = 64
_COLLECTIVES, _POINT_TO_POINT = 0, 1
_WRAP = 0xFFFFFFFF
_NOWHERE = bytes(SIZE)


class ProgramPlace:
    """Where the program of this rank is. Changed on its thread only."""

    def __init__(self) -> None:
        self._program = threading.get_ident()
        self._go(CollectivePlace())

    def _go(self, place: CollectivePlace) -> None:
        self.now, self._packed = place, place.packed()
        self._program = threading.get_ident()

    def packed(self) -> bytes:
        """The place of an operation that is called now, ``SIZE`` bytes; zeros on threads of the script's own."""
        if threading.get_ident() == self._program or in_backward():
            return self._packed
        return _NOWHERE

    def enter_call(self, entry: int) -> None:
        self._go(CollectivePlace(entry))

    def begin(self, phase: int, epoch: int | None) -> None:
        """A phase of the script or an epoch begins, without passes so far."""
        self._go(self.now._replace(phase=phase, epoch=-1 if epoch is None else epoch, pass_=0, batch=0))

    def begin_pass(self) -> None:
        self._go(self.now._replace(pass_=self.now.pass_ + 1, batch=0))

    def end_pass(self) -> None:
        self._go(self.now._replace(batch=AFTER))

    def step(self, epoch: int | None) -> None:
        """A step boundary is passed. ``epoch``: where the loop tells it in no other way; a new one begins a pass."""
        entry, phase, now, pass_, batch = self.now
        if epoch is not None and epoch != now:
            phase, now, pass_, batch = 1, epoch, 1, 0
        self._go(CollectivePlace(entry, phase, now, pass_, max(batch, 0) + 1))

    def capture(self) -> list[int]:
        return list(self.now)

    def restore(self, place: list[int]) -> None:
        self._go(CollectivePlace(*place))


class GroupPlaces:
    """The places from which the members of one group have called its last operations: a ring in shared memory, without
    locks. Each member writes its own entries; an entry carries its number, so a reader knows an older one.

    Args:
        path: of the memory, the same for all members on this machine.
        ranks: global, in group order.
        own: this rank's index among them.

    Raises:
        OutOfResources: there is no room for it.
    """

    def __init__(self, path: Path, ranks: tuple[int, ...], own: int) -> None:
        self._ranks, self._own, self._size = ranks, own, len(ranks)
        self._row = _ENTRY * self._size
        self._messages = _FLAGS + _OPERATIONS * self._row
        self._memory: mmap.mmap = map_file(path, self._messages + _MESSAGES * _MESSAGE * self._size)

    def called(self, seq: int, place: bytes) -> None:
        at = _FLAGS + seq % _OPERATIONS * self._row + self._own * _ENTRY
        self._memory[at : at + _ENTRY] = _SEQ.pack(seq + 1 & _WRAP) + place

    def elsewhere(self, seq: int, place: bytes, *, recovered: bool) -> tuple[int, CollectivePlace] | None:
        """A member that has called operation ``seq`` from a place where it must not be, and that place; None if all
        agree or nothing is known. ``place`` is this rank's, packed; ``recovered``: a worker has failed.

        A mismatch before any failure is the program's own, and is allowed from then on.
        """
        at = _FLAGS + seq % _OPERATIONS * self._row
        if self._memory[at : at + self._row] == (_SEQ.pack(seq + 1 & _WRAP) + place) * self._size:
            return None  # nearly always
        mine = CollectivePlace.unpacked(place)
        if mine is None:
            return None
        for member, rank in enumerate(self._ranks):
            theirs = self._of(member, seq)
            if theirs is None or theirs == mine:
                continue
            before = self._of(self._own, seq - 1), self._of(member, seq - 1)
            if apart(before, (mine, theirs), recovered=recovered and not self._memory[_COLLECTIVES]):
                return rank, theirs
            self._memory[_COLLECTIVES] = 1
        return None

    def _of(self, member: int, seq: int) -> CollectivePlace | None:
        """From where a member (an index) has called an operation; None if that is not known."""
        if seq < 0:
            return None
        at = _FLAGS + seq % _OPERATIONS * self._row + member * _ENTRY
        entry = self._memory[at : at + _ENTRY]
        return CollectivePlace.unpacked(entry[_SEQ.size :]) if entry.startswith(_SEQ.pack(seq + 1 & _WRAP)) else None

    def own_before(self, seq: int) -> list[tuple[int, CollectivePlace]]:
        """Numbers and places of the last operations of this rank before ``seq``, as far as they are kept."""
        called = ((each, self._of(self._own, each)) for each in range(max(0, seq - _TOLD), seq))
        return [(each, place) for each, place in called if place is not None]

    def told(self, member: int, seq: int, place: CollectivePlace) -> None:
        """A member (an index) on another machine has called operation ``seq`` from there."""
        at = _FLAGS + seq % _OPERATIONS * self._row + member * _ENTRY
        self._memory[at : at + _ENTRY] = _SEQ.pack(seq + 1 & _WRAP) + place.packed()

    def sent(self, channel: tuple[int, int, int], index: int, place: bytes) -> None:
        at, key = self._message(channel, index)
        self._memory[at : at + _MESSAGE] = key + place

    def sent_elsewhere(
        self, channel: tuple[int, int, int], index: int, place: bytes, *, recovered: bool
    ) -> tuple[int, CollectivePlace] | None:
        """The sender of a message and its place, where that is one from which this rank must not get it."""
        at, key = self._message(channel, index)
        entry, mine = self._memory[at : at + _MESSAGE], CollectivePlace.unpacked(place)
        if mine is None or not entry.startswith(key):
            return None
        theirs = CollectivePlace.unpacked(entry[_KEY.size :])
        if theirs is None or theirs == mine:
            return None
        if recovered and not self._memory[_POINT_TO_POINT]:
            return self._ranks[channel[0]], theirs
        self._memory[_POINT_TO_POINT] = 1
        return None

    def _message(self, channel: tuple[int, int, int], index: int) -> tuple[int, bytes]:
        source, destination, tag = channel
        lane = (destination * 1_000_003 + tag) & _WRAP
        slot = source * _MESSAGES + (index + lane) % _MESSAGES
        return self._messages + slot * _MESSAGE, _KEY.pack(index + 1 & _WRAP, lane)


def mismatch(rank: int, call: str, place: bytes, other: tuple[int, CollectivePlace]) -> PlaceMismatch:
    """The error for an operation that rank ``rank`` calls from ``place``, and another from another."""
    return PlaceMismatch(
        f"rank {rank} calls {call} from {CollectivePlace.unpacked(place)}, and rank {other[0]} calls it from "
        f"{other[1]}. What they exchange does not belong together: one of them has run other batches, or made other "
        "calls, than the other. If a worker was replaced before, register what the script counts "
        "(n = job.register(n=0)), because plain variables begin again in a replacement; otherwise have each rank run "
        "as many batches in an epoch"
    )
