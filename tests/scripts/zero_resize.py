"""ZeRO while the number of workers changes between two starts. The parameters count how often each sample was used; see
``resize.py``."""

from __future__ import annotations

import argparse
import logging
import os
import threading
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from resize import Net, Numbered
from torch.utils.data import DataLoader, DistributedSampler

import shared_core
from tests.support.digest import digest
from tests.support.report import OUT, Report, end_group

MOMENTUM = "momentum_buffer"


def whole(engine: Any, *, moments: bool) -> str:
    """Digest of all parameters, in fp32 and put together from all ranks, and of what the optimizer keeps of them."""
    net = list(engine.module.net.parameters())
    found = [safe_get_full_fp32_param(each) for each in (*net, engine.module.uses)]
    return digest([*found, *(safe_get_full_optimizer_state(each, MOMENTUM) for each in net if moments)])


def main() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--micro-batches", type=int, default=0, help="of all workers in a step")
    args = parser.parse_args()
    report = Report()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    model = Net()
    accumulate = max(1, args.micro_batches // world)
    groups = [
        {"params": list(model.net.parameters()), "momentum": 0.9},
        {"params": [model.uses], "lr": 1.0, "momentum": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulate,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 20},
        "bf16": {"enabled": args.bf16},
        "steps_per_print": None,
        "swift_recovery": {},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(groups, lr=0.01), config=config)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    data = Numbered()
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(rank)
    job = shared_core.attach(engine, loader)
    seen = job.register(losses=[], exact=[], total=0.0, batches=0)
    first = ""
    for epoch in job.epochs(args.epochs):
        sampler.set_epoch(epoch)
        for _, (indices, x) in job.steps(loader):
            state = whole(engine, moments=engine.global_steps > 0)
            first = first or state
            if rank == 0:
                (Path(os.environ[OUT]) / f"state{job.total_steps}").write_text(state)
            if os.environ.get("HOLD_AT") == str(job.total_steps):
                threading.Event().wait()
            guess, uses = engine(indices, x.to(dtype))
            loss = (guess - x.sin().sum(1).to(dtype)).square().mean()
            engine.backward(loss - world * accumulate * uses.sum())
            engine.step()
            total = loss.detach().float()
            dist.all_reduce(total)
            seen.total += total.item() / world
            seen.batches += 1
        seen.losses.append(seen.total / seen.batches)
        uses = safe_get_full_fp32_param(engine.module.uses)
        seen.exact.append(bool((uses == epoch + 1).all()))
        seen.total, seen.batches = 0.0, 0
    report.finish({}, **vars(seen), first=first)
    return end_group()


if __name__ == "__main__":
    group = main()  # let go of after the model: see plain_ddp.py
