"""The soak's job with DeepSpeed's ZeRO: dropout, augmentation, clipping, a schedule, an evaluation after each epoch.

Fourteen steps in two epochs.
"""

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
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shared_core
from tests.support.digest import digest, training_digest
from tests.support.jobs.sharded_job import BATCH, EPOCHS, STEPS, WIDTH, Block
from tests.support.report import Report, end_group, generators_digest
from tests.support.runner import BASELINE


def config(stage: int) -> dict[str, Any]:
    """Of DeepSpeed: buckets so small that a step reduces several times."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 2000,
            "stage3_param_persistence_threshold": 30,
        },
        "steps_per_print": None,
        "swift_recovery": {},
    }


def main() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO")
    args = parser.parse_args()
    report = Report()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if os.environ.get(BASELINE):  # for inference only, and compiled for half a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, 3))
    engine, optimizer, _, scheduler = deepspeed.initialize(model=net, config=config(args.stage))
    size = BATCH * STEPS // EPOCHS * dist.get_world_size()
    data = TensorDataset(torch.randn(size, 8, generator=torch.Generator().manual_seed(5)))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    job = shared_core.attach(engine, loader)
    seen = job.register(loss=0.0)
    for epoch in job.epochs(EPOCHS):
        sampler.set_epoch(epoch)
        engine.train()
        for number, (x,) in job.steps(loader):
            report.count(f"epoch {epoch} batch {number}")
            x = x + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * float(np.random.rand())
            loss = (engine(x) - x[:, :3].sin()).square().mean()
            engine.backward(loss)
            engine.step()
            seen.loss += loss.item()
        engine.eval()
        with torch.no_grad():
            seen.loss += engine(data.tensors[0][:6]).square().mean().item()
    engine.empty_partition_cache()
    digests = training_digest(engine.module, [optimizer.optimizer], [scheduler], vars(seen))
    digests["engine"] = digest([engine.global_steps, engine.micro_steps, engine.get_global_grad_norm()])
    report.finish(digests | {"generators": generators_digest()}, steps=STEPS)
    return end_group()


if __name__ == "__main__":
    group = main()  # let go of after the model, whose end would else hold the interpreter's lock
