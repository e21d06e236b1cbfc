"""The decoupled backward against ``torch.autograd.backward``, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from held_bytes import bytes_held, layers_waiting
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining._backward import stage_backward_input
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shared_core.reroute.split import BackwardOrder, StageBackward

MICRO_BATCHES = 3
Batch = tuple[Any, ...]


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for one in value for t in flat(one)] if isinstance(value, tuple | list) else []


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
    done = [StageBackward.forward(stage, *batch) for batch in batches]
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


def gpt2_block() -> nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=16, n_head=2, n_layer=1, n_positions=8, attn_implementation="sdpa")
    inner = GPT2Block(config, layer_idx=0)
    return Call(lambda layers, x: flat(layers["block"](x))[0], block=inner)


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


def test_mlp_three_dimensions() -> None:
    check(residual(), randn(4, 5, 16), waiting=4)


def test_mlp_two_dimensions() -> None:
    check(residual(), randn(4, 16), waiting=4)


def test_without_bias() -> None:
    check(
        nn.Sequential(nn.Linear(16, 8, bias=False), nn.Tanh(), nn.Linear(8, 16, bias=False)), randn(4, 3, 16), waiting=2
    )


def test_gpt2_block() -> None:
    torch.manual_seed(0)
    check(gpt2_block(), randn(2, 6, 16), waiting=4)


def test_last_stage_with_a_loss() -> None:
    head = Call(
        lambda layers, x, t: F.cross_entropy(layers["head"](layers["norm"](x)), t),
        norm=nn.LayerNorm(16),
        head=nn.Linear(16, 7),
    )
    batches = [(x, torch.arange(4) % 7) for (x,) in randn(4, 16)]
    check(head, batches, waiting=1)
    (_, part), reference = StageBackward.forward(head, *batches[0]), copy.deepcopy(head)
    part.backward_input()
    part.backward_weight()
    reference(*leaves(batches[0])).backward()
    same(results(reference, [], []), results(head, [], []))


def test_convolution_and_batch_norm() -> None:
    stage = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 3, bias=False), nn.BatchNorm2d(3)
    )
    check(stage, randn(4, 3, 8, 8), waiting=2)


@pytest.mark.parametrize("sparse", [False, True])
def test_first_stage(sparse: bool) -> None:
    stage = Call(
        lambda layers, i: layers["body"](layers["words"](i)), words=nn.Embedding(11, 16, sparse=sparse), body=block()
    )
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


@pytest.mark.parametrize("times", [2, 3])
def test_layer_used_several_times(times: int) -> None:
    def fn(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        for _ in range(times):
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


@pytest.mark.parametrize("what", ["all", "block"])
def test_checkpointed(what: str) -> None:
    def fn(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        x = checkpoint(layers["a"], x, use_reentrant=False)
        return checkpoint(layers["b"], x, use_reentrant=False) if what == "all" else layers["b"](x)

    check(Call(fn, a=block(), b=block()), randn(4, 5, 16), waiting=0 if what == "all" else 2)


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
    output, part = StageBackward.forward(stage, randn(4, 16)[0][0])
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
    (one, _), part = StageBackward.forward(lambda x: (layers[0](x), layers[1](x)), x)
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


def test_nothing_to_differentiate() -> None:
    check(nn.GELU(), randn(4, 16, grad=False), waiting=0)


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
    output, part = StageBackward.forward(stage, randn(4, 16)[0][0])
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
    output, part = StageBackward.forward(nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True))
    with pytest.raises(BackwardOrder, match="need the input gradients first"):
        part.backward_weight()
    part.backward_input([torch.ones_like(output)])
    with pytest.raises(BackwardOrder, match="follows its forward once"):
        part.backward([torch.ones_like(output)])
    part.backward_weight()
    with pytest.raises(BackwardOrder):
        part.backward_weight()
    with pytest.raises(ValueError, match="must be leaves"):
        StageBackward(output, [torch.randn(2, requires_grad=True) * 2])
    with pytest.raises(ValueError, match="1 outputs need as many gradients, 2"):
        StageBackward(output, []).backward([output, output])


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
    y, part = StageBackward.forward(stage, x)
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


def test_memory_is_freed_on_the_way() -> None:
    """I needs no more at its peak than B does, but for the output gradients that wait."""
    depth, width, rows = 6, 32, 64
    stage = nn.Sequential(*(one for _ in range(depth) for one in (nn.Linear(width, width), nn.GELU(), nn.Softmax(-1))))
    (x,) = randn(rows, width)[0]
    peaks = {}
    for how in ("backward", "backward_input"):
        with Alive(x, *stage.parameters()) as alive:
            y, part = StageBackward.forward(stage, x)
            grad = torch.ones_like(y)
            del y
            alive.peak = 0
            getattr(part, how)([grad])
        peaks[how] = alive.peak
        stage.zero_grad()
    activation = rows * width * 4
    assert peaks["backward_input"] <= peaks["backward"] + activation, peaks


def test_cast_weights_are_freed() -> None:
    """Under autocast the graph holds a copy of each weight for I; W does without."""
    stage = nn.Linear(64, 64, bias=False)
    y, part = StageBackward.forward(torch.autocast("cpu", dtype=torch.bfloat16)(stage), randn(4, 64)[0][0])
    part.backward_input([torch.ones_like(y)])
    assert bytes_held(part) < 64 * 64 * 2
    part.backward_weight()
    assert stage.weight.grad is not None
