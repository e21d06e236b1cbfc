"""Checkpoints at batch tops, so that a job whose workers are all gone starts again where it was (``restart``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shared_core.checkpoint import store
from shared_core.cluster.worker import WorkerEnv
from shared_core.comm.gloo import wait_for
from shared_core.consistency import Top
from shared_core.errors import CorruptFile, GenerationAbandoned, SwiftError
from shared_core.events import console
from shared_core.loaders.reshard import loader_states, order_name
from shared_core.recovery.board import Board
from shared_core.recovery.plain import dumps, loads
from shared_core.recovery.updates import Updates
from shared_core.testing import inject

if TYPE_CHECKING:
    from shared_core.recovery.exchange import Recovery


@dataclass
class Restored:
    """What one rank goes on from: a checkpoint, or what the workers handed on when their number changed.

    Attributes:
        top: the batch top.
        parts: rank-local state there.
        ends: results and state of finished entry calls.
        records: results of start-up operations, and of DDP's agreement on buckets.
        description: of the replicated state.
        tensors: of the replicated state.
        resized: it was another number of workers.
        added: this rank had no predecessor; ``parts`` are another's.
        main: what rank 0 had published last, where another takes its place.
    """

    top: Top
    parts: dict[str, Any]
    ends: dict[int, tuple[Any, dict[str, Any]]]
    records: list[tuple[tuple[int, str, str, int], list[torch.Tensor]]]
    description: dict[str, Any]
    tensors: list[torch.Tensor] = field(default_factory=list)
    resized: bool = False
    added: bool = False
    main: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """Writes and reads the checkpoints of one rank. Every rank writes its own part, rank 0 the replicated state
    and, last, the manifest.
    """

    def __init__(self, env: WorkerEnv, recovery: Recovery) -> None:
        self._env, self._recovery = env, recovery
        self._dir = env.config.checkpoint_dir
        self._every = env.config.checkpoint_every_steps

    def due(self, tops: int) -> bool:
        """Whether a checkpoint is to be written at this batch top."""
        return self._dir is not None and self._every > 0 and tops % self._every == 0

    def write(self, top: Top, parts: dict[str, Any], updates: Updates, board: Board) -> None:
        """Write one. A storage error is reported and costs only this checkpoint; a loss meanwhile leaves it
        uncommitted.
        """
        assert self._dir is not None
        inject.point("checkpoint.write")
        rank, key = self._env.rank, f"checkpoint/{top.index}"
        generation = self._recovery.runtime.generation
        client = self._recovery.new_store("")
        for _, state in loader_states(parts):
            if state["live"] and state["iterations"][-1]["dealt"] and "indices" not in state:
                state["indices"] = board.read_order(order_name(state))  # the board will be gone
        try:
            mine = {
                "top": asdict(top),
                "parts": parts,
                "ends": ends_before(board, top.entry),
                "records": board.records(),
            }
            digest = store.write_part(self._dir, top.index, f"rank{rank}", dumps(mine))
            if rank == 0:
                with updates.frozen(top.version, 60.0) as (description, tensors):
                    replicated = store.write_part(self._dir, top.index, "replicated", dumps((description, tensors)))
            client.set(f"{key}/{rank}", digest)
            if rank != 0:
                return
            keys = [f"{key}/{r}" for r in range(self._env.world_size)]
            wait_for(
                client,
                keys,
                lambda: self._recovery.runtime.latest > generation,
                600.0,
                "all ranks to write their checkpoint",
            )
            digests = {f"rank{r}": bytes(client.get(k)).decode() for r, k in enumerate(keys)}
            meta = {
                "job": self._env.job,
                "world_size": self._env.world_size,
                "top": top.index,
                "version": top.version,
            }
            store.commit(self._dir, top.index, {**digests, "replicated": replicated}, meta)
            store.prune(self._dir)
            self._recovery.events.emit("checkpoint", rank=0, generation=generation, top=top.index, version=top.version)
        except GenerationAbandoned:
            return
        except SwiftError as error:
            console(f"rank {rank}: no checkpoint at batch top {top.index}: {error}")
            self._recovery.events.emit("warning", rank=rank, generation=generation, message=str(error))

    def newest(self) -> Restored | None:
        """The newest valid checkpoint of this job, or None.

        Raises:
            CorruptFile: if a part that passed its checksum cannot be read.
        """
        if self._dir is None:
            return None
        found = store.newest_valid(self._dir, self._env.world_size)
        if found is None or found.meta.get("job") != self._env.job:
            return None
        mine = loads(store.read_part(found, f"rank{self._env.rank}"))
        description, tensors = loads(store.read_part(found, "replicated"))
        return Restored(Top(**mine["top"]), mine["parts"], mine["ends"], mine["records"], description, tensors)


def ends_before(board: Board, entry: int) -> dict[int, tuple[Any, dict[str, Any]]]:
    """Results and state of the entry calls that were finished before ``entry``."""
    ends: dict[int, tuple[Any, dict[str, Any]]] = {}
    for number in range(entry):
        try:
            ends[number] = board.read_end(number)
        except (FileNotFoundError, CorruptFile):
            continue
    return ends
