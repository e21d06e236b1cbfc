"""Which records of an archive are there, and where."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from shared_core.errors import CorruptFile
from shared_core.events import console
from shared_core.worker.messages import segments
from shared_core.worker.messages.segments import Key, Segment, SegmentPlace


class ArchiveRecord(NamedTuple):
    """One that waits for the disk. ``size`` is in bytes, of the header and the tensors."""

    key: Key
    header: bytes
    tensors: list[torch.Tensor]
    size: int


class Index:
    """Records by channel and index. Callers hold the archive's condition.

    Attributes:
        segments: the files that count, oldest first.
        doomed: segments whose records are dropped and whose files are to be deleted.
    """

    def __init__(self) -> None:
        self.waiting: dict[tuple[str, int], ArchiveRecord] = {}
        self.segments: list[Segment] = []
        self.doomed: deque[Segment] = deque()
        self._places: dict[str, dict[int, SegmentPlace]] = {}
        self._newest: dict[str, int] = {}  # put, whether or not it can be read

    def load(self, folder: Path, seed: int) -> tuple[int, int]:
        """Take in the files there are. Returns the number of the next segment, and the bytes of those that are
        there. A file that cannot be used is passed over, with a line on the console. Raises OSError if the folder
        cannot be read.
        """
        next_number, damaged, loaded = 0, [], []
        for number, path in sorted(files(folder)):
            next_number = max(next_number, number + 1)
            try:
                segment, bad = segments.load_segment(path, seed, number)
            except (CorruptFile, OSError, ValueError) as error:
                console(f"a file of the log is passed over: {path}: {error}")
                continue
            next_number = max(next_number, segment.number + 1)
            loaded.append(segment)
            if segment.size > segments.START and not segment.entries and not bad:
                console(f"nothing in {path} can be used: it is truncated, damaged, or the log of another rank")
            for key in bad:
                damaged.append((key.channel, key.index))
                self.note(key.channel, key.index)
        # In the order they were written: a record that was put again after damage counts.
        for segment in sorted(loaded, key=lambda one: one.number):
            self.segments.append(segment)
            for channel, index, _, offset, header, payload in segment.entries:
                self.note(channel, index)
                self.add(channel, index, SegmentPlace(segment, offset, header, payload))
        if damaged:
            named = ", ".join(f"{index} of {channel}" for channel, index in damaged[:5])
            console(f"the log in {folder} has {len(damaged)} damaged message(s), left out: {named}")
        return next_number, sum(segment.size for segment in loaded)

    # -- changes -----------------------------------------------------------------------------------

    def note(self, channel: str, index: int) -> None:
        """A record was put, whether or not it can be read."""
        self._newest[channel] = max(index, self._newest.get(channel, index))

    def add(self, channel: str, index: int, place: SegmentPlace) -> None:
        self._places.setdefault(channel, {})[index] = place

    def forget(self, channel: str, index: int, place: SegmentPlace) -> bool:
        """Leave a damaged record out. False if another has taken its place, or it was dropped."""
        held = self._places.get(channel, {})
        if held.get(index) is not place:
            return False
        del held[index]
        return True

    def drop(self, segment: Segment) -> None:
        segment.gone = True
        self.segments.remove(segment)
        self.doomed.append(segment)
        for channel, index, *_ in segment.entries:
            held = self._places.get(channel, {})
            if index in held and held[index].segment is segment:
                del held[index]

    # -- questions ---------------------------------------------------------------------------------

    def holds(self, channel: str, index: int) -> bool:
        return index in self._places.get(channel, ()) or (channel, index) in self.waiting

    def place(self, channel: str, index: int) -> SegmentPlace | None:
        """Where a record is in the files; None if it is not there."""
        return self._places.get(channel, {}).get(index)

    def in_files(self) -> list[tuple[str, int, SegmentPlace]]:
        return [(channel, index, place) for channel, held in self._places.items() for index, place in held.items()]

    def indices(self, channel: str) -> list[int]:
        return sorted({*self._places.get(channel, ()), *(i for c, i in self.waiting if c == channel)})

    def first(self, channel: str, before: int | None) -> int | None:
        """See :meth:`Archive.first`."""
        index = self._newest.get(channel) if before is None else before - 1
        if index is None or not self.holds(channel, index):
            return None
        while self.holds(channel, index - 1):
            index -= 1
        return index


def files(folder: Path) -> Iterator[tuple[int, Path]]:
    """(number, path) of the segments in a folder, in no order."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.suffix == segments.SUFFIX and path.stem.isdecimal():
            yield int(path.stem), path
