"""Which checkpoint all ranks continue from: the newest one, in memory or in storage, that every rank can read.

Each rank publishes what it has; what all have is tried from the newest on, until every rank has loaded its part. All of
it goes through the agents' store, before the first process group of the job exists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shared_core.checkpoint import image, lineage, store
from shared_core.checkpoint.spool import Spool
from shared_core.codec import decode, text
from shared_core.encoding.plain import loads
from shared_core.errors import CorruptFile, SwiftError, Unsupported
from shared_core.events import console
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.transport.store import Store
from shared_core.waiting import wait_for
from shared_core.worker.checkpoints.in_memory import find_in_memory
from shared_core.worker.state.publications import Records, SharedMemoryPublisher, from_plain
from shared_core.worker.state.replicated import Replicated

#: Tiers in the order in which they are preferred.
MEMORY, NEIGHBOUR, STORAGE = TIERS = "memory", "neighbour", "storage"
_FINE, _NOTHING, _CHOSEN = "read", "nothing", "line/chosen"
#: Metadata of an image of the replicated state.
DESCRIPTION, NAMES = "swift.description", "swift.names"
#: Gives description and tensors of the replicated state of this rank, once the model is known.
Collect = Callable[[Replicated], tuple[dict[str, Any], list[torch.Tensor]]]


def local_part(rank: int) -> str:
    return f"rank{rank}"


def replicated_part(boundary: StepBoundary) -> str:
    """The replicated state has one image a set of replicas, named by its lowest rank."""
    return f"replicated{min(boundary.replicas, default=0)}.safetensors"


def parameter_names(replicated: Replicated) -> list[str]:
    """Names of the parameters in an image: fully qualified, without the ``module.`` of ``DistributedDataParallel``."""
    return _unique([name.removeprefix("module.") for name in replicated.names])


def _unique(names: list[str]) -> list[str]:
    """Make equal names of several modules differ, with ``#2``, ``#3``."""
    found: list[str] = []
    taken: set[str] = set()
    for name in names:
        number, own = 1, name
        while own in taken:
            number += 1
            own = f"{name}#{number}"
        taken.add(own)
        found.append(own)
    return found


@dataclass(frozen=True)
class Line:
    """A checkpoint that this rank could continue from.

    Attributes:
        tier: where it is.
        open: gives the bytes or the file of a part.
        saved: where it is in storage; else None.
        adopts: the job was told to begin with it, whosever it is.
    """

    step: int
    tier: str
    meta: Mapping[str, Any]
    open: Callable[[str], bytes | Path]
    saved: store.Checkpoint | None = None
    adopts: bool = False

    @property
    def session(self) -> str:
        """The attempt that made it; two that differ in it are never mixed."""
        return str(self.meta.get("session"))

    @property
    def run(self) -> str:
        return str(self.meta.get("run", ""))

    @property
    def preference(self) -> tuple[Any, ...]:
        """The largest is tried first: the job's own before what it adopts, its newest run before older ones."""
        if self.adopts and self.saved is not None:
            return 0, self.saved.time, self.step
        return 1, lineage.age_key(self.run), self.step, -TIERS.index(self.tier)

    @property
    def world_size(self) -> int:
        """Ranks of the job that made it; 0 if it does not say."""
        return int(self.meta.get("world_size", 0))


@dataclass
class Restored:
    """What one rank begins with: its part of a checkpoint, or what others have sent or handed on to it.

    Attributes:
        ends: results and state of finished entry calls, by number.
        records: results of start-up operations, and of DDP's agreement on buckets.
        description: of the replicated state; None for the one that this worker has anyway.
        owned: nobody else uses the tensors, so they may be taken without a copy.
        resized: another number of workers made it.
        added: no old rank became this one; ``parts`` are another's.
        main: the newest publication of rank 0, where another rank takes its place.
        line: the checkpoint; None where it is none.
        collect: where this rank trains another part of the model than any old one, gives description and tensors
            instead; those are empty then.
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
    line: Line | None = None
    collect: Collect | None = None

    @property
    def tier(self) -> str:
        """Where the checkpoint lay; empty where it is none."""
        return self.line.tier if self.line is not None else ""

    @property
    def workers(self) -> int:
        """Ranks of the job that made the checkpoint."""
        return self.line.world_size if self.line is not None else 0


def in_memory(spool: Spool, rank: int, world_size: int) -> list[Line]:
    """Snapshots on this machine, of any attempt, that hold this rank's part; the oldest first."""
    found = []
    for of in reversed(list(spool.all_attempts())):
        for step in of.steps():
            parts = of.parts(step)
            mine = parts.get(rank)
            if mine is not None and mine.world_size == world_size:
                paths = {name: of.path_of(part, name) for part in parts.values() for name in part.files}
                found.append(Line(step, MEMORY, mine.meta, partial(_path_of, paths)))
    return found


