"""A DeepSpeed pipeline in a plain loop, for ``on_failure="reroute"``: its data depend on the pipeline alone."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import nn

from shared_core.testing.digest import digest, training_digest
from shared_core.testing.report import Report

WIDTH, LAYERS = 32, 4


class Block(nn.Module):
    """Linear, with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.drop(self.linear(x))) + x


def micro_batches(pipeline: int, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(pipeline)
    while True:
        x = torch.randn(rows, WIDTH, generator=generator)
        yield x, x.sin()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--evaluate-after", type=int, default=0, help="steps; evaluation needs all workers")
    args = parser.parse_args()
    report = Report()
    baseline = bool(os.environ.get("SWIFT_BASELINE"))
    from shared_core.pipeline import import_deepspeed, initialize, install

    deepspeed = import_deepspeed()
    if not baseline:
        install()
    from deepspeed.pipe import LayerSpec, PipelineModule

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    layers = [LayerSpec(Block, args.dropout) for _ in range(max(LAYERS, args.stages))]
    net = PipelineModule(layers, num_stages=args.stages, loss_fn=nn.MSELoss(), partition_method="uniform")
    config = {
        "train_batch_size": args.rows * args.micro_batches * (dist.get_world_size() // args.stages),
        "train_micro_batch_size_per_gpu": args.rows,
        "gradient_clipping": args.clip,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": None,
    }
    engine, *_ = (deepspeed.initialize if baseline else initialize)(model=net, config=config)
    data = micro_batches(engine.grid.get_data_parallel_rank(), args.rows)
    losses = []
    for step in range(args.steps):
        losses.append(float(engine.train_batch(data)))
        if step + 1 == args.evaluate_after:
            losses.append(float(engine.eval_batch(data)))
    digests = training_digest(net, [engine.optimizer], [], {"losses": losses})
    report.finish({**digests, "losses": digest(torch.tensor(losses))}, losses=losses)


if __name__ == "__main__":
    main()
