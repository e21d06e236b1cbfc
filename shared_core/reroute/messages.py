"""Messages of one survivor group: activations, gradients and data by micro-batch, whoever computes it.

Each message has a tag of its own, so nobody waits for one message before it gets another. A receiver learns the shapes
of activations from a header that comes with the first one of each sender. Tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from shared_core.errors import SurvivorGroupBroken, Unsupported
from shared_core.schedule.schedule import Topology
from shared_core.worker.recovery.survivor_groups import SurvivorGroup, SurvivorGroupWork

Tensors = tuple[Tensor, ...]
#: (dtype, shape, whether it is differentiated) of each tensor of a message.
Shapes = tuple[tuple[torch.dtype, tuple[int, ...], bool], ...]

#: Dtypes by the number that headers carry: the order must not change.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.int8,
)
_PARTS, _DIMENSIONS, _STEPS = 8, 8, 8
_ROW = _DIMENSIONS + 3


class MessageKind(IntEnum):
    ACTIVATION = 0  # from the stage before
    GRADIENT = 1  # from the stage behind
    INPUTS = 2  # data that the first stage computes with
    LABELS = 3  # data that the last stage computes with
    SHARE = 4  # of gradients, to who sums it
    SUM = 5  # of gradients
    LOSSES = 6
    PING = 7  # to measure what a message takes
    NORM = 8
    HEADER = 9  # of the first message of one of the kinds above, by kind in place of the micro-batch
    AGAIN = 10  # a sum, for who lacks it after a failure
    READ = 11  # all gradients of a step have come
    NOTES = 12  # of a share, for all
    EVALUATION = 13  # from the stage before, in an evaluation
    EVALUATION_INPUTS = 14
    EVALUATION_LABELS = 15
    REPORT = 16  # medians of a worker, to the one that decides on times
    PROPOSAL = 17  # medians of all, from there
    STATE = 18  # of a stage, for who moves there
    FOLLOW = 19  # the sum of a stage, for its worker that computes elsewhere


class MessageKey(NamedTuple):
    """One message.

    Attributes:
        stage: that of the receiver, or, for sums, norms and the like, that of the sender.
        pipeline: home of the micro-batch, or the sender's.
        micro_batch: index in its home pipeline; for sums, the group.
    """

    step: int
    kind: MessageKind
    stage: int
    pipeline: int
    micro_batch: int = 0


class MessageChannel:
    """Sends and receives on one survivor group.

    Args:
        topology: shape of the job; tags depend on it.
        shapes: of messages to this worker, by kind; the channel adds to it, and the caller keeps it for the next group.
        knows: kinds of which each rank knew the shapes before this survivor group. A header that nobody reads is never
            sent wholly, and all that is sent after it would be kept.
    """

    def __init__(
        self,
        survivor_group: SurvivorGroup,
        topology: Topology,
        shapes: dict[MessageKind, Shapes],
        knows: Mapping[int, Collection[MessageKind]],
    ) -> None:
        self.survivor_group, self._topology, self._shapes = survivor_group, topology, shapes
        self._told = {(kind, rank) for rank, kinds in knows.items() for kind in kinds}
        self._known, self._heard = frozenset(shapes), set[tuple[MessageKind, int]]()
        self._posted: dict[MessageKey, tuple[Tensors, list[SurvivorGroupWork]]] = {}

    def _tag(self, key: MessageKey, part: int = 0) -> int:
        t, width = self._topology, max(self._topology.micro_batches, len(MessageKind))
        tag = (key.step % _STEPS) * len(MessageKind) + key.kind
        return (((tag * t.stages + key.stage) * t.pipelines + key.pipeline) * width + key.micro_batch) * (
            _PARTS + 1
        ) + part

    def send(self, key: MessageKey, parts: Sequence[Tensor], rank: int) -> None:
        """Send tensors without waiting; nobody may change them from now on."""
        for part, tensor in enumerate(parts):
            self.survivor_group.send(tensor.contiguous(), rank, self._tag(key, part))

    def send_shaped(self, key: MessageKey, parts: Sequence[Tensor], rank: int) -> None:
        """As :meth:`send`, with a header before the first one to a receiver that did not know the shapes."""
        if (key.kind, rank) not in self._told:
            self._told.add((key.kind, rank))
            self.survivor_group.send(_header(parts), rank, self._tag(_header_key(key)))
        self.send(key, parts, rank)

    def post(self, key: MessageKey, rank: int) -> None:
        """Begin to receive a message of known shape; of unknown shape, do nothing."""
        if key not in self._posted and self._knows(key, rank):
            self._begin(key, self._shapes[key.kind], rank)

    def fetch(self, key: MessageKey, rank: int) -> Tensors:
        """Wait for a message whose shape its header says. Raises ``SurvivorGroupBroken`` after a failure."""
        if not self._knows(key, rank):
            header = torch.zeros(_PARTS * _ROW, dtype=torch.int64)
            self.survivor_group.recv(header, rank, self._tag(_header_key(key))).wait()
            self._shapes[key.kind] = _shapes(header)
            self._heard.add((key.kind, rank))
        self.post(key, rank)
        return self.finish(key)

    def _knows(self, key: MessageKey, rank: int) -> bool:
        """Whether no header comes before the next message of this kind from ``rank``."""
        return key.kind in self._known or (key.kind, rank) in self._heard

    def send_described(self, key: MessageKey, parts: Sequence[Tensor], rank: int) -> None:
        """As :meth:`send`, for :meth:`fetch_described`: each message carries its shapes."""
        self.survivor_group.send(_header(parts), rank, self._tag(key, _PARTS))
        self.send(key, parts, rank)

    def fetch_described(self, key: MessageKey, rank: int) -> Tensors:
        """Wait for what :meth:`send_described` has sent. Raises ``SurvivorGroupBroken`` after a failure."""
        header = torch.zeros(_PARTS * _ROW, dtype=torch.int64)
        self.survivor_group.recv(header, rank, self._tag(key, _PARTS)).wait()
        self._begin(key, _shapes(header), rank)
        return self.finish(key)

    def fetch_like(self, key: MessageKey, like: Sequence[Tensor], rank: int) -> Tensors:
        """Wait for a message of the shapes and dtypes of ``like``, in new tensors."""
        self.post_like(key, like, rank)
        return self.finish(key)

    def post_like(self, key: MessageKey, like: Sequence[Tensor], rank: int) -> None:
        """Begin to receive a message of the shapes and dtypes of ``like``; does nothing if it has begun."""
        if key not in self._posted:
            self.post_into(key, tuple(torch.empty(t.shape, dtype=t.dtype) for t in like), rank)

    def _begin(self, key: MessageKey, shapes: Shapes, rank: int) -> None:
        self.post_into(key, tuple(torch.empty(shape, dtype=dtype) for dtype, shape, _ in shapes), rank)

    def post_into(self, key: MessageKey, parts: Tensors, rank: int) -> None:
        """Begin to receive a message into ``parts``, which :meth:`finish` returns."""
        works = [self.survivor_group.recv(tensor, rank, self._tag(key, part)) for part, tensor in enumerate(parts)]
        self._posted[key] = parts, works

    def finish(self, key: MessageKey) -> Tensors:
        """Wait for a message that is being received. Raises ``SurvivorGroupBroken`` after a failure."""
        parts, works = self._posted.pop(key)
        for work in works:
            work.wait()
        return parts


def _header_key(key: MessageKey) -> MessageKey:
    # The sender's first message to this rank may be one of any micro-batch, pipeline and step.
    return MessageKey(0, MessageKind.HEADER, key.stage, 0, int(key.kind))


def _header(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) > _PARTS or any(t.dim() > _DIMENSIONS or t.dtype not in DTYPES for t in parts):
        raise Unsupported(
            f"re-routing passes at most {_PARTS} tensors of at most {_DIMENSIONS} dimensions and of usual types from "
            f"stage to stage, got {[(t.dtype, tuple(t.shape)) for t in parts]}"
        )
    header = torch.full((_PARTS, _ROW), -1, dtype=torch.int64)
    for row, t in zip(header, parts, strict=False):
        values = [DTYPES.index(t.dtype), int(t.requires_grad), t.dim(), *t.shape]
        row[: len(values)] = torch.tensor(values)
    return header.flatten()


def _shapes(header: Tensor) -> Shapes:
    rows = [row for row in header.view(_PARTS, _ROW).tolist() if row[0] >= 0]
    return tuple((DTYPES[dtype], tuple(shape[:dim]), bool(grad)) for dtype, grad, dim, *shape in rows)


T = TypeVar("T")


def through_failures(attempt: Callable[[], T], leave_survivor_group: Callable[[], None]) -> T:
    """Call ``attempt``, which continues an interrupted one, until no failure interrupts it; gradients enabled."""
    while True:
        try:
            # Evaluations come here, too, and messages of the step before may have to be differentiated.
            with torch.inference_mode(False), torch.enable_grad():
                return attempt()
        except SurvivorGroupBroken:
            leave_survivor_group()
