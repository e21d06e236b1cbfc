"""A DeepSpeed pipeline in a plain loop that knows nothing of recoveries."""

from __future__ import annotations

import argparse
import logging
import os
import random
import threading
import time
from collections.abc import Iterator

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import damage
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests.support.digest import digest, training_digest
from tests.support.report import Report, generators_digest

WIDTH = 32


class Block(nn.Module):
    """Counts its forward passes, by step of the script."""

    report: Report
    step = 0
    takes_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.report.count(f"batch {Block.step}")
        time.sleep(Block.takes_s)
        return torch.relu(self.drop(self.linear(x)))


class Head(nn.Linear):
    """A layer that is tied: first and last of the model."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.report.count(f"batch {Block.step}")
        return super().forward(x)


def micro_batches(
    seed: int, rows: int, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Data with a generator of its own, and noise from the global one."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(rows, WIDTH, generator=generator) + 0.01 * torch.randn(rows, WIDTH)
        yield x.to(dtype), x.sin().to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--stages", type=int, default=2, help="0: as many as there are workers")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--checkpointing", type=int, default=0)
    parser.add_argument("--evaluate", type=int, nargs="?", const=2, default=0, help="after every second, or n-th, step")
    parser.add_argument("--schedule", action="store_true", help="a learning-rate schedule of DeepSpeed's")
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument(
        "--slow", type=float, default=0.0, help="seconds a replacement's script takes before its first batch"
    )
    parser.add_argument(
        "--uneven", type=float, default=0.0, help="seconds of a forward pass at the first or, by turns, the third rank"
    )
    parser.add_argument("--damage", nargs=3, action="append", default=[], metavar=("RANK", "STEP", "KIND"))
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help="DeepSpeed's torch_autocast, to this type")
    parser.add_argument("--zero", type=int, default=0, help="stage")
    parser.add_argument("--grow", action="store_true", help="twice the batch, from the third on")
    args = parser.parse_args()
    args.stages = args.stages or int(os.environ["WORLD_SIZE"])
    report = Block.report = Report()
    baseline = bool(os.environ.get("SWIFT_BASELINE"))
    from shared_core.pipeline import import_deepspeed, initialize, install

    deepspeed = import_deepspeed()
    if not baseline:
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
        "train_batch_size": args.rows * 4 * (dist.get_world_size() // args.stages),
        "train_micro_batch_size_per_gpu": args.rows,
        "gradient_clipping": args.clip,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": None,
    }
    if args.schedule:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    if args.bf16:
        config["bf16"] = {"enabled": True}
    if args.autocast:
        config["torch_autocast"] = {"enabled": True, "dtype": args.autocast}
    if args.zero:
        config["zero_optimization"] = {"stage": args.zero, "reduce_bucket_size": 1 << 20}
    make = deepspeed.initialize if baseline else initialize
    engine, *_ = make(model=net, config=config)
    torch.manual_seed(dist.get_rank())
    np.random.seed(0)
    random.seed(0)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    data = micro_batches(engine.grid.get_data_parallel_rank(), args.rows, dtype)
    if int(os.environ.get("SWIFT_RECOVERY_INCARNATION", "0")):
        time.sleep(args.slow)
    losses = []
    for step in range(args.steps):
        if step == 3:  # the script itself draws a random number
            data = micro_batches(int(torch.randint(1000, (1,))), args.rows, dtype)
        if os.environ.get("HOLD_AT") == str(step):
            threading.Event().wait()  # to be killed
        if args.grow and step == 2:
            engine.set_train_batch_size(2 * engine.train_batch_size())
        Block.step = step
        Block.takes_s = args.uneven if dist.get_rank() == (step + 1) // 4 % 2 * 2 else 0.0
        for rank, at, kind in args.damage:
            if (int(rank), int(at)) == (dist.get_rank(), step):
                damage.do(kind)
        losses.append(float(engine.train_batch(data)))
        if args.evaluate and (step + 1) % args.evaluate == 0:
            losses.append(float(engine.eval_batch(data)))
    sharded = args.bf16 or args.zero
    optimizer = engine.optimizer.optimizer if sharded else engine.optimizer  # DeepSpeed's own wraps torch's
    digests = training_digest(net, [optimizer], [], {"losses": losses})
    if sharded:
        digests["masters"] = digest([p.detach() for group in optimizer.param_groups for p in group["params"]])
    report.finish({**digests, "generators": generators_digest(), "losses": digest(torch.tensor(losses))}, losses=losses)


if __name__ == "__main__":
    main()
