"""An update overlapped with backward, beside plain DDP in the same job: digests of both, and what goes wrong."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shared_core.testing.digest import digest, optimizer_digest_data, training_digest
from shared_core.testing.report import Report
from shared_core.worker.state.undo import WaitFreeUpdate

STEPS = 3
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "adamw": ("AdamW", {"lr": 0.01, "foreach": False}),
    "adam foreach": ("Adam", {"lr": 0.01, "amsgrad": True, "foreach": True}),
    "adamw fused": ("AdamW", {"lr": 0.01, "fused": True}),
    "rmsprop": ("RMSprop", {"centered": True, "momentum": 0.9}),
    "adafactor": ("Adafactor", {}),
}
#: name: (options of DistributedDataParallel, how the loop is written)
LOOPS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, ""),
    "views": ({"gradient_as_bucket_view": True}, ""),
    "views zeroed": ({"gradient_as_bucket_view": True}, "zeroed"),
    "views some zeroed": ({"gradient_as_bucket_view": True}, "some zeroed"),
    "views accumulate": ({"gradient_as_bucket_view": True}, "accumulate"),
    "one bucket": ({"bucket_cap_mb": 25}, ""),
    "accumulate": ({}, "accumulate"),
    "closure": ({}, "closure"),
    "tied": ({}, "tied"),
    "zeroed": ({}, "zeroed"),
    "bfloat16": ({}, "bfloat16"),
    "outside": ({}, "outside"),
}


class Net(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(24, 24) for _ in range(5)))
        if tied:
            self.layers[4].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def made(
    optimizer: str, loop: str, wait_free: bool
) -> tuple[DistributedDataParallel, Optimizer, WaitFreeUpdate | None, nn.Parameter]:
    name, options = OPTIMIZERS[optimizer]
    given, how = LOOPS[loop]
    torch.manual_seed(0)
    net = Net(how == "tied").to(torch.bfloat16 if how == "bfloat16" else torch.float32)
    extra = nn.Parameter(torch.ones(3))
    ddp = DistributedDataParallel(net, **({"bucket_cap_mb": 0.004} | given))
    params = list(net.parameters())
    groups = [{"params": params[:4]}, {"params": [*params[4:], *([extra] if how == "outside" else [])], "lr": 0.02}]
    made: Optimizer = getattr(torch.optim, name)(groups, **options)
    return ddp, made, WaitFreeUpdate(ddp, made) if wait_free else None, extra


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 24, generator=generator).to(dtype)


def train(optimizer: str, loop: str, wait_free: bool) -> str:
    """Digest of parameters, gradients after each step, and optimizer state."""
    how = LOOPS[loop][1]
    ddp, stepper, update, extra = made(optimizer, loop, wait_free)
    dtype = next(ddp.parameters()).dtype
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    if update is not None:
        update.undo.arm()
    seen = []

    def closure() -> torch.Tensor:
        loss = ddp(batch(step, dtype)).square().mean() + (extra.sum() * 0.1 if how == "outside" else 0.0)
        loss.backward()
        return loss

    for step in range(STEPS):
        stepper.zero_grad(set_to_none="zeroed" not in how)
        if how == "some zeroed":
            for p in list(ddp.parameters())[::2]:
                p.grad = None
        if how == "accumulate":
            with ddp.no_sync():
                ddp(batch(step + 50)).square().mean().backward()
        if how == "closure":
            stepper.step(closure)
        else:
            closure()
            stepper.step()
        scheduler.step()
        seen.append(digest([p.grad for p in ddp.parameters()]))
        if update is not None:
            everything = [p for group in stepper.param_groups for p in group["params"]]
            assert all(update.undo.version(p) == step + 1 for p in everything), "each had one update"
            update.undo.commit()
    return digest([training_digest(ddp, [stepper])["all"], extra, seen])


class Lost(RuntimeError):
    """Stands for a communication error amid backward."""


def partial() -> dict[str, Any]:
    """Backward is cut off when the last layers have had their update and the first have not; then it is taken back."""
    ddp, optimizer, update, _ = made("adamw", "plain", True)
    assert update is not None
    update.undo.arm()
    first_update = threading.Event()
    optimizer.register_step_post_hook(lambda *_: first_update.set())

    def everything() -> str:
        state = [optimizer.state.get(p, {}) for p in ddp.parameters()]
        return digest([list(ddp.parameters()), optimizer_digest_data(optimizer) if all(state) else state])

    for step in range(3):
        ddp(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update.undo.commit()
    original = everything()
    first_update.clear()

    def cut_off(gradient: torch.Tensor) -> None:
        assert first_update.wait(20), "no bucket had its update during backward"
        raise Lost("cut off")

    hidden = ddp.module.layers[0](batch(9))
    hidden.register_hook(cut_off)
    saved = ddp.module.layers[0].forward
    ddp.module.layers[0].forward = lambda x: hidden  # type: ignore[method-assign]
    try:
        ddp(batch(9)).square().mean().backward()
    except Lost:
        pass
    ddp.module.layers[0].forward = saved  # type: ignore[method-assign]
    dist.barrier()
    versions = [update.undo.version(p) for p in ddp.parameters()]
    torn = everything()
    count = update.take_back()
    return {
        "versions": versions,
        "torn": torn != original,
        "count": count,
        "back": everything() == original,
        "again": update.take_back(),
    }


def message(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def mistakes() -> dict[str, str]:
    def backward(ddp: DistributedDataParallel) -> None:
        ddp(batch(0)).square().mean().backward()

    def clipped() -> None:
        ddp, optimizer, _, _ = made("sgd", "plain", True)
        backward(ddp)
        nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        optimizer.step()

    def replaced() -> None:
        ddp, optimizer, _, _ = made("sgd", "plain", True)
        backward(ddp)
        weight = ddp.module.layers[0].weight
        weight.grad = weight.grad * 2
        optimizer.step()

    def twice() -> None:
        ddp, _, _, _ = made("sgd", "plain", True)
        backward(ddp)
        backward(ddp)

    def broken() -> None:
        ddp, optimizer, _, _ = made("sgd", "plain", True)

        def fail(*_: object) -> None:
            raise ArithmeticError("the update has failed")

        optimizer.register_step_pre_hook(fail)
        backward(ddp)

    def options(**given: bool) -> None:
        ddp = DistributedDataParallel(Net(False), **given)
        WaitFreeUpdate(ddp, torch.optim.SGD(ddp.parameters()))

    def foreign() -> None:
        class Own(torch.optim.SGD):
            pass

        ddp = DistributedDataParallel(Net(False))
        WaitFreeUpdate(ddp, Own(ddp.parameters()))

    return {
        "clipped": message(clipped),
        "replaced": message(replaced),
        "twice": message(twice),
        "broken": message(broken),
        "unused": message(lambda: options(find_unused_parameters=True)),
        "static": message(lambda: options(static_graph=True)),
        "foreign": message(foreign),
    }


def main() -> None:
    report = Report()
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    if "--mistakes" in sys.argv:
        results = {"partial": partial(), "messages": mistakes()}
    else:
        cases = [(optimizer, "plain") for optimizer in OPTIMIZERS] + [("adamw", loop) for loop in LOOPS]
        cases += [("nesterov", loop) for loop in ("views", "accumulate")]
        for case in dict.fromkeys(cases):
            results[", ".join(case)] = [train(*case, wait_free) for wait_free in (False, True)]
    report.finish({}, results=results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
