"""The state that one rank starts from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shared_core.errors import CorruptFile
from shared_core.protocol.frontier import StepBoundary
from shared_core.worker.checkpoints.recovery_line import Collect, Loaded
from shared_core.worker.state.publications import Records, SharedMemoryPublisher, from_plain


@dataclass
class Restored:
    """A checkpoint, or what the workers sent to each other when their number changed.

    Attributes:
        ends: results and state of finished entry calls, by number.
        records: results of start-up operations, and of DDP's agreement on buckets.
        description: of the replicated state; None for the one that this worker has anyway.
        owned: nobody else uses the tensors, so they may be taken without a copy.
        resized: another number of workers made it.
        added: no old rank became this one; ``parts`` are another's.
        main: the newest publication of rank 0, where another rank takes its place.
        tier: where a checkpoint lay.
        collect: see :class:`~shared_core.worker.checkpoints.recovery_line.Loaded`.
    """

    boundary: StepBoundary
    parts: dict[str, Any]
    ends: dict[int, tuple[Any, dict[str, Any]]]
    records: Records
    description: dict[str, Any] | None
    tensors: list[torch.Tensor] = field(default_factory=list)
    owned: bool = False
    resized: bool = False
    added: bool = False
    main: dict[str, Any] = field(default_factory=dict)
    tier: str = ""
    workers: int = 0
    collect: Collect | None = None


def restored(loaded: Loaded) -> Restored:
    local = loaded.local
    return Restored(
        loaded.boundary,
        local["parts"],
        local["ends"],
        from_plain(local["records"]),
        loaded.description,
        loaded.tensors,
        resized=loaded.resized,
        added=loaded.added,
        tier=loaded.line.tier,
        workers=loaded.line.world_size,
        collect=loaded.collect,
    )


def ends_before(publisher: SharedMemoryPublisher, entry: int) -> dict[int, tuple[Any, dict[str, Any]]]:
    ends: dict[int, tuple[Any, dict[str, Any]]] = {}
    for number in range(entry):
        try:
            ends[number] = publisher.read_end(number)
        except (FileNotFoundError, CorruptFile):
            continue
    return ends
