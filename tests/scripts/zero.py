"""DeepSpeed's ZeRO without a pipeline, in a loop of the script's own."""

from __future__ import annotations

import argparse
import logging
import os
import random
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from sharded import Block
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shared_core
from tests.support.digest import digest, training_digest
from tests.support.report import Report, generators_digest


class Net(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.first = nn.Linear(8, args.width)
        self.blocks = nn.Sequential(*(Block(args.width, args.bf16, 0.1) for _ in range(3)))
        self.last = nn.Linear(args.width, 3)
        self.judge = nn.Linear(3, 3) if args.judge else None
        self.borrows, self.skips = args.borrow, False
        if args.freeze:
            self.blocks[1].up.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for number, block in enumerate(self.blocks):
            y = y if self.skips and number == 1 else block(y)
        if self.borrows:  # of another module: DeepSpeed notices it in the first forward
            y = y + nn.functional.linear(x, self.first.weight)
        y = self.last(y)
        return y if self.judge is None or self.training else self.judge(y)


def config(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {
            "stage": args.stage,
            "reduce_bucket_size": 1000,
            "stage3_param_persistence_threshold": 20,
            "use_multi_rank_bucket_allreduce": not args.reduce,
            "contiguous_gradients": not args.scattered,
        },
        "steps_per_print": None,
        "swift_recovery": {},
    }
    if args.bf16:
        found["bf16"] = {"enabled": True}
    if args.accumulate_fp32:
        found["data_types"] = {"grad_accum_dtype": "fp32"}
    return found


def whole(engine: Any) -> dict[str, str]:
    """Of all parameters, put together from all ranks: in fp32, and moments."""
    keys = ("exp_avg", "exp_avg_sq")
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    return {
        "masters": digest([safe_get_full_fp32_param(p) for p in trained]),
        "moments": digest([safe_get_full_optimizer_state(p, key) for p in trained for key in keys]),
    }


def train() -> dist.ProcessGroup:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--width", type=int, default=15)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--accumulate-fp32", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--evaluate", action="store_true", help="after each epoch")
    parser.add_argument("--judge", action="store_true", help="a layer that only evaluations use")
    parser.add_argument("--reduce", action="store_true", help="to the rank that keeps it")
    parser.add_argument("--scattered", action="store_true", help="gradients are not copied to a buffer")
    parser.add_argument("--borrow", action="store_true", help="a parameter of another module")
    parser.add_argument("--freeze", action="store_true", help="a layer")
    parser.add_argument("--skip", action="store_true", help="a block, in every other batch")
    parser.add_argument("--grow", action="store_true", help="twice the batch, from the seventh on")
    args = parser.parse_args()
    report = Report()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if os.environ.get("SWIFT_BASELINE"):  # for inference only, and compiled for half a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    engine, optimizer, _, scheduler = deepspeed.initialize(model=Net(args), config=config(args))
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    data = torch.randn(12 * size, 8, generator=torch.Generator().manual_seed(5))
    sampler: DistributedSampler[object] = DistributedSampler(TensorDataset(data), shuffle=True)
    loader = DataLoader(TensorDataset(data), batch_size=2, sampler=sampler)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)

    job = shared_core.attach(engine, loader)
    seen = job.register(loss=0.0, batches=0)
    saved = ""
    for epoch in job.epochs(args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for _, (x,) in job.steps(loader):
            report.count(f"batch {seen.batches}")
            saved = digest([saved, *lasting(engine)])
            if args.grow and seen.batches == 6:
                engine.set_train_batch_size(2 * engine.train_batch_size())
            seen.batches += 1
            engine.module.skips = args.skip and seen.batches % 2 == 1
            x = x + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * float(np.random.rand())
            loss = (engine(x.to(dtype)) - x[:, :3].sin().to(dtype)).square().mean()
            engine.backward(loss)
            engine.step()
            seen.loss += loss.item()
        if args.evaluate:
            engine.eval()
            with torch.no_grad():
                for part in data[:9].to(dtype).split(3):
                    seen.loss += engine(part).square().mean().item()
    saved = digest([saved, *lasting(engine)])
    engine.empty_partition_cache()
    digests = training_digest(engine.module, [getattr(optimizer, "optimizer", optimizer)], [scheduler], vars(seen))
    facts = digest([engine.global_steps, engine.micro_steps, engine.global_samples, engine.get_global_grad_norm()])
    extra = vars(seen) | {"engine": type(engine).__name__, "optimizer": type(optimizer).__name__}
    report.finish(
        digests | whole(engine) | {"engine": facts, "saved": saved, "generators": generators_digest()}, **extra
    )
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    return group


def lasting(engine: Any) -> list[torch.Tensor]:
    """What a script would save: parameters that persist are whole after the first step. Which of the others are whole
    after an evaluation is by chance.
    """
    passing = {name for name, p in engine.module.named_parameters() if not getattr(p, "ds_persist", True)}
    return [value for name, value in engine.module_state_dict().items() if name not in passing]


if __name__ == "__main__":
    group = train()  # let go of after the model: see plain_ddp.py
