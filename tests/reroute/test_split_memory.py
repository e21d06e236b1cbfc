"""What the parts of a decoupled backward hold in memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from held_bytes import bytes_held
from splitting import flat, forward, leaves, randn
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shared_core.reroute.split import StageBackward


class Alive(TorchDispatchMode):
    """Counts the bytes that operations made and that are still there; ``given`` was there before."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self._given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in flat(result if isinstance(result, tuple | list) else [result]):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._given:
                self._made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self) -> int:
        return sum(size for ref, size in self._made.values() if not ref.expired())


def torch_split(stage: nn.Module, x: Tensor) -> Any:
    """I of torch's own split; what it returns is what W needs."""
    x = leaves(x)
    y = stage(x)
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], stage.parameters())
    return groups


def own_split(stage: nn.Module, x: Tensor) -> StageBackward:
    y, part = forward(stage, x)
    part.backward_input([torch.ones_like(y)])
    return part


def test_memory_between_the_parts() -> None:
    depth, width, rows = 4, 32, 64
    layer = [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)]
    stage = nn.Sequential(*(copy.deepcopy(one) for _ in range(depth) for one in layer))
    (x,) = randn(rows, width)[0]
    with Alive(x, *stage.parameters()) as alive:
        part = own_split(stage, x)
        own, held = alive.bytes(), bytes_held(part)
    activation, norms = rows * width * 4, depth * 2 * width * 4
    # A linear layer's input, output gradient and a stand-in of one number; of a normalisation its finished gradients.
    assert held == depth * (2 * activation + 4) + norms
    assert own == held
    with Alive(x, *stage.parameters()) as alive:
        groups = torch_split(stage, x)
        theirs = alive.bytes()
    assert groups and own < 0.6 * theirs, (own, theirs)
    with alive:
        part.backward_weight()
    assert bytes_held(part) == 0


def test_cast_weights_are_freed() -> None:
    """Under autocast the graph holds a copy of each weight for I; W does without."""
    stage = nn.Linear(64, 64, bias=False)
    y, part = forward(torch.autocast("cpu", dtype=torch.bfloat16)(stage), randn(4, 64)[0][0])
    part.backward_input([torch.ones_like(y)])
    assert bytes_held(part) < 64 * 64 * 2
    part.backward_weight()
    assert stage.weight.grad is not None
