"""A GAN whose batches leave gradients behind that the next batch adds to, or zeroes too late.

``generator``: the generator's step first; its backward adds to what the last batch has left in the discriminator, which
is zeroed in the discriminator's part. ``discriminator``: its step first, and nobody zeroes what the generator's
backward leaves there. ``never``: nobody zeroes anything. ``seldom``: as ``generator``, and each batch but the fifth
begins with gradients that are zeroed.
"""

from __future__ import annotations

import argparse
import os
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shared_core.worker.sharded.shard import LeftoverShards
from tests.support.digest import training_digest
from tests.support.report import Report, end_group, generators_digest

BASELINE = bool(os.environ.get("SWIFT_BASELINE"))


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    made = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    judged = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
    return made, judged


def data() -> TensorDataset:
    return TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(5)))


def batch(
    args: argparse.Namespace, net: list[nn.Module], opt: list[Any], real: torch.Tensor, backward: Any, number: int = 0
) -> None:
    """One batch; ``net`` and ``opt`` are those of the generator and of the discriminator."""
    made, judged = net
    opt_g, opt_d = opt
    fake = made(torch.randn(len(real), 4))

    if args.first == "seldom" and number != 4:
        opt_d.zero_grad()
        opt_g.zero_grad()

    def generator() -> None:
        if args.first in ("generator", "discriminator"):
            opt_g.zero_grad()
        backward(F.softplus(-judged(fake)).mean())
        opt_g.step()

    def discriminator() -> None:
        if args.first == "generator":
            opt_d.zero_grad()
        backward(F.softplus(judged(fake.detach())).mean() + F.softplus(-judged(real)).mean())
        nn.utils.clip_grad_norm_(judged.parameters(), 1.0)
        opt_d.step()

    for part in (discriminator, generator) if args.first == "discriminator" else (generator, discriminator):
        part()


def optimizers(made: nn.Module, judged: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(made.parameters(), lr=1e-2), torch.optim.RMSprop(judged.parameters(), lr=1e-3)]


def plain(args: argparse.Namespace, report: Report) -> Any:
    import shared_core

    if not BASELINE:
        shared_core.install()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    bare = nets()
    view = args.way == "view"
    if args.way == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        net = [fully_shard(each) for each in bare]
    else:
        net = [nn.parallel.DistributedDataParallel(n, gradient_as_bucket_view=view) for n in bare]
    opt = optimizers(*bare)
    loader = DataLoader(data(), batch_size=4, sampler=torch.utils.data.DistributedSampler(data(), shuffle=True))
    torch.manual_seed(rank)
    job = shared_core.attach(*net, *opt)
    for epoch in job.epochs(2):
        loader.sampler.set_epoch(epoch)
        for index, (real,) in job.steps(loader):
            report.count(f"epoch {epoch} batch {index}")
            batch(args, net, opt, real, lambda loss: loss.backward(), 6 * epoch + index)
    return bare, opt


def accelerated(args: argparse.Namespace, report: Report) -> Any:
    from accelerate import Accelerator

    handlers = []
    if not BASELINE:
        from accelerate_swift import SwiftPlugin

        handlers.append(SwiftPlugin())
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    bare = nets()
    prepared = accelerator.prepare(*bare, *optimizers(*bare), DataLoader(data(), batch_size=4, shuffle=True))
    *pair, loader = prepared
    torch.manual_seed(accelerator.process_index)
    for epoch in range(2) if BASELINE else handlers[0].epochs(2):
        for (real,) in loader:
            report.count(f"epoch {epoch} batch {real.sum().item():.6f}")
            batch(args, pair[:2], pair[2:], real, accelerator.backward)
    return bare, [each.optimizer for each in pair[2:]]


def lightning(args: argparse.Namespace, report: Report) -> Any:
    import lightning.pytorch as pl

    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.made, self.judged = nets()

        def training_step(self, given: Any, index: int) -> None:
            report.count(f"batch {self.global_step}")
            batch(args, [self.made, self.judged], list(self.optimizers()), given[0], self.manual_backward)  # type: ignore[arg-type]

        def configure_optimizers(self) -> Any:
            return optimizers(self.made, self.judged)

    from lightning.pytorch.strategies import DDPStrategy

    strategy: Any = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    if not BASELINE:
        from lightning_swift import SwiftDDPStrategy

        strategy = SwiftDDPStrategy(find_unused_parameters=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Gan()
    torch.manual_seed(7)
    trainer.fit(module, DataLoader(data(), batch_size=4, shuffle=True))
    return [module.made, module.judged], trainer.optimizers


WAYS = {"plain": plain, "view": plain, "fsdp2": plain, "accelerate": accelerated, "lightning": lightning}


def main() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("first", choices=["generator", "discriminator", "never", "seldom"])
    parser.add_argument("--without", choices=["left", "expect"], help="a control: what LeftoverShards does not do")
    args = parser.parse_args()
    if args.without:
        setattr(LeftoverShards, args.without, lambda *_: {})
    report = Report()
    bare, opt = WAYS[args.way](args, report)
    report.finish(training_digest(bare, opt, [], {}) | {"generators": generators_digest()})
    return end_group() if torch.distributed.is_initialized() else None


if __name__ == "__main__":
    group = main()  # let go of after the models
