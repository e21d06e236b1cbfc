"""A checkpoint of another number of workers: what each new worker goes on with.

All parts of all old ranks are in storage. Where all ranks trained the same, the replicated state is the one image, each
new rank takes the rank-local state of one old rank, and what all of them had left of the pass over the data is dealt
out anew.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shared_core.cluster.worker import WorkerEnv
from shared_core.errors import CorruptFile, Unsupported
from shared_core.loaders.reshard import (
    REST,
    at_path,
    divide,
    loader_states,
    pack_indices,
    taken_up,
    unpack_indices,
    used,
)
from shared_core.loaders.seeded import place_seed
from shared_core.recovery import lines
from shared_core.recovery.lines import Line, Loaded

RANDOM, GRADIENTS = "swift.random", "swift.gradients"
#: Key of a rank's part: why its checkpoint serves no other number of workers.
FIXED = "fixed"


def load(line: Line, env: WorkerEnv) -> Loaded:
    """Read what this rank goes on with from a checkpoint of any number of workers.

    Raises:
        CorruptFile: if it cannot be read as it was written.
        Unsupported: if it is of another number of workers and cannot serve this one exactly; the same on all ranks.
    """
    count = line.world_size
    if count == env.world_size:
        return lines.load(line, env.rank)
    locals_ = [lines.load_local(line, rank) for rank in range(count)]
    top = lines.top_of(locals_[0])
    try:
        _check(locals_)
        source = sources(range(count), {0}, env.world_size)[env.rank]
        mine = locals_[count - 1 if source is None else source]
        deal_out(mine["parts"], [each["parts"] for each in locals_], env)
    except Unsupported as error:
        raise Unsupported(
            f"the checkpoint at batch top {line.step} is of {count} workers and cannot be gone on with by "
            f"{env.world_size}: {error}. Start {count} workers, or begin anew with resume='never'"
        ) from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CorruptFile(f"the checkpoint at batch top {line.step} ({line.tier}) cannot be read: {error}") from error
    if source is None:
        mine["parts"][RANDOM] = random_state(count, top.index, env.rank)
    description, tensors = lines.load_replicated(line, top)
    return Loaded(top, mine, description, tensors, line, resized=True, added=source is None)


def sources(stay: Collection[int], published: Collection[int], world_size: int) -> list[int | None]:
    """For each new rank the old one whose rank-local state it takes over; None for one that is added.

    Rank 0 goes on as rank 0, even if its worker is lost, as long as it published the batch top: loggers and
    files are its own.

    Args:
        stay: old ranks that go on.
        published: old ranks of which the state at the batch top is known.
        world_size: number of new ranks.
    """
    found: list[int | None] = [*sorted(stay)]
    if 0 not in stay and 0 in published:
        found[0] = 0
    return [*found, *[None] * world_size][:world_size]


def random_state(*place: int) -> dict[str, Any]:
    """Generators of a worker that is added: unlike those of all others.

    Args:
        place: numbers that no other worker has.
    """
    seed = place_seed(*place)
    state: dict[str, Any] = {
        "torch": torch.Generator().manual_seed(seed % 2**63).get_state(),
        "python": random.Random(seed).getstate(),
    }
    if "numpy" in sys.modules:
        import numpy

        state["numpy"] = numpy.random.RandomState(seed % 2**32).get_state()
    return state


def note_rest(state: dict[str, Any], order: Sequence[Any]) -> None:
    """Add to a loader's state, for a checkpoint, what its worker has left of the pass.

    Args:
        state: of the loader.
        order: indices of the whole pass.
    """
    state[REST] = pack_indices(order[used(state) :])


def deal_out(mine: dict[str, Any], old: Sequence[Mapping[str, Any]], env: WorkerEnv) -> None:
    """Have the loaders in ``mine`` go on with this rank's share of what all old ranks had left of the pass.

    Args:
        mine: published parts that this rank takes over; changed.
        old: published parts of all old ranks.
        env: of this rank.

    Raises:
        Unsupported: if the order of a pass is not known.
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
        if env.config.data_policy == "drop":
            return {"live": False, "iterations": []}  # the pass ends here
        raise Unsupported(
            "the order of its pass over the data is not known: a stream of items, or a sampler that draws as it goes. "
            "With data_policy='drop' the rest of the pass is left out"
        )
    if len(begun) < len(live):
        raise Unsupported("some of its ranks had not begun a pass over the data that others were in")
    rests = [unpack_indices(each[REST]) for each in live]
    return taken_up(state, divide(rests, env.world_size)[env.rank])


def _check(old: Sequence[Mapping[str, Any]]) -> None:
    """Whether another number of workers can go on exactly.

    Raises:
        Unsupported: if not.
    """
    for each in old:
        if each["top"]["replicas"]:
            raise Unsupported("it is of a pipeline")
        if reason := each.get(FIXED):
            raise Unsupported(str(reason))
        if each["parts"].get(GRADIENTS):
            raise Unsupported("gradients of several batches were being added up")
