"""Checkpoints at batch tops, so that a job whose workers are all gone starts again where it was (``restart``)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
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
    """Writes and reads the checkpoints of one rank. Every rank writes its own part, the first of each set of replicas
    their state, and rank 0, last, the manifest.

    Attributes:
        newest_top: batch top of the newest checkpoint that this rank knows to be committed; 0 for none.
    """

    def __init__(self, env: WorkerEnv, recovery: Recovery) -> None:
        self._env, self._recovery = env, recovery
        self._dir = env.config.checkpoint_dir
        self._every = env.config.checkpoint_every_steps
        self.newest_top = 0

    def due(self, tops: int) -> bool:
        """Whether a checkpoint is to be written at this batch top. A newcomer may pass tops again that have one."""
        if self._dir is None or self._every <= 0 or tops % self._every:
            return False
        return self._env.incarnation == 0 or tops not in (each.step for each in self._mine())

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
            parts_written = {f"rank{rank}": store.write_part(self._dir, top.index, f"rank{rank}", dumps(mine))}
            if rank == min(top.replicas, default=0):
                with updates.frozen(top.version, 60.0) as (description, tensors):
                    name = _replicated(top)
                    parts_written[name] = store.write_part(self._dir, top.index, name, dumps((description, tensors)))
            client.set(f"{key}/{rank}", json.dumps(parts_written))
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
            digests = {name: digest for each in keys for name, digest in json.loads(client.get(each)).items()}
            meta = {
                "attempt": self._env.restart,
                "job": self._env.job,
                "world_size": self._env.world_size,
                "top": top.index,
                "version": top.version,
            }
            store.commit(self._dir, top.index, digests, meta)
            # A job before may have got further in the same folder.
            store.prune(self._dir, wanted=self._ours)
            self.newest_top = top.index
            self._recovery.events.emit("checkpoint", rank=0, generation=generation, top=top.index, version=top.version)
        except GenerationAbandoned:
            return
        except SwiftError as error:
            console(f"rank {rank}: no checkpoint at batch top {top.index}: {error}")
            self._recovery.events.emit("warning", rank=rank, generation=generation, message=str(error))

    def newest(self) -> Restored | None:
        """What this attempt started from: the newest valid checkpoint of the attempts before, or None.

        Raises:
            CorruptFile: if a part that passed its checksum cannot be read.
        """
        if self._dir is None:
            return None
        found = store.newest_valid(
            self._dir, self._env.world_size, lambda each: self._ours(each) and not self._new(each)
        )
        return self._read(found) if found is not None else None

    def tops(self) -> list[Top]:
        """Batch tops of this attempt at which this rank's state is in a checkpoint that can be read, oldest first."""
        tops = []
        for found in self._mine():
            try:
                top = Top(**loads(store.read_part(found, f"rank{self._env.rank}"))["top"])
                store.read_part(found, _replicated(top))
            except CorruptFile as error:
                console(f"rank {self._env.rank}: checkpoint {found.path} is passed over: {error}")
                continue
            tops.append(replace(top, saved=True))
        return tops

    def at(self, index: int) -> Restored:
        """The checkpoint of this attempt at a batch top.

        Raises:
            CorruptFile: if it cannot be read, or is gone.
        """
        for found in self._mine():
            if found.step == index:
                return self._read(found)
        raise CorruptFile(f"rank {self._env.rank}: the checkpoint at batch top {index} is gone from {self._dir}")

    def _mine(self) -> list[store.Checkpoint]:
        found = store.committed(self._dir, self._env.world_size) if self._dir is not None else []
        return [each for each in found if self._ours(each) and self._new(each)]

    def _ours(self, found: store.Checkpoint) -> bool:
        return found.meta.get("job") == self._env.job

    def _new(self, found: store.Checkpoint) -> bool:
        """Of this attempt. Operations are counted from its start: logs go with its checkpoints."""
        return found.meta.get("attempt") == self._env.restart

    def _read(self, found: store.Checkpoint) -> Restored:
        mine = loads(store.read_part(found, f"rank{self._env.rank}"))
        top = Top(**mine["top"])
        description, tensors = loads(store.read_part(found, _replicated(top)))
        return Restored(top, mine["parts"], mine["ends"], mine["records"], description, tensors)


def _replicated(top: Top) -> str:
    """Name of the part that holds the parameters and optimizer state of a rank."""
    return f"replicated{min(top.replicas)}" if top.replicas else "replicated"


def ends_before(board: Board, entry: int) -> dict[int, tuple[Any, dict[str, Any]]]:
    """Results and state of the entry calls that were finished before ``entry``."""
    ends: dict[int, tuple[Any, dict[str, Any]]] = {}
    for number in range(entry):
        try:
            ends[number] = board.read_end(number)
        except (FileNotFoundError, CorruptFile):
            continue
    return ends
