"""Where in its program a rank calls an operation, and whether two members of a group may call one from there. Pure."""

from __future__ import annotations

import struct
from typing import NamedTuple

#: Layout of a packed place. All zero: no place was written yet.
_PACKED = struct.Struct("<iIIIi")
SIZE = _PACKED.size
#: ``batch`` of a place behind the batches of a pass.
AFTER = -1
_NO_EPOCH = -1


class CollectivePlace(NamedTuple):
    """A place of the program.

    Attributes:
        entry: number of the entry call; -1 before the first, and -2 - e between call e and the next.
        phase: odd inside loops over epochs, even before, between and after them; 0 where nothing counts epochs.
        epoch: its number; -1 outside.
        pass_: number of the training pass over data, from 1, in this epoch (outside of epochs: in this phase); 0 before
            the first.
        batch: step boundaries since the pass began; :data:`AFTER` when it was left.
    """

    entry: int = -1
    phase: int = 0
    epoch: int = _NO_EPOCH
    pass_: int = 0
    batch: int = 0

    def packed(self) -> bytes:
        """As bytes; never all zero."""
        return _PACKED.pack(self.entry, self.phase + 1, self.epoch + 1, self.pass_, self.batch)

    @classmethod
    def unpacked(cls, data: bytes) -> CollectivePlace | None:
        """Inverse of :meth:`packed`; None for zeros."""
        entry, phase, epoch, pass_, batch = _PACKED.unpack(data)
        return cls(entry, phase - 1, epoch - 1, pass_, batch) if phase else None

    def __str__(self) -> str:
        """``epoch 3, pass 1, batch 9``, counted as ``job.epochs`` and ``job.steps`` count."""
        words = []
        if self.entry >= 0:
            words.append(f"entry call {self.entry}")
        elif self.entry < -1:
            words.append(f"after entry call {-2 - self.entry}")
        if self.epoch != _NO_EPOCH:
            words.append(f"epoch {self.epoch}")
        elif self.phase:
            words.append(f"after loop {self.phase // 2} over epochs" if self.phase > 1 else "before the first epoch")
        if self.pass_:
            words.append(f"pass {self.pass_}")
        if self.batch > 0:
            words.append(f"batch {self.batch - 1}")
        elif self.batch == AFTER:
            words.append("after its batches")
        return ", ".join(words) or "before the first batch"


def apart(
    before: tuple[CollectivePlace | None, CollectivePlace | None],
    now: tuple[CollectivePlace, CollectivePlace],
    *,
    recovered: bool,
) -> bool:
    """Whether two members of a group must not call the same collective from these places.

    A program may have its ranks at different places, as where each makes as many local batches as it likes before all
    average. Without a failure only what no program means is refused: an operation that is the first of an epoch for one
    member, and not for the other. A replacement must be exactly where its failed worker would be.

    Args:
        before: of each member, where it called the group's operation before this one; None if that is not known.
        now: of each, where it calls this one.
        recovered: a worker has failed, and until then all members of the group were at the same places.
    """
    if now[0] == now[1]:
        return False
    if recovered:
        return True
    if not (before[0] and before[1]) or any(each is None or each.epoch == _NO_EPOCH for each in (*before, *now)):
        return False
    begins = [_epoch(one) != _epoch(two) for one, two in zip(before, now, strict=True)]
    return begins[0] != begins[1]


def _epoch(place: CollectivePlace | None) -> tuple[int, int, int] | None:
    return place and place[:3]
