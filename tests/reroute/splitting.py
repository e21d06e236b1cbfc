"""Stages, and their backward in parts compared with the plain one, for tests of the decoupled backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from held_bytes import bytes_held, layers_waiting
from torch import Tensor, nn

from shared_core.reroute.split import StageBackward

MICRO_BATCHES = 3
Batch = tuple[Any, ...]


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for one in value for t in flat(one)] if isinstance(value, tuple | list) else []


def forward(fn: Callable[..., Any], *inputs: Any) -> tuple[Any, StageBackward]:
    """Run ``fn`` on ``inputs``, detached; returns its result, and its backward."""
    given = [leaves(one) for one in inputs]
    outputs = fn(*given)
    return outputs, StageBackward(flat(outputs), [one for each in given for one in flat(each)])


def leaves(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return type(value)(leaves(one) for one in value) if isinstance(value, tuple | list) else value


def results(stage: nn.Module, outputs: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> dict[str, list[Any]]:
    return {
        "outputs": [y.detach() for y in outputs],
        "input gradients": list(inputs),
        "parameter gradients": [p.grad for p in stage.parameters()],
        "buffers": list(stage.buffers()),
    }


def seeds(outputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]


def plain(stage: nn.Module, batches: Sequence[Batch], order: Sequence[int]) -> dict[str, list[Any]]:
    """What torch alone gives when the backwards run in ``order``."""
    torch.manual_seed(7)
    given = [leaves(batch) for batch in batches]
    outputs = [flat(stage(*batch)) for batch in given]
    for i in order:
        pairs = [(y, g) for y, g in zip(outputs[i], seeds(outputs[i]), strict=True) if y.requires_grad]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    return results(stage, [y for one in outputs for y in one], [x.grad for x in flat(given)])


#: Names of what is done: the part, and the micro-batch.
PLANS = {
    "each": ["I0", "W0", "I1", "W1", "I2", "W2"],
    "late": ["I0", "I1", "I2", "W0", "W1", "W2"],
    "turned": ["I0", "I1", "I2", "W2", "W0", "W1"],
    "mixed": ["I0", "B1", "I2", "W2", "W0"],
    "whole": ["B0", "B1", "B2"],
}


def split(stage: nn.Module, batches: Sequence[Batch], plan: Sequence[str]) -> tuple[dict[str, list[Any]], list[Any]]:
    torch.manual_seed(7)
    done = [forward(stage, *batch) for batch in batches]
    parts = [part for _, part in done]
    outputs = [[y.detach() for y in flat(output)] for output, _ in done]
    del done
    inputs: dict[int, Sequence[Tensor | None]] = {}
    for what, i in ((action[0], int(action[1:])) for action in plan):
        if what == "B":
            inputs[i] = parts[i].backward(seeds(outputs[i]))
        elif what == "I":
            inputs[i] = parts[i].backward_input(seeds(outputs[i]))
        else:
            parts[i].backward_weight()
            assert bytes_held(parts[i]) == 0
    ordered = [x for i in sorted(inputs) for x in inputs[i]]
    return results(stage, [y for one in outputs for y in one], ordered), parts


def same(expected: dict[str, list[Any]], got: dict[str, list[Any]]) -> None:
    for name, values in expected.items():
        assert len(values) == len(got[name]), name
        for i, (a, b) in enumerate(zip(values, got[name], strict=True)):
            assert (a is None) == (b is None), (name, i)
            if a is not None:
                assert a.dtype == b.dtype and a.is_sparse == b.is_sparse, (name, i)
                a, b = (a.to_dense(), b.to_dense()) if a.is_sparse else (a, b)
                assert torch.equal(a, b), (name, i, (a - b).abs().max())


def check(stage: nn.Module, batches: Sequence[Batch], *, waiting: int | None = None, whole: bool = False) -> None:
    """All plans against torch. ``waiting``: layers whose weight gradient waits; ``whole``: the split is refused."""
    for name, plan in PLANS.items():
        # Where the split is refused, I accumulates.
        adds = "BI" if whole else "BW"
        expected = plain(copy.deepcopy(stage), batches, [int(action[1:]) for action in plan if action[0] in adds])
        got, parts = split(copy.deepcopy(stage), batches, plan)
        try:
            same(expected, got)
        except AssertionError as error:
            raise AssertionError(f"plan {name}: {error}") from None
    _, parts = split(copy.deepcopy(stage), batches, ["I0", "I1", "I2"])
    assert [bool(part.whole) for part in parts] == [whole] * MICRO_BATCHES
    if waiting is not None:
        assert [layers_waiting(part) for part in parts] == [waiting] * MICRO_BATCHES


def randn(*shape: int, grad: bool = True, times: int = MICRO_BATCHES) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(shape, generator=generator).requires_grad_(grad),) for _ in range(times)]


class Call(nn.Module):
    """A stage of some layers and a function of them and the inputs."""

    def __init__(self, fn: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.fn = fn

    def forward(self, *inputs: Any) -> Any:
        return self.fn(self.layers, *inputs)


def block(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width)
    )


def residual(width: int = 16, depth: int = 2) -> nn.Module:
    def fn(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        for layer in layers.values():
            x = x + layer(x)
        return x

    return Call(fn, **{str(i): block(width) for i in range(depth)})


class Scale(torch.autograd.Function):
    """A user's function with a parameter: it computes both gradients, and counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        Scale.calls += 1
        x, _ = ctx.saved_tensors
        _, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum_to_size(weight.shape)
