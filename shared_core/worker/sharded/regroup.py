"""Shards of another number of ranks: what each new rank has of them.

Plain data: tensors and lists as :class:`~shared_core.worker.sharded.shard.TrainedShard` captures them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shared_core.errors import CorruptFile

#: Key of a captured state that stands for the states of all old ranks. Key of the layouts; it is missing where another
#: number of ranks could not continue.
OLD_RANKS, LAYOUT = "old ranks", "layout"
#: Where a tensor's part belongs: (dimension that is divided, number of parts, this part); None for a whole tensor.
Layout = tuple[int, int, int] | None


def joined(parts: Mapping[int, torch.Tensor], layout: Layout) -> torch.Tensor:
    """The whole tensor (a copy if it is divided) of its parts by number; raises CorruptFile if one is missing."""
    if layout is None:
        return parts[0]
    dim, count, _ = layout
    if missing := [number for number in range(count) if number not in parts]:
        raise CorruptFile(f"part {missing[0]} of {count} of a tensor is in no rank's shard")
    return torch.cat([parts[number] for number in range(count)], dim)


def part_of(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A contiguous copy of one part, divided as ``fully_shard`` does: the first parts as long as those of
    ``torch.chunk``, the last ones shorter or empty. A whole tensor is returned itself.
    """
    if layout is None:
        return whole
    dim, count, number = layout
    chunks = torch.chunk(whole, count, dim)
    part = chunks[number] if number < len(chunks) else whole.narrow(dim, 0, 0)
    return part.clone(memory_format=torch.contiguous_format)  # so that the whole can be freed


def regrouped(old: Sequence[Mapping[str, Any]], layouts: Sequence[Layout]) -> dict[str, Any]:
    """What a new rank would have captured, from what each old rank has; ``layouts`` are of its parameters. Raises
    CorruptFile if the old shards do not belong together.
    """
    theirs: list[list[Layout]] = [[tuple(one) if one else None for one in each[LAYOUT]] for each in old]
    if any(len(each) != len(layouts) for each in theirs):
        raise CorruptFile(f"the shards have {len(theirs[0])} parameters, the model has {len(layouts)}")

    def again(place: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's part of a tensor that is divided as the parameter is, given each old rank's part."""
        parts = {(each[place] or (0, 1, 0))[2]: part for each, part in zip(theirs, tensors, strict=True)}
        return part_of(joined(parts, theirs[0][place]), layouts[place])

    parameters = [again(place, [each["parameters"][place] for each in old]) for place in range(len(layouts))]
    by_place = [{(number, place): entries for number, place, entries in each["states"]} for each in old]
    states = []
    for number, place, entries in old[0]["states"]:
        mine = {}
        for key, packed in entries.items():
            if isinstance(packed, tuple) and len(packed) > 2 and any(dim >= 0 for dim in packed[3]):
                local = again(place, [each[number, place][key][0] for each in by_place])
                packed = (local, *packed[1:])
            mine[key] = packed
        states.append([number, place, mine])
    return {"parameters": parameters, "states": states, LAYOUT: list(layouts)}
