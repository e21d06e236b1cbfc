"""The rest of an epoch for another number of workers: every sample once, none left out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, cycle, islice
from typing import Any

import numpy as np

from shared_core.errors import RecoveryFailed

#: Key of the indices that a worker had left of the pass, in the state of a loader inside a checkpoint.
REST = "rest"
#: Key that marks the state of a loader inside published parts.
MARK = "swift.loader"


def divide(rests: Sequence[Sequence[Any]], workers: int) -> list[list[Any]]:
    """Divide what old workers had not used among new ones; returns the batches of each new worker.

    ``rests`` are, for each old worker, the batches (lists of indices) it had not used, in order; or single indices, of
    loaders that do not batch. Batches keep their size; where the samples do not fill the last ones, the last two steps
    are made smaller, so that every worker has equally many batches and none is empty. Only where fewer samples than
    workers are left (for batches of one, and loaders that do not batch: where they cannot be divided evenly) some are
    used twice, as ``DistributedSampler`` does.
    """
    longest = max((len(rest) for rest in rests), default=0)
    in_turn = [rest[step] for step in range(longest) for rest in rests if step < len(rest)]
    if not in_turn:
        return [[] for _ in range(workers)]
    if not isinstance(in_turn[0], (list, tuple)):
        padded = _fill(in_turn, workers)
        return [padded[worker::workers] for worker in range(workers)]
    samples = [sample for batch in in_turn for sample in batch]
    largest = max(len(batch) for batch in in_turn)
    if len(samples) < workers or largest == 1:
        samples = _fill(samples, workers)
    sizes = _step_sizes(len(samples), workers, workers * largest)
    divided: list[list[Any]] = [[] for _ in range(workers)]
    at = 0
    for size in sizes:
        for worker in range(workers):
            share = size // workers + (worker < size % workers)
            divided[worker].append(samples[at : at + share])
            at += share
    return divided


def _fill(samples: list[Any], workers: int) -> list[Any]:
    """The samples, and the first ones again until their number is a multiple of ``workers``."""
    return [*samples, *islice(cycle(samples), -len(samples) % workers)]


def _step_sizes(samples: int, workers: int, step: int) -> list[int]:
    """Samples of each step: full ones, and the last two alike if the last would leave a worker without. With at least
    two in a full batch both halves are enough for all workers.
    """
    sizes = [step] * (samples // step)
    rest = samples - sum(sizes)
    if rest and rest < workers:
        both = sizes.pop() + rest
        sizes += [both - both // 2, both // 2]
    elif rest:
        sizes.append(rest)
    return sizes


def loader_states(parts: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """``(path, state)`` of every loader's state inside published parts."""
    if isinstance(parts, dict):
        if parts.get(MARK):
            yield path, parts
            return
        for key, value in parts.items():
            yield from loader_states(value, (*path, key))
    elif isinstance(parts, (list, tuple)):
        for number, value in enumerate(parts):
            yield from loader_states(value, (*path, number))


def at_path(parts: Any, path: Sequence[Any]) -> dict[str, Any] | None:
    """The loader's state at ``path`` in another worker's parts; None if it has none there."""
    for key in path:
        try:
            parts = parts[key]
        except (KeyError, IndexError, TypeError):
            return None
    return parts if isinstance(parts, dict) and parts.get(MARK) else None


def used(state: Mapping[str, Any]) -> int:
    """Batches that a worker had used of the iteration in progress: what it fetched ahead does not count."""
    delivered = state["iterations"][-1]["delivered"]
    return int(delivered - min(state["ahead"], delivered))


def order_name(state: Mapping[str, Any]) -> str:
    """Name under which the order of the iteration in progress was published; empty if none has begun."""
    return str(state["iterations"][-1]["order"]) if state["live"] and state["iterations"] else ""


def taken_up(state: Mapping[str, Any], indices: list[Any]) -> dict[str, Any]:
    """Changes to a loader's state, so that it continues with ``indices`` in the pass in progress."""
    last = state["iterations"][-1]
    record = dict(last) | {
        "delivered": min(state["ahead"], len(indices)),
        "first": last["first"] + used(state),
        "dealt": True,
        "length": len(indices),
        "owned": {"scalars": {}, "generators": {}},
        "order": "",
        "fetches": {},
        "draws": {},
        "owned_first": {},
        "rereads": {},
        "items_sum": None,
        "indices_sum": None,
        "loader_workers": {},
        "turn": 0,
        "stream": None,
    }
    return {"iterations": [record], "recent": [], "hand": [], "indices": indices}


def pack_indices(indices: Sequence[Any]) -> Any:
    """Indices, or batches of them, as int64 arrays where they are integers; see :func:`unpack_indices`."""
    batched = set(map(type, indices)) == {list}
    flat = list(chain.from_iterable(indices)) if batched else indices
    if not set(map(type, flat)) <= {int}:
        return {"items": list(indices)}
    try:
        numbers = np.array(flat, np.int64)
    except OverflowError:
        return {"items": list(indices)}
    return {"flat": numbers, "lengths": np.array(list(map(len, indices)), np.int64) if batched else None}


def rest_of(packed: Mapping[str, Any], done: int) -> Any:
    """Packed indices without the first ``done``; arrays are sliced, not copied."""
    if "items" in packed:
        return {"items": packed["items"][done:]}
    lengths = packed["lengths"]
    if lengths is None:
        return {"flat": packed["flat"][done:], "lengths": None}
    return {"flat": packed["flat"][int(lengths[:done].sum()) :], "lengths": lengths[done:]}


def unpack_indices(packed: Mapping[str, Any]) -> list[Any]:
    """Inverse of :func:`pack_indices`."""
    if "items" in packed:
        return list(packed["items"])
    flat, lengths = packed["flat"].tolist(), packed["lengths"]
    if lengths is None:
        return list(flat)
    ends = np.cumsum(lengths).tolist()
    return [flat[end - length : end] for length, end in zip(lengths.tolist(), ends, strict=True)]


def advance(state: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Batches used at a later boundary by a worker of which only an earlier one, ``state``, is known. ``before`` and
    ``after`` are another worker's at both. Raises RecoveryFailed if another pass began in between.
    """
    if not before["live"] or before["count"] != after["count"]:
        raise RecoveryFailed("a pass over the data began while the worker failed, and its order is not known")
    return used(state) + used(after) - used(before)
