"""A checkpoint of another number of workers: what each new worker continues with.

All parts of all old ranks are in storage. With data parallel the replicated state is the one image, each new rank takes
the rank-local state of one old rank, and the rest of the pass over the data is divided again. Of a pipeline each new
stage collects its layers, by name, from the images of all old stages.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shared_core.errors import CorruptFile, Unsupported
from shared_core.loaders.reshard import (
    REST,
    at_path,
    divide,
    loader_states,
    taken_up,
    unpack_indices,
    used,
)
from shared_core.loaders.seeded import place_seed
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.checkpoints import recovery_line
from shared_core.worker.checkpoints.recovery_line import Collect, Line, Restored
from shared_core.worker.sharded.shard import LAYOUT, OLD_RANKS, SHARD
from shared_core.worker.state.replicated import VALUE, Replicated

RANDOM, GRADIENTS, BUFFERS = "swift.random", "swift.gradients", "swift.buffers"
#: Key of a rank's part: why its checkpoint serves no other number of workers.
FIXED = "fixed"


def load(line: Line, env: WorkerEnv) -> Restored:
    """Read what this rank continues with, from a checkpoint of any number of workers.

    Raises:
        CorruptFile: if it cannot be read as it was written.
        Unsupported: if another number of workers made it and this number cannot continue exactly; the same on
            all ranks.
    """
    count = line.world_size
    if count == env.world_size:
        return recovery_line.load(line, env.rank)
    locals_ = [recovery_line.load_local(line, rank) for rank in range(count)]
    boundary = recovery_line.boundary_of(locals_[0])
    collect: Collect | None = None
    try:
        _check(locals_)
        if boundary.replicas:
            source = stage_source(env.rank, count, env.world_size)
        else:
            source = sources(range(count), {0}, env.world_size)[env.rank]
        mine = locals_[count - 1 if source is None else source]
        if boundary.replicas:
            others = [each for each in locals_ if each is not mine]
            boundaries = [recovery_line.boundary_of(each) for each in (mine, *others)]
            # Those of other groups.
            mine["records"] = [each for each in mine["records"] if each[0][1] not in boundary.members]
            collect = partial(collect_stage, line, boundaries)
        else:
            shards = [each["parts"].get(SHARD) for each in locals_]
            deal_out(mine["parts"], [each["parts"] for each in locals_], env)
            if any(shards):
                mine["parts"][SHARD] = {OLD_RANKS: shards}
    except Unsupported as error:
        raise Unsupported(
            f"the checkpoint at step boundary {line.step} was made by {count} workers and cannot be used by "
            f"{env.world_size}: {error}. Start {count} workers, or start from scratch with checkpoint.resume='never'"
        ) from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CorruptFile(
            f"the checkpoint at step boundary {line.step} ({line.tier}) cannot be read: {error}"
        ) from error
    if source is None:
        mine["parts"][RANDOM] = random_state(count, boundary.index, env.rank)
    added = source is None
    if collect is None:
        state = recovery_line.load_replicated(line, boundary)
        return recovery_line.restored(line, boundary, mine, state, resized=True, added=added)
    for each in boundaries:
        # Only to know that it can be done: it is read again when the model is known.
        recovery_line.load_replicated(line, each)
    return recovery_line.restored(line, boundary, mine, ({}, []), resized=True, added=added, collect=collect)


def sources(stay: Collection[int], published: Collection[int], world_size: int) -> list[int | None]:
    """For each new rank the old one whose rank-local state it takes over; None for one that is added.

    Rank 0 continues as rank 0, even if its worker fails, as long as it published the step boundary: loggers and files
    are its own. ``published``: old ranks of which the state at the step boundary is known.
    """
    found: list[int | None] = [*sorted(stay)]
    if 0 not in stay and 0 in published:
        found[0] = 0
    return [*found, *[None] * world_size][:world_size]


def stage_source(stage: int, old: int, new: int) -> int | None:
    """The old stage whose rank-local state a new stage takes over; None for one that is added. The first and the last
    read the data, so they remain first and last.
    """
    if stage in (0, new - 1):
        return 0 if stage == 0 else old - 1
    return stage if stage < old - 1 else None


def collect_stage(
    line: Line, boundaries: Sequence[StepBoundary], replicated: Replicated
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Description and tensors of a stage, from the images of all stages of a checkpoint.

    Where copies of a tied layer differ (with gradient clipping), that of the first boundary in ``boundaries`` counts.

    Raises:
        CorruptFile: if an image cannot be read as it was written.
        Unsupported: if a parameter is in none of them.
    """
    names = recovery_line.parameter_names(replicated)
    places = {name: place for place, name in enumerate(names)}
    found: dict[str, torch.Tensor] = {}
    states: dict[tuple[int, str], list[tuple[str, str, Any]]] = {}
    description: dict[str, Any] = {}
    for boundary in boundaries:
        description, by_name = recovery_line.load_named(line, boundary)
        tensors, theirs = list(by_name.values()), list(by_name)[: description["parameters"]]
        taken = {name for name in theirs if name in places and name not in found}  # a tied layer is in several
        found |= {name: tensor for name, tensor in zip(theirs, tensors, strict=False) if name in taken}
        for number, place, entries in description["states"]:
            if theirs[place] in taken:
                states[number, theirs[place]] = [
                    (key, kind, value if kind == VALUE else tensors[value]) for key, kind, value in entries
                ]
    missing = [name for name in names if name not in found]
    if missing:
        raise Unsupported(
            f"the checkpoint at step boundary {line.step} holds no parameter {missing[0]}: it is of another model, or "
            "of one whose layers have other numbers"
        )
    mine = [found[name] for name in names]
    listed: list[list[Any]] = []
    for (number, name), entries in states.items():
        kept = []
        for key, kind, value in entries:
            kept.append([key, kind, value if kind == VALUE else len(mine)])
            mine += [] if kind == VALUE else [value]
        listed.append([number, places[name], kept])
    return description | {"parameters": len(names), "states": listed}, mine


