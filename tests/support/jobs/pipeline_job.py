"""The pipeline of the soak test: DeepSpeed's engine with tied layers or none, clipping, a schedule and evaluation."""

from __future__ import annotations

import argparse
import logging
import os
import random
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.copies import Copies
from tests.support.digest import training_digest
from tests.support.report import Report, generators_digest
from tests.support.runner import BASELINE

WIDTH, ROWS, MICRO_BATCHES = 24, 4, 4
#: Batches trained; an evaluation follows each third one.
STEPS = 11


class Layer(nn.Linear):
    """Counts its forward passes, by call of the script."""

    report: Report
    call, work_s = 0, 0.0

    def __init__(self, drop: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Layer.report.count(f"call {Layer.call}")
        time.sleep(Layer.work_s)
        return nn.functional.dropout(super().forward(x), self.drop, self.training).relu()


def micro_batches(seed: int, noise: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Data with a generator of its own, and noise from the global one."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(ROWS, WIDTH, generator=generator)
        if noise:
            x = x + noise * torch.randn(ROWS, WIDTH)
        yield x, x.sin()


def shared_data(engine: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Data that any worker can read; an epoch ends within a step."""
    from shared_core.pipeline import SharedData

    pipelines = engine.grid.data_parallel_size
    x = torch.randn(10 * ROWS * pipelines, WIDTH, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(x, x.sin())
    sampler: DistributedSampler[Any] = DistributedSampler(rows, pipelines, engine.grid.get_data_parallel_rank())
    return SharedData(DataLoader(rows, ROWS, sampler=sampler), engine)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--rerouted", action="store_true", help="nothing is drawn from generators of the rank's own")
    parser.add_argument("--untied", action="store_true", help="all layers are those of one stage")
    parser.add_argument("--work-ms", type=float, default=0.0, help="what a forward of a layer takes at least")
    parser.add_argument("--shared", action="store_true", help="data that any worker can read")
    parser.add_argument("--copies", default="", help="see tests.support.copies")
    args = parser.parse_args()
    copies, Layer.work_s = Copies(args.copies), args.work_ms / 1000
    report = Layer.report = Report()
    if not os.environ.get(BASELINE):
        import shared_core

        shared_core.install()
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    from shared_core.pipeline import initialize

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It is compiled when it is first used: a worker killed then leaves a lock that all later ones wait for.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(5)
    ends = LayerSpec(Layer, 0.0) if args.untied else TiedLayerSpec("ends", Layer, 0.0)
    net = PipelineModule(
        [ends, *(LayerSpec(Layer, 0.0 if args.rerouted else 0.1) for _ in range(4)), ends],
        num_stages=args.stages,
        loss_fn=nn.MSELoss(),
        partition_method="uniform",
        activation_checkpoint_interval=0 if args.untied else 1,
    )
    config = {
        "train_batch_size": ROWS * MICRO_BATCHES * (dist.get_world_size() // args.stages),
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "steps_per_print": None,
    }
    make = deepspeed.initialize if os.environ.get(BASELINE) else initialize
    engine, *_ = make(model=net, config=config)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(dist.get_rank())
    data = micro_batches(engine.grid.get_data_parallel_rank(), 0.0 if args.rerouted else 0.01)
    data = shared_data(engine) if args.shared else data
    losses = []
    for step in range(STEPS):
        copies.wait(step)
        losses.append(float(engine.train_batch(data)))
        Layer.call += 1
        if step % 3 == 2:
            losses.append(float(engine.eval_batch(data)))
            Layer.call += 1
    parts = training_digest(net, [engine.optimizer], [engine.lr_scheduler], {"losses": losses})
    own = {} if args.rerouted else {"generators": generators_digest()}  # a replacement has those of its peer
    report.finish(parts | own, losses=losses)


if __name__ == "__main__":
    main()
