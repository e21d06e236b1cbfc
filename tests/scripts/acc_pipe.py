"""A DeepSpeed pipeline in a loop of Accelerate's; ``--by-hand`` drives DeepSpeed's own engine on the same data."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from standstill import stand_still
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.support.digest import digest, training_digest
from tests.support.report import OUT, Report, generators_digest

WIDTH, MICRO_BATCHES, ROWS = 16, 4, 2


class Block(nn.Module):
    """Counts its forward passes, by step of the script."""

    report: Report
    step = ""
    dropout = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(self.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.report.count(Block.step)
        return torch.relu(self.drop(self.linear(x)))


class Head(nn.Linear):
    """A layer that is tied: first and last of the model."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Noisy(TensorDataset):
    """Noise in the inputs, drawn when an item is read."""

    def __getitem__(self, index: int):  # type: ignore[no-untyped-def]
        x, y = super().__getitem__(index)
        return x + 0.05 * torch.randn(WIDTH), y


def layers(tied: bool) -> list[object]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    blocks: list[object] = [LayerSpec(Block) for _ in range(4)]
    return [TiedLayerSpec("head", Head), *blocks, TiedLayerSpec("head", Head)] if tied else blocks


def data(count: int, noisy: bool) -> TensorDataset:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))
    return (Noisy if noisy else TensorDataset)(x, x.sin())


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def finish(report: Report, net: nn.Module, optimizer, scheduler, losses: list[float]) -> None:  # type: ignore[no-untyped-def]
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer  # in bf16 and with ZeRO, DeepSpeed wraps torch's
    digests = training_digest(net, [optimizer], [scheduler], {"losses": losses})
    digests["trained"] = digest([p for group in optimizer.param_groups for p in group["params"]])
    report.finish(
        {**digests, "generators": generators_digest(), "losses": digest(torch.tensor(losses))},
        losses=losses,
        dtypes=sorted({str(p.dtype) for p in net.parameters()}),
    )


def by_hand(args: argparse.Namespace, report: Report) -> None:
    """No part of this product, and none of Accelerate: batches are dealt out by index."""
    import deepspeed
    import torch.distributed as dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, and not used
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(5)
    net = deepspeed.pipe.PipelineModule(layers(args.tied), num_stages=args.stages, loss_fn=nn.MSELoss())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    pipelines = dist.get_world_size() // args.stages
    config = {
        "train_batch_size": ROWS * MICRO_BATCHES * pipelines,
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": args.clip,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    scheduler = schedule(optimizer)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    torch.manual_seed(5 + dist.get_rank())
    items, batch, losses = data(args.samples, noisy=False), ROWS * MICRO_BATCHES, []
    mine = [i for i in range(len(items)) if i // batch % pipelines == engine.grid.get_data_parallel_rank()]
    loader = DataLoader(Subset(items, mine), batch_size=ROWS)
    for _ in range(args.epochs):
        micro_batches = iter(loader)
        for _ in range(len(mine) // batch):
            losses.append(float(engine.train_batch(micro_batches)))
            for _ in range(pipelines):
                scheduler.step()
    finish(report, net, optimizer, scheduler, losses)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--start", type=int, default=0, help="the first epoch")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--plain-data", action="store_true", help="neither shuffled nor noisy")
    parser.add_argument("--shuffled", action="store_true", help="and not noisy")
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--gather", action="store_true", help="the loss, in each epoch's second batch")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--save", action="store_true", help="after each epoch")
    parser.add_argument("--resume", help="a checkpoint, written after the first epoch of another run")
    parser.add_argument("--precision", default="no")
    parser.add_argument("--zero", action="store_true", help="ZeRO stage 1")
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--checkpoints")
    args = parser.parse_args()
    report, out = Report(), Path(os.environ[OUT])
    Block.report = report
    Block.dropout = 0.0 if args.no_dropout else Block.dropout
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if args.by_hand:
        by_hand(args, report)
        return
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    from accelerate_swift import SwiftDeepSpeedPipelinePlugin, SwiftPlugin

    swift = None
    if args.checkpoints:
        swift = SwiftPlugin(checkpoint={"dir": args.checkpoints, "every_steps": 4, "resume": "always"})
    plugin = SwiftDeepSpeedPipelinePlugin(
        args.stages, MICRO_BATCHES, swift=swift, gradient_clipping=args.clip, zero_stage=int(args.zero)
    )
    if args.zero:
        plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = 1 << 20
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision=args.precision)
    torch.manual_seed(5)
    net = plugin.pipeline_module(layers(args.tied), nn.MSELoss())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    noisy, batch = not (args.plain_data or args.shuffled), ROWS * MICRO_BATCHES
    train = DataLoader(data(args.samples, noisy), batch_size=batch, shuffle=not args.plain_data)
    held_out = DataLoader(data(2 * batch, False), batch_size=batch // 2)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(
        net, optimizer, train, held_out, schedule(optimizer)
    )
    set_seed(5, device_specific=True)
    if args.resume:
        accelerator.load_state(args.resume)
    seen = plugin.register(losses=[])
    for epoch in plugin.epochs(args.epochs, start=1 if args.resume else args.start):
        model.train()
        for step, (inputs, targets) in enumerate(train):
            stand_still(epoch * len(train) + step)
            Block.step = f"epoch {epoch} batch {float(targets.sum()):.6f}"
            loss = model((inputs, targets))
            accelerator.backward(loss)
            if args.clip:
                seen.losses.append(float(accelerator.clip_grad_norm_(model.parameters(), args.clip)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen.losses.append(loss.item())
            if args.gather and step == 1:
                seen.losses.append(float(accelerator.gather(loss + accelerator.process_index).sum()))
            assert step < 100
        if args.evaluate:
            model.eval()
            for inputs, targets in held_out:
                Block.step = f"epoch {epoch} evaluation"
                with torch.no_grad():
                    seen.losses.append(model((inputs, targets)).item())
        if args.save:
            accelerator.save_state(str(out / f"epoch{epoch}"))
    accelerator.wait_for_everyone()
    inner = accelerator.unwrap_model(model)
    assert inner is net
    finish(report, inner, optimizer.optimizer, scheduler.scheduler, list(seen.losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