def at_neighbours(machines: Iterable[str | None], rank: int, world_size: int, secret: bytes) -> list[Line]:
    """Snapshots in the memory of any machine that hold this rank's part; the oldest first. Ranks whose own machine has
    theirs list them too: all must continue from the same.
    """
    found = find_in_memory(machines, rank, world_size, secret)
    return [Line(step, NEIGHBOUR, meta, read) for step, meta, read in found]


def _path_of(paths: Mapping[str, Path], name: str) -> Path:
    if name not in paths:
        raise CorruptFile(f"{name} is not in the memory of this machine")
    return paths[name]


def in_storage(found: lineage.Contents, world_size: int | None = None) -> list[Line]:
    """Committed checkpoints of jobs of ``world_size`` ranks (None: any), oldest first."""
    mine = sorted(found.saved, key=lambda each: (lineage.age_key(each.run), each.step))
    made = (_of_storage(each) for each in mine)
    return [line for line in made if world_size is None or line.world_size == world_size]


def to_adopt(where: str, *, needed: bool = True) -> list[Line]:
    """Checkpoints in ``where``; raises Unsupported if it cannot be read, or if there is none and ``needed``."""
    try:
        found, passed = lineage.to_adopt(where)
    except (OSError, SwiftError) as error:
        raise Unsupported(f"checkpoint.resume_from: {where} cannot be read: {error}") from error
    if not found and needed:
        bad = f" ({passed[0]})" if passed else ""
        raise Unsupported(
            f"checkpoint.resume_from: there is no whole checkpoint at {where}{bad}; name the folder of one (step-...), "
            "or a folder that holds some: swiftctl checkpoints DIR lists them"
        )
    return [_of_storage(each, adopts=True) for each in found]


def _of_storage(found: store.Checkpoint, adopts: bool = False) -> Line:
    return Line(found.step, STORAGE, found.meta, partial(store.read_part, found), found, adopts)


def load(line: Line, rank: int) -> Restored:
    """Read this rank's part of a checkpoint; raises CorruptFile if it cannot be read as it was written."""
    local = load_local(line, rank)
    boundary = boundary_of(local)
    return restored(line, boundary, local, load_replicated(line, boundary))


def restored(
    line: Line,
    boundary: StepBoundary,
    local: Mapping[str, Any],
    state: tuple[dict[str, Any], list[torch.Tensor]],
    *,
    resized: bool = False,
    added: bool = False,
    collect: Collect | None = None,
) -> Restored:
    """From what a rank keeps for itself, and description and tensors of the replicated state."""
    parts, ends, records = local["parts"], local["ends"], from_plain(local["records"])
    return Restored(boundary, parts, ends, records, *state, resized=resized, added=added, line=line, collect=collect)


def ends_before(publisher: SharedMemoryPublisher, entry: int) -> dict[int, tuple[Any, dict[str, Any]]]:
    ends: dict[int, tuple[Any, dict[str, Any]]] = {}
    for number in range(entry):
        with suppress(FileNotFoundError, CorruptFile):
            ends[number] = publisher.read_end(number)
    return ends


def boundary_of(local: Mapping[str, Any]) -> StepBoundary:
    return StepBoundary(**local["boundary"])


def load_local(line: Line, rank: int) -> dict[str, Any]:
    """Read what a rank keeps for itself; raises CorruptFile."""
    try:
        source = line.open(local_part(rank))
        local: dict[str, Any] = loads(source.read_bytes() if isinstance(source, Path) else source)
        boundary_of(local)
        return local
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(line, error) from error


