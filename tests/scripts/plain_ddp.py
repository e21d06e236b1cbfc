"""Plain PyTorch: DDP, AdamW, clipping, dropout and BatchNorm, on any device; the loop is the script's own."""

from __future__ import annotations

import argparse
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from beginning import begin
from on_device import finish
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from tests.support.device import device
from tests.support.digest import training_digest
from tests.support.report import Report, end_group


class LeftOut(nn.Module):
    """A layer that later batches leave out."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.used = layer, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.used else x


def model(norm: bool, width: int, dropout: float) -> nn.Module:
    middle = [nn.BatchNorm1d(width)] if norm else []
    first, last = nn.Linear(16, width), nn.Linear(width, 4)
    return nn.Sequential(first, *middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width), last)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--norm", action="store_true", help="with BatchNorm")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--width", type=int, default=32, help="of the model")
    parser.add_argument("--dropout", type=float, default=0.1, help="0: what is trained does not depend on the device")
    parser.add_argument("--bucket-mb", type=float, default=0.002, help="small, so that there are several buckets")
    parser.add_argument(
        "--way", default="", help="how gradients are handled: view, hook, builtin, accumulate, metric, double, zeros"
    )
    parser.add_argument("--startup", type=float, default=0.0, help="seconds that the script takes before it trains")
    parser.add_argument("--mistake", default="", help="a mistake users make: unseeded, branch, model, raise, draw")
    parser.add_argument("--own", action="store_true", help="registers what is another value in each process")
    args = parser.parse_args()
    report = Report()
    job = begin()
    rank = dist.get_rank()
    torch.manual_seed(1000 * (args.mistake == "model" and rank == 1))
    net = model(args.norm, args.width, args.dropout)
    if args.mistake == "model" and rank == 1:
        net = nn.Sequential(*net, nn.Linear(4, 4))
    if args.way == "double":
        net[-1].double()
        net[-2].register_forward_hook(lambda module, inputs, output: output.double())
    view, zeros = args.way == "view", args.way == "zeros"
    if zeros:
        net[-2] = LeftOut(net[-2])
    net.to(device())
    ddp = nn.parallel.DistributedDataParallel(
        net, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=view, find_unused_parameters=zeros
    )
    if args.way == "hook":
        ddp.register_comm_hook(None, fp16_compress_hook)
    if args.way == "builtin":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    optimizer = getattr(torch.optim, args.optimizer)(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    loop = {"step": 0, "loss_sum": 0.0}
    smooth = torch.zeros((), device=device())  # nobody registers it
    time.sleep(args.startup)
    print(f"rank {rank} is ready", flush=True)
    if job is not None:
        job.attach([ddp], [optimizer])
        job.register("scheduler", scheduler.state_dict, scheduler.load_state_dict)
        job.register("loop", lambda: dict(loop), loop.update)
        if args.own:
            job.register("own", os.getpid, lambda _: None)
    while loop["step"] < args.steps:
        if job is not None:
            job.step_boundary()
        report.count(f"batch {loop['step']}")
        generator = torch.Generator().manual_seed(int(1000 * loop["step"] + rank))
        x = torch.randn(8, 16, generator=generator) + 0.1 * torch.randn(8, 16)
        x = x + 0.1 * random.random() + 0.1 * float(np.random.rand())
        if args.mistake == "draw" and loop["step"] == 6 and int(os.environ.get("SWIFT_RECOVERY_INCARNATION", "0")):
            torch.rand(1, device=device())  # only in the replacement: the device's generator is one number ahead
        if args.mistake == "unseeded":
            x = x + torch.randn(8, 16, generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4))))
        x = x.to(device())
        y = x[:, :4].sin()
        if args.mistake == "raise" and rank == 1 and loop["step"] == 3:
            raise ZeroDivisionError("a mistake of the user's")
        optimizer.zero_grad(set_to_none=not zeros)
        if zeros:
            net[-2].used = loop["step"] < 2
        if args.way in ("accumulate", "metric"):
            with ddp.no_sync():
                (ddp(x.flip(0)) - y.flip(0)).pow(2).mean().backward()
        loss = (ddp(x) - y).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if args.way == "metric":
            loop["loss_sum"] += ddp(x).mean().item()  # no backward: DDP reduces in the next one, although in no_sync()
        total = loss.detach().clone()
        if args.mistake == "branch" and int(os.environ.get("SWIFT_RECOVERY_INCARNATION", "0")) > 0:
            total = total.double()  # another process does something else: the collective is not the one it was
        dist.all_reduce(total)
        smooth = 0.9 * smooth + loss.detach()
        loop["loss_sum"] += total.item()
        loop["step"] += 1
    digests = training_digest(net, [optimizer], [scheduler], {"loss": loop["loss_sum"], "smooth": smooth.item()})
    finish(report, digests, loss=loop["loss_sum"])
    group = end_group()
    del ddp, group


if __name__ == "__main__":
    main()
