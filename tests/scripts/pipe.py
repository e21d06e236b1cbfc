"""A DeepSpeed pipeline in a plain loop that knows nothing of recoveries."""

from __future__ import annotations

import argparse
import logging
import os
import random
from collections.abc import Iterator

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shared_core.testing.digest import digest, training_digest
from shared_core.testing.report import Report, generators_digest

WIDTH = 32


class Block(nn.Module):
    """Counts its forward passes, by step of the script."""

    report: Report
    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.report.count(f"batch {Block.step}")
        return torch.relu(self.drop(self.linear(x)))


class Head(nn.Linear):
    """A layer that is tied: first and last of the model."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


def micro_batches(seed: int, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Data with a generator of its own, and noise from the global one."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(rows, WIDTH, generator=generator) + 0.01 * torch.randn(rows, WIDTH)
        yield x, x.sin()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--checkpointing", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--schedule", action="store_true", help="a learning-rate schedule of DeepSpeed's")
    args = parser.parse_args()
    report = Block.report = Report()
    baseline = bool(os.environ.get("SWIFT_BASELINE"))
    import deepspeed

    if baseline:  # for inference only, and compiled for half a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        from shared_core.pipeline import install

        install()
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    layers = [LayerSpec(Block) for _ in range(4)]
    if args.tied:
        layers = [TiedLayerSpec("head", Head), *layers, TiedLayerSpec("head", Head)]
    net = PipelineModule(
        layers,
        num_stages=args.stages,
        loss_fn=nn.MSELoss(),
        partition_method="uniform",
        activation_checkpoint_interval=args.checkpointing,
    )
    config = {
        "train_batch_size": 4 * 4 * (dist.get_world_size() // args.stages),
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": args.clip,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": None,
    }
    if args.schedule:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    if baseline:
        engine, *_ = deepspeed.initialize(model=net, config=config)
    else:
        from shared_core.pipeline import initialize

        engine, *_ = initialize(model=net, config=config)
    torch.manual_seed(dist.get_rank())
    np.random.seed(0)
    random.seed(0)
    data = micro_batches(engine.grid.get_data_parallel_rank(), 4)
    losses = []
    for step in range(args.steps):
        if step == 3:
            data = micro_batches(int(torch.randint(1000, (1,))), 4)  # the script itself draws a random number
        Block.step = step
        losses.append(float(engine.train_batch(data)))
        if args.evaluate and step % 2:
            losses.append(float(engine.eval_batch(data)))
    digests = training_digest(net, [engine.optimizer], [], {"losses": losses})
    report.finish({**digests, "generators": generators_digest(), "losses": digest(torch.tensor(losses))}, losses=losses)


if __name__ == "__main__":
    main()