def random_state(*place: int) -> dict[str, Any]:
    """Seeds an added worker's generators; ``place`` are numbers that no other worker has. CPU generators only."""
    seed = place_seed(*place)
    state: dict[str, Any] = {
        "torch": torch.Generator().manual_seed(seed % 2**63).get_state(),
        "python": random.Random(seed).getstate(),
    }
    if "numpy" in sys.modules:
        import numpy

        state["numpy"] = numpy.random.RandomState(seed % 2**32).get_state()
    return state


def deal_out(mine: dict[str, Any], old: Sequence[Mapping[str, Any]], env: WorkerEnv) -> None:
    """Have the loaders in ``mine``, changed in place, continue with this rank's share of the rest of the pass. Raises
    Unsupported if the order of a pass is not known.
    """
    changes = [(state, _changes(path, state, old, env)) for path, state in loader_states(mine)]
    for state, change in changes:  # only now: `mine` is one of the old ones
        owned = {"scalars": state["moved"], "generators": state["owned"]["generators"]}
        state.pop(REST, None)
        state |= change | {"owned": owned}


def _changes(
    path: tuple[Any, ...], state: Mapping[str, Any], old: Sequence[Mapping[str, Any]], env: WorkerEnv
) -> dict[str, Any]:
    theirs = [at_path(parts, path) for parts in old]
    live = [each for each in theirs if each is not None and each["live"]]
    if not live and not state["live"]:
        return {"iterations": []}  # earlier passes shape the next one only in worker processes, which are new
    if len(live) < len(old):
        raise Unsupported("some of its ranks had ended a pass over the data that others were in")
    begun = [each for each in live if used(each) or each["iterations"][-1]["dealt"]]
    if not begun:
        return {"fresh": True}
    if not all(REST in each for each in begun):
        if env.config.resize.data == "drop":
            return {"live": False, "iterations": []}  # the pass ends here
        raise Unsupported(
            "the order of its pass over the data is not known: a stream of items, or a sampler that draws as it goes. "
            "With resize.data='drop' the rest of the pass is left out"
        )
    if len(begun) < len(live):
        raise Unsupported("some of its ranks had not begun a pass over the data that others were in")
    rests = [unpack_indices(each[REST]) for each in live]
    return taken_up(state, divide(rests, env.world_size)[env.rank])


def _check(old: Sequence[Mapping[str, Any]]) -> None:
    """Raises Unsupported if no other number of workers can continue exactly."""
    for each in old:
        replicas = each["boundary"]["replicas"]
        if reason := each.get(FIXED):
            raise Unsupported(str(reason))
        if any(grad is not None for grad in each["parts"].get(GRADIENTS, {}).values()):
            raise Unsupported("gradients of several batches were being added up")
        if len(replicas) > 1:
            raise Unsupported("the stages of its pipeline had replicas")
        if LAYOUT not in each["parts"].get(SHARD, {LAYOUT: ()}):
            raise Unsupported("DeepSpeed has divided its model in an order that depends on it (round_robin_gradients)")
        if replicas and each["parts"].get(BUFFERS):
            raise Unsupported("its layers have buffers, which are known by their place in a stage only")
