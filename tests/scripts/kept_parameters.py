"""Plain PyTorch whose script uses parameters by itself: a replacement must have those of its own place in the program.

Ranks in ``--late`` end the update of batch 3 only when all others have made it, so that whoever gives a
replacement its state is ahead of it.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.digest import training_digest
from tests.support.report import OUT, Report, end_group

#: The batch whose update some ranks end late.
AT = 3


def sabotage(what: str, rank: int) -> None:
    """Take away, in one way or another, what a replacement needs."""
    from shared_core.worker.state.shared_images import SharedImages
    from shared_core.worker.state.updates import UpdateImages

    put = SharedImages.put

    def spoil(self: SharedImages, version: int, *args: Any) -> None:
        put(self, version, *args)
        for room in self._rooms.values():
            room.zero_()

    def forget(self: UpdateImages, description: dict[str, Any], *args: Any) -> None:
        description["images"] = []

    def remove(self: SharedImages, version: int, *args: Any) -> None:
        put(self, version, *args)
        for slot in range(2):
            self._path(2 * rank + slot).unlink(missing_ok=True)

    if what == "none":
        UpdateImages.add_to = forget  # type: ignore[assignment, method-assign]
    elif rank == 2:
        changed: Any = {"spoilt": spoil, "removed": remove, "missing": lambda *_: None}[what]
        SharedImages.put = changed  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--late", type=int, nargs="*", default=[])
    parser.add_argument("--two", action="store_true", help="two models, each with an optimizer, in turn")
    parser.add_argument("--sabotage", default="", help="none, spoilt, removed, missing")
    args = parser.parse_args()
    report = Report()
    job = None
    if not os.environ.get("SWIFT_BASELINE"):
        import shared_core

        shared_core.install()
        job = shared_core.current_job()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.sabotage and job is not None:
        sabotage(args.sabotage, rank)
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 4)) for _ in range(2 if args.two else 1)]
    models = [nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.02) for net in nets]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    loop = {"step": 0, "seen": 0.0}

    def passed(who: int) -> Path:
        return Path(os.environ[OUT]) / f"passed{AT}.{who}"

    def wait(*_: Any) -> None:
        if loop["step"] == AT and rank in args.late:
            others = [passed(each) for each in range(size) if each not in args.late]
            end = time.monotonic() + 60.0
            while not all(each.exists() for each in others) and time.monotonic() < end:
                time.sleep(0.001)

    if job is not None:
        optimizers[-1].register_step_post_hook(wait)
        shared_core.attach(*models, *optimizers)
        job.register("loop", lambda: dict(loop), loop.update)
    torch.manual_seed(rank)
    while loop["step"] < args.steps:
        if job is not None:
            job.step_boundary()
        report.count(f"batch {loop['step']}")
        for model, optimizer in zip(models, optimizers, strict=True):
            x = torch.randn(8, 16)
            loss = (model(x) - x[:, :4].sin()).pow(2).mean()
            if args.two and model is models[1]:
                loss = loss + 0.01 * (models[0].module(x) - model.module(x)).detach().pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            # What only this rank knows, and what is computed from parameters without DDP.
            loop["seen"] += loss.item() + sum(
                p.detach().double().sum().item() for net in nets for p in net.parameters()
            )
            optimizer.step()
        if loop["step"] == AT:
            passed(rank).touch()
        loop["step"] += 1
    digests = [training_digest(net, [optimizer], [], {}) for net, optimizer in zip(nets, optimizers, strict=True)]
    merged = {f"{name} {i}": each for i, found in enumerate(digests) for name, each in found.items()}
    report.finish(merged | {"seen": repr(loop["seen"])})
    group = end_group()
    del models, model, group


if __name__ == "__main__":
    main()
