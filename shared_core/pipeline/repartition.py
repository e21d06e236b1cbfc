"""What DeepSpeed's ZeRO had divided over another number of ranks, divided again: functions of plain data.

Each rank holds flat tensors (masters, moments, gradients). One is a row of pieces: one of each parameter (stage 3), or
one of all parameters of a group (stages 1 and 2). All ranks have pieces of the same sizes; the last ones are padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from shared_core.errors import Unsupported


class StagePiece(NamedTuple):
    """A rank's piece of what was divided.

    Attributes:
        of: number of the parameter, or group.
        whole: elements of that; padding may be among them.
        size: elements of the piece, padding among them.
    """

    of: int
    whole: int
    size: int


Row = Sequence[StagePiece]


def piece_of(whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """A rank's piece of a flat tensor, padded with zeros to ``size``."""
    part = whole[rank * size : (rank + 1) * size]
    return pad(part, (0, size - part.numel()))


def divided_anew(flats: Sequence[torch.Tensor], old: Row, new: Row, rank: int) -> torch.Tensor:
    """A rank's flat tensor, from those of all old ranks, in the order of their ranks."""
    pieces, at = [], 0
    for before, after in zip(old, new, strict=True):
        whole = torch.cat([flat.narrow(0, at, before.size) for flat in flats])[: before.whole]
        pieces.append(piece_of(whole, after.size, rank))
        at += before.size
    return torch.cat(pieces)


def repartitioned(
    old: Sequence[Mapping[str, Any]], rows: Sequence[Row], sizes: Sequence[int], rank: int
) -> dict[str, Any]:
    """What a new rank would have captured.

    Args:
        old: what each old rank has captured; see :meth:`~shared_core.pipeline.zero.ZeroState.capture`.
        sizes: elements of the new rank's parts of the parameters.

    Raises Unsupported if DeepSpeed groups parameters in another way with this number of ranks.
    """
    first, layout = old[0], old[0]["layout"]
    before = [[StagePiece(*piece) for piece in row] for row in layout["masters"]]
    if [[piece.of for piece in row] for row in before] != [[piece.of for piece in row] for row in rows]:
        raise Unsupported(
            "DeepSpeed groups parameters in another way with this number of workers; a larger sub_group_size in "
            "zero_optimization may help"
        )

    def divided(number: int, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        return divided_anew(flats, before[number], rows[number], rank)

    optimizers = [each["optimizer"] for each in old]
    masters = [divided(number, [each["masters"][number] for each in optimizers]) for number in range(len(rows))]
    states = []
    for number, state in enumerate(first["optimizer"]["state"]):
        shape = first["optimizer"]["masters"][number].shape
        states.append(
            {
                key: divided(number, [each["state"][number][key] for each in optimizers])
                if isinstance(value, torch.Tensor) and value.shape == shape
                else value
                for key, value in state.items()
            }
        )
    partition = dict(first["partition"])
    if partition:
        flats = [each["partition"]["gradients"] for each in old]
        partition["gradients"] = divided_anew(flats, sum(before, []), [one for row in rows for one in row], rank)
    parameters = first["parameters"]
    if layout["parameters"]:
        parts = zip(*(each["parameters"] for each in old), strict=True)
        wholes = [torch.cat(part)[:numel] for part, numel in zip(parts, layout["parameters"], strict=True)]
        parameters = [piece_of(whole, size, rank) for whole, size in zip(wholes, sizes, strict=True)]
    optimizer = dict(first["optimizer"]) | {"masters": masters, "state": states}
    return dict(first) | {"parameters": parameters, "optimizer": optimizer, "partition": partition}
