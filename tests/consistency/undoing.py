"""Optimizers of every kind with arguments of every kind, and tensors with odd values, for tests of undo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from tests.support.digest import digest, optimizer_digest_data

SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 3e38, -3e38, 1e-30, float("inf"), float("-inf"), float("nan"), 1.0, 1e4]
#: NaNs with a payload and a sign, which arithmetic would not keep.
ODD_NAN = {torch.float32: -0x3EDCC, torch.float64: -0x7EDCBA9876543, torch.bfloat16: -0x3D}
AS_INT = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


class Lamb(Optimizer):
    """LAMB with the state of DeepSpeed's FusedLamb, which runs on GPUs only: steps as numbers, coefficients outside."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 1e-2, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.lamb_coeffs: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        del self.lamb_coeffs[:]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8) + group["weight_decay"] * p
                trust = p.norm() / update.norm()
                self.lamb_coeffs.append(trust)
                p.sub_(update * trust * group["lr"])


class Rebinding(Optimizer):
    """Keeps history in every way that can be followed: new tensors, lists, keys that are no parameters, counters."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.calls += 1
        self.last = torch.tensor(self.calls)
        self.state["all"] = {"n": self.calls}
        for group in self.param_groups:
            group["k"] += 1
            group["seen"] = True
            for p in group["params"]:
                state = self.state[p]
                state["history"] = [*state.get("history", []), p.clone()][-2:]
                state.setdefault("grown", []).append((self.calls, p.sum()))
                state["avg"] = p * 0.5 + state.get("avg", 0.0)
                p.sub_(state["avg"] * group["lr"])


def options(fixed: dict[str, Any] | None = None, paths: Sequence[str] = ("foreach",), **chosen: Any) -> Any:
    """Options of an optimizer: some of each list, and the path."""
    path = st.sampled_from(
        [{}, {"foreach": False}, {"foreach": True}, *([{"fused": True}] if "fused" in paths else [])]
    )
    if not paths:
        path = st.just({})
    values = st.fixed_dictionaries({name: st.sampled_from(some) for name, some in chosen.items()})
    return st.builds(lambda p, v: {**(fixed or {}), **v, **p}, path, values)


DECAY = [0.0, 0.1]
BOTH = [False, True]
ADAM = options(paths=("foreach", "fused"), lr=[1e-3, 1.0], weight_decay=DECAY, amsgrad=BOTH, maximize=BOTH)
KINDS: dict[str, Any] = {
    "SGD": st.one_of(
        options({"lr": 0.1}, paths=("foreach", "fused"), momentum=[0.0, 0.9], weight_decay=DECAY, maximize=BOTH),
        options({"lr": 0.1, "nesterov": True}, paths=("foreach", "fused"), momentum=[0.9], weight_decay=DECAY),
        options({"lr": 0.1}, momentum=[0.9], dampening=[0.0, 0.5]),
    ),
    "Adam": ADAM,
    "AdamW": ADAM,
    "NAdam": options(weight_decay=DECAY, decoupled_weight_decay=BOTH, maximize=BOTH),
    "RAdam": options(weight_decay=DECAY, decoupled_weight_decay=BOTH, maximize=BOTH),
    "Adamax": options(weight_decay=DECAY, maximize=BOTH),
    "Adadelta": options(weight_decay=DECAY, maximize=BOTH),
    "Adagrad": st.one_of(
        options(lr_decay=[0.0, 0.1], weight_decay=DECAY, maximize=BOTH, initial_accumulator_value=[0.0, 0.5]),
        st.just({"fused": True}),
    ),
    "RMSprop": options(momentum=[0.0, 0.9], centered=BOTH, weight_decay=DECAY, maximize=BOTH),
    "Rprop": options(maximize=BOTH),
    "ASGD": options(weight_decay=DECAY, maximize=BOTH, t0=[0.0, 1e6]),
    "Adafactor": options(weight_decay=DECAY, maximize=BOTH),
    "Muon": options(paths=(), momentum=[0.9], nesterov=BOTH, weight_decay=DECAY),
    "Lamb": options(paths=(), weight_decay=DECAY),
    "Rebinding": st.just({}),
}
DTYPES = {
    "Muon": [torch.float32],
    "Lamb": [torch.float32, torch.float64, torch.bfloat16],
}


def build(name: str, params: Any, **chosen: Any) -> Optimizer:
    kind = {"Lamb": Lamb, "Rebinding": Rebinding}.get(name) or getattr(torch.optim, name)
    made: Optimizer = kind(params, **chosen)
    return made


def bits(params: Sequence[torch.Tensor], optimizer: Optimizer, gradients: bool = False) -> str:
    """All that undo puts back: values by their bits, keys, hyper-parameters, attributes, identity of the tensors."""
    own = {k: v for k, v in vars(optimizer).items() if k in ("lamb_coeffs", "calls", "last")}
    keys = [[k for k in optimizer.state if not isinstance(k, torch.Tensor)], optimizer.state.get("all")]  # type: ignore[call-overload]
    has = [p in optimizer.state for p in params]
    same = [[id(v) for v in optimizer.state[p].values()] if h else [] for p, h in zip(params, has, strict=True)]
    grads = [p.grad for p in params] if gradients else []
    return digest([list(params), grads, optimizer_digest_data(optimizer), own, keys, has, same])


def filled(shape: Sequence[int], dtype: torch.dtype, seed: int, special: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    if special and values.numel():
        places = torch.randperm(values.numel(), generator=generator)[: max(1, values.numel() // 2)]
        chosen = torch.tensor(SPECIAL, dtype=torch.float64)[
            torch.randint(len(SPECIAL), places.shape, generator=generator)
        ]
        values.view(-1)[places] = chosen
    result = values.to(dtype)
    if special and result.numel():
        result.view(AS_INT[dtype]).view(-1)[0] = ODD_NAN[dtype]
    return result


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 3))


def fill(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