def load_replicated(line: Line, boundary: StepBoundary) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Description of the replicated state, and its tensors in that order; raises CorruptFile."""
    description, by_name = load_named(line, boundary)
    return description, list(by_name.values())


def load_named(line: Line, boundary: StepBoundary) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """As :func:`load_replicated`, the tensors by name."""
    try:
        by_name, metadata = image.load(line.open(replicated_part(boundary)))
        return json.loads(metadata[DESCRIPTION]), {name: by_name[name] for name in json.loads(metadata[NAMES])}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(line, error) from error


def _unreadable(line: Line, error: Exception) -> CorruptFile:
    return CorruptFile(f"the checkpoint at step boundary {line.step} ({line.tier}) cannot be read: {error}")


def agree(
    env: WorkerEnv,
    client: Store,
    mine: list[Line],
    read: Callable[[Line], Restored] | None = None,
    limit_s: float | None = None,
) -> Restored | None:
    """The newest checkpoint that all ranks have and can read; None if there is none.

    All ranks of the attempt call this; a replacement that comes later gets the same answer.

    Args:
        read: reads this rank's part of one; :func:`load` unless given.
        limit_s: longest wait for all ranks to start, in seconds; ``wait_timeout_s`` if None.

    Raises:
        CorruptFile: in a replacement, if it cannot read the one that the others have begun with.
        DamagedRecord: if a record of another rank in the store is damaged.
        Unsupported: if there are some, but none that this number of workers can continue from.
        WaitTimeout: if a rank does not come.
    """
    read = read or (lambda line: load(line, env.rank))
    offers = {_key(line): line for line in mine}
    if client.check([_CHOSEN]):  # this worker came later
        chosen = text(client.get(_CHOSEN), _CHOSEN)
        if chosen != _NOTHING and chosen not in offers:
            raise CorruptFile(f"rank {env.rank}: the checkpoint {chosen} from which this attempt began is gone")
        return read(offers[chosen]) if chosen != _NOTHING else None
    ranks = range(env.world_size)
    client.set(f"line/has/{env.rank}", json.dumps(list(offers)))
    has = [f"line/has/{rank}" for rank in ranks]
    _wait(env, client, has, "to create the process group, and say which checkpoints they have", limit_s)
    common = set(offers).intersection(*(decode(client.get(key), list[str], key) for key in has))
    order = sorted(common, key=lambda key: (offers[key].preference, key), reverse=True)
    refusal: Unsupported | None = None
    for number, key in enumerate(order):
        loaded, why = None, _FINE
        try:
            loaded = read(offers[key])
        except CorruptFile as error:
            why = str(error)
        except Unsupported as error:  # on all ranks
            refusal, why = refusal or error, str(error)
        client.set(f"line/try{number}/{env.rank}", why)
        tries = [f"line/try{number}/{rank}" for rank in ranks]
        _wait(env, client, tries, "to read their part of a checkpoint")
        failed = {rank: said for rank in ranks if (said := text(client.get(tries[rank]), tries[rank])) != _FINE}
        if not failed:
            client.set(_CHOSEN, key)
            return loaded
        rank, why = next(iter(failed.items()))
        if rank == env.rank:
            saved = offers[key].saved
            where = f" in {saved.path.parent}" if saved is not None else ""
            console(f"rank {rank}: the checkpoint at step boundary {offers[key].step}{where} is passed over: {why}")
    if refusal is not None:
        raise refusal
    client.set(_CHOSEN, _NOTHING)
    return None


def _key(line: Line) -> str:
    return f"{line.step}/{line.tier}/{line.session}" + "/adopted" * line.adopts


def _wait(env: WorkerEnv, client: Store, keys: list[str], what: str, limit_s: float | None = None) -> None:
    own = env.config.detection.wait_timeout_s
    bound = "detection.wait_timeout_s" if limit_s in (None, own) else "time-out of the process group"
    wait_for(client, dict(enumerate(keys)), lambda: False, limit_s or own, env.rank, what, bound=bound)
