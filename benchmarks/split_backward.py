"""What splitting a backward costs, and what is held between its parts, beside torch's own split.

Ways take turns within a round, so that whatever else the machine does hits all alike; times are medians, on one thread.
Bytes are those of storages that operations made during forward and I and that are alive after I.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import QUICK, Row, arguments, at_most, begin, finish, say
from shared_core.reroute.split import StageBackward

#: name: (width, blocks, sequences, tokens); a stage of GPT-like blocks, without attention for "linear layers"
CASES = {
    "linear layers, width 512": (512, 4, 1, 256),
    "attention blocks, width 256": (256, 2, 4, 64),
    "attention blocks, width 64": (64, 4, 2, 32),
}
#: Time of I + W to that of B; each product is visited twice, nothing is computed twice.
TARGET_RATIO = 1.10


class Block(nn.Module):
    """A pre-norm block: attention (where ``heads`` is not 0) and a multi-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (sequences, tokens, width), the shape of the result."""
        if self.heads:
            q, k, v = (
                t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
        else:
            x = x + self.out(self.qkv(self.norms[0](x)).chunk(3, -1)[0])
        y: Tensor = x + self.mlp(self.norms[1](x))
        return y


class Alive(TorchDispatchMode):
    """Counts the bytes that operations make and that stay; ``given`` tensors are not counted."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in self._given:
                storage = one.untyped_storage()
                self._made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def bytes(self) -> int:
        """Bytes alive now."""
        return sum(size for ref, size in self._made.values() if not ref.expired())


def whole(stage: nn.Module, x: Tensor, grad: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """B in place of I, nothing in place of W."""
    x = x.detach().requires_grad_()
    part = StageBackward([stage(x)], [x])
    return lambda: part.backward([grad]), lambda: None


def own(stage: nn.Module, x: Tensor, grad: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """This product's I and W."""
    x = x.detach().requires_grad_()
    part = StageBackward([stage(x)], [x])
    return lambda: part.backward_input([grad]), part.backward_weight


def theirs(stage: nn.Module, x: Tensor, grad: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """I and W of ``torch.distributed.pipelining``."""
    x = x.detach().requires_grad_()
    made = [stage(x)]
    groups: list[Any] = []

    def first() -> None:
        y = made.pop()
        groups.extend(stage_backward_input([y], [grad], [x], stage.parameters())[1])

    return first, lambda: stage_backward_weight(stage.parameters(), groups)


WAYS = {"B": whole, "I + W": own, "torch's I + W": theirs}


def measure(case: str, rounds: int) -> list[Row]:
    """Rows of one case."""
    width, blocks, sequences, tokens = CASES[case]
    torch.manual_seed(0)
    stage = nn.Sequential(*(Block(width, 0 if "linear" in case else 4) for _ in range(blocks)))
    x, grad = torch.randn(sequences, tokens, width, requires_grad=True), torch.randn(sequences, tokens, width)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds + 1):
        for name, way in WAYS.items():
            first, second = way(stage, x, grad)
            begun = time.perf_counter()
            first()
            between = time.perf_counter()
            second()
            times[name].append((between - begun, time.perf_counter() - between))
            del first, second
    medians = {name: [statistics.median(parts) for parts in zip(*t[1:], strict=True)] for name, t in times.items()}
    ratios = {
        name: statistics.median(sum(a) / sum(b) for a, b in zip(t[1:], times["B"][1:], strict=True))
        for name, t in times.items()
    }
    rows = [Row(case, "B", 1e3 * medians["B"][0], "ms")]
    for name in ("I + W", "torch's I + W"):
        said = "torch's " if "torch" in name else ""
        rows += [Row(case, f"{said}{part}", 1e3 * t, "ms") for part, t in zip("IW", medians[name], strict=True)]
        share = f"{name} to B"
        rows.append(at_most(case, share, ratios[name], "", None if said else TARGET_RATIO))
    held = {}
    for name, way in WAYS.items():
        with Alive([x, grad, *stage.parameters()]) as alive:
            first, second = way(stage, x, grad)
            if name == "B":
                held[name] = alive.bytes()
            first()
            held.setdefault(name, alive.bytes())
        second()
        del first, second
    rows.append(Row(case, "held from F to B", held["B"] / 2**20, "MiB"))
    rows.append(at_most(case, "held from I to W", held["I + W"] / 2**20, "MiB", held["torch's I + W"] / 2**20))
    rows.append(Row(case, "torch's, from I to W", held["torch's I + W"] / 2**20, "MiB"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a target was missed."""
    options = begin(arguments("split_backward", "What splitting a backward costs, and what it holds."), argv)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in CASES:
        say(case)
        rows += measure(case, 5 if options.size == QUICK else 40)
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
