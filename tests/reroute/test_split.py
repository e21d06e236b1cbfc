"""The decoupled backward against ``torch.autograd.backward``, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from splitting import (
    MICRO_BATCHES,
    Call,
    Scale,
    block,
    check,
    forward,
    leaves,
    randn,
    residual,
    results,
    same,
    split,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shared_core.reroute.split import BackwardOrder, StageBackward


def test_mlp_three_dimensions() -> None:
    check(residual(), randn(4, 5, 16), waiting=4)


def test_last_stage_with_a_loss() -> None:
    head = Call(
        lambda layers, x, t: F.cross_entropy(layers["head"](layers["norm"](x)), t),
        norm=nn.LayerNorm(16),
        head=nn.Linear(16, 7),
    )
    batches = [(x, torch.arange(4) % 7) for (x,) in randn(4, 16)]
    check(head, batches, waiting=1)
    (_, part), reference = forward(head, *batches[0]), copy.deepcopy(head)
    part.backward_input()
    part.backward_weight()
    reference(*leaves(batches[0])).backward()
    same(results(reference, [], []), results(head, [], []))


def test_convolution_and_batch_norm() -> None:
    stage = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 3, bias=False), nn.BatchNorm2d(3)
    )
    check(stage, randn(4, 3, 8, 8), waiting=2)


def test_first_stage() -> None:
    stage = Call(lambda layers, i: layers["body"](layers["words"](i)), words=nn.Embedding(11, 16), body=block())
    generator = torch.Generator().manual_seed(1)
    check(stage, [(torch.randint(0, 11, (4, 5), generator=generator),) for _ in range(MICRO_BATCHES)], waiting=3)


def test_embedding_beside_the_trunk() -> None:
    """Positions are looked up within the stage: their table is no part of the trunk."""
    stage = Call(
        lambda layers, x: layers["out"](x + layers["at"](torch.arange(x.shape[1]))),
        at=nn.Embedding(5, 16),
        out=nn.Linear(16, 16),
    )
    check(stage, randn(4, 5, 16), waiting=2)


def test_first_stage_without_a_table() -> None:
    """I ends at the lowest products; what hangs below a product's operand waits too."""

    def fn(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        h = layers["a"](x)
        return layers["b"](torch.softmax(h @ x.t(), -1) @ x + layers["c"](torch.relu(h)))

    check(Call(fn, **{name: nn.Linear(16, 16) for name in "abc"}), randn(4, 16, grad=False))


def test_layer_used_several_times() -> None:
    def fn(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        for _ in range(3):
            x = layers["own"](torch.relu(layers["shared"](x)))
        return x

    check(Call(fn, shared=nn.Linear(16, 16), own=nn.Linear(16, 16, bias=False)), randn(4, 16), waiting=0)


def test_tied_table_and_head() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body, self.free = nn.Embedding(11, 16), block(), nn.Linear(16, 16)

        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            h = self.body(x + self.words(i)) + self.free(x)
            return F.linear(h, self.words.weight) + F.linear(x, self.words.weight)

    torch.manual_seed(0)
    check(Tied(), [(x, torch.arange(20).view(4, 5) % 11) for (x,) in randn(4, 5, 16)], waiting=4)


def test_weight_shared_through_other_operations() -> None:
    """A weight that is cast once and used twice, and one that is computed from two parameters."""

    def fn(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        weight = layers["a"].weight * 2
        x = F.linear(F.linear(x, weight), weight)
        return layers["n"](x)

    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    stage = Call(fn, a=nn.Linear(16, 16, bias=False))
    stage.layers["n"] = normed
    check(Copied(stage), randn(4, 16), waiting=1)


class Copied(nn.Module):
    """Parametrized modules are deep-copied by torch with a warning-free path only inside another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Any:
        return self.inner(*inputs)


def test_grouped_products() -> None:
    """Experts in one batched product, and a product with its operands the other way round."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b, self.left = (nn.Parameter(torch.randn(s)) for s in ((3, 8, 8), (3, 1, 8), (8, 8)))

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(self.left, torch.bmm(torch.baddbmm(self.b, x, self.w).tanh(), self.w.detach()))

    check(Experts(), randn(3, 8, 8), waiting=1 + 1)


def test_checkpointed() -> None:
    def fn(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        x = checkpoint(layers["a"], x, use_reentrant=False)
        return layers["b"](x)

    check(Call(fn, a=block(), b=block()), randn(4, 5, 16), waiting=2)


def test_reentrant_checkpoint_is_not_split() -> None:
    check(
        Call(lambda layers, x: checkpoint(layers["a"], x, use_reentrant=True), a=block()), randn(4, 5, 16), whole=True
    )


def test_deepspeed_checkpoint_is_not_split() -> None:
    checkpointing = pytest.importorskip("deepspeed.runtime.activation_checkpointing.checkpointing")
    layer = block()
    layer[3].p = 0.0  # DeepSpeed restores generators of an accelerator only
    check(Call(lambda layers, x: checkpointing.checkpoint(layers["a"], x), a=layer), randn(4, 5, 16), whole=True)


def test_tensor_hook_of_a_parameter() -> None:
    """On a weight that waits it runs once, in W; on one that cannot wait the backward stays whole."""
    for index, whole in ((1, False), (0, True)):
        calls: list[int] = []

        def fn(layers: nn.ModuleDict, x: Tensor, index: int = index, calls: list[int] = calls) -> Tensor:
            weight = layers["a"][index].weight
            if not weight._backward_hooks:
                weight.register_hook(lambda grad: (calls.append(1), grad * 3)[1])
            return layers["a"](x)

        check(Call(fn, a=block()), randn(4, 16), whole=whole)
        calls.clear()
        split(Call(fn, a=block()), randn(4, 16), ["I0", "W0"])
        assert len(calls) == 1


def test_post_accumulate_hooks_fire_in_w() -> None:
    stage, seen = block(), list[str]()
    for name, parameter in stage.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    output, part = forward(stage, randn(4, 16)[0][0])
    part.backward_input([torch.ones_like(output)])
    assert not seen and all(p.grad is None for p in stage.parameters())
    part.backward_weight()
    assert sorted(seen) == sorted(name for name, _ in stage.named_parameters())


def test_hook_on_the_output_of_a_layer() -> None:
    def fn(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        h = layers["a"](x)
        h.register_hook(lambda grad: grad * 2)
        return layers["b"](h)

    check(Call(fn, a=nn.Linear(16, 16), b=nn.Linear(16, 16)), randn(4, 16), waiting=2)


def test_users_function_runs_once() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.randn(16)), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(Scale.apply(self.linear(x).detach() + x, self.scale))

    check(Own(), randn(4, 16), waiting=1)
    Scale.calls = 0
    split(Own(), randn(4, 16), ["I0", "W0"])
    assert Scale.calls == 1


def test_autocast() -> None:
    def fn(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = layers["a"](x)
            return F.linear(layers["b"](h), layers["a"][1].weight[:, :16])

    check(Call(fn, a=block(), b=block()), randn(4, 5, 16))
    check(
        Call(
            lambda layers, x: layers["n"](layers["b"](x.bfloat16())),
            b=block().bfloat16(),
            n=nn.Linear(16, 4).bfloat16(),
        ),
        randn(4, 16),
        waiting=3,
    )


def test_non_contiguous_inputs_and_weights() -> None:
    def fn(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        h = layers["a"](x.transpose(0, 1)[::2])
        return F.linear(h.t(), layers["w"].weight.t()).t()

    check(
        Call(fn, a=nn.Linear(6, 8), w=nn.Linear(5, 4, bias=False)),
        [(x.detach().requires_grad_(),) for (x,) in randn(6, 8)],
        waiting=2,
    )
    check(nn.Linear(6, 8), [(x.detach().transpose(0, 2).requires_grad_(),) for (x,) in randn(6, 3, 4)], waiting=1)
    check(nn.Linear(6, 8), [(x.detach().expand(4, 6).requires_grad_(),) for (x,) in randn(1, 6)], waiting=1)


def test_several_inputs_and_outputs() -> None:
    def fn(layers: nn.ModuleDict, pair: tuple[Tensor, Tensor], mask: Tensor, unused: Tensor) -> Any:
        a, b = layers["a"](pair[0]), layers["b"](pair[1])
        return {"sum": (a + b) * mask, "parts": (a, b.detach(), pair[0]), "side": layers["s"](mask), "text": "x"}

    stage = Call(fn, a=block(), b=nn.Linear(16, 16), s=nn.Linear(16, 16), no=nn.Linear(2, 2))
    x = [one for (one,) in randn(4, 16, times=4 * MICRO_BATCHES)]
    batches = [((x[4 * i], x[4 * i + 1]), x[4 * i + 2].detach(), x[4 * i + 3]) for i in range(MICRO_BATCHES)]
    check(stage, batches, waiting=3)


def test_output_without_gradient_is_passed_over() -> None:
    layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    x = randn(4, 16)[0][0]
    (one, _), part = forward(lambda x: (layers[0](x), layers[1](x)), x)
    (grad,) = part.backward_input([torch.ones_like(one), None])
    part.backward_weight()
    own = leaves(x)
    layers[0].weight.grad, got = None, layers[0].weight.grad
    layers[0](own).sum().backward()
    assert layers[1].weight.grad is None and torch.equal(own.grad, grad) and torch.equal(got, layers[0].weight.grad)


def test_frozen_parameters() -> None:
    stage = residual()
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(not name.endswith("1.weight") and "1.4" not in name)
    check(stage, randn(4, 16), waiting=1)


def test_no_parameters() -> None:
    check(nn.Sequential(nn.GELU(), nn.Softmax(-1)), randn(4, 16), waiting=0)
    check(nn.Identity(), randn(4, 16), waiting=0)


def test_in_place_operations() -> None:
    def fn(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        h = F.leaky_relu(layers["a"](x)).mul_(2)
        h[:, :3] = layers["b"](x)[:, :3]
        return layers["c"](h.add_(2))

    check(Call(fn, **{name: nn.Linear(16, 16) for name in "abc"}), randn(4, 16), waiting=3)


def test_modified_saved_tensor_is_noticed() -> None:
    stage = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16))
    kept: list[Tensor] = []
    stage[1].register_forward_hook(lambda _, __, y: kept.append(y))
    output, part = forward(stage, randn(4, 16)[0][0])
    with torch.no_grad():
        kept[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        part.backward_input([torch.ones_like(output)])


def test_offloaded_tensors() -> None:
    def fn(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            x = layers["a"](x)
        return layers["b"](x)

    check(Call(fn, a=block(), b=block()), randn(4, 16), waiting=2)


def test_order_of_the_parts() -> None:
    output, part = forward(nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True))
    with pytest.raises(BackwardOrder, match="need the input gradients first"):
        part.backward_weight()
    part.backward_input([torch.ones_like(output)])
    with pytest.raises(BackwardOrder, match="follows its forward once"):
        part.backward([torch.ones_like(output)])
    part.backward_weight()
    with pytest.raises(BackwardOrder):
        part.backward_weight()
    with pytest.raises(ValueError, match="must be leaves"):
        StageBackward([output], [torch.randn(2, requires_grad=True) * 2])
    with pytest.raises(ValueError, match="1 outputs need as many gradients, 2"):
        StageBackward([output], []).backward([output, output])
