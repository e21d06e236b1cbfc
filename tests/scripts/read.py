"""Trains on a loader of one kind, in plain PyTorch, under Lightning or Accelerate; notes each item that is read."""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from standstill import stand_still
from torch import nn

from tests.support.digest import training_digest
from tests.support.report import Report, generators_digest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "loaders"))
from kinds import KINDS, LOG

WIDTH = 4
#: Loaders that divide the data among the ranks themselves, or not at all.
OWN_ORDER = ("reading", "restless", "eager", "workers_eager")


class Net(nn.Module):
    """A perceptron on the first numbers of each row."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(dropout))
        self.last = nn.Linear(8, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        rows = sum(batch.values()) if isinstance(batch, dict) else batch
        rows = nn.functional.pad(rows.float(), (0, WIDTH))[..., :WIDTH].sin()
        return self.last(self.layers(rows)).square().mean()


def loaders_of(kind: str) -> Any:
    """One loader, or several by name."""
    if kind == "several":
        return {"first": KINDS["plain"](), "second": KINDS["lasting"]()}
    return KINDS[kind]()


def plain(kind: str, epochs: int, net: Net, report: Report) -> dict[str, str]:
    import shared_core

    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loaders = loaders_of(kind)
    torch.manual_seed(rank), np.random.seed(rank), random.seed(rank)
    job = shared_core.attach(model, optimizer)
    seen = job.register(loss=0.0)

    def batches() -> Iterator[Any]:
        if not isinstance(loaders, dict):
            yield from job.steps(loaders)
            return
        others = job.steps(loaders["second"])
        for index, batch in job.steps(loaders["first"]):
            yield index, {"first": batch, "second": next(others)[1]}

    for epoch in job.epochs(epochs):
        for index, batch in batches():
            report.count(f"epoch {epoch} batch {index}")
            stand_still(report.counts.total() - 1)
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.loss += loss.item()
    digests = training_digest(net, [optimizer], [], vars(seen)) | {"generators": generators_digest()}
    dist.barrier()
    return digests


def lightning(kind: str, epochs: int, net: Net, report: Report) -> dict[str, str]:
    import lightning.pytorch as pl

    from tests.support.jobs.common import Counting, final_digests, strategy_and_callbacks

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            stand_still(report.counts.total() - 1)
            return self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    pl.seed_everything(7, verbose=False)
    strategy, callbacks = strategy_and_callbacks("strategy", {})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=kind not in OWN_ORDER,
        callbacks=[*callbacks, Counting(report)],
    )
    module = Module()
    trainer.fit(module, loaders_of(kind))
    return final_digests(trainer, module)


def accelerate(kind: str, epochs: int, net: Net, report: Report) -> dict[str, str]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    baseline = bool(os.environ.get("SWIFT_BASELINE"))
    handlers = []
    if not baseline:
        from accelerate_swift import SwiftPlugin

        handlers.append(plugin := SwiftPlugin())
    own = kind.startswith("own_")
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=handlers,
        dataloader_config=DataLoaderConfiguration(
            even_batches="eager" not in kind, dispatch_batches=False if own else None
        ),
    )
    set_seed(7)
    loaders = loaders_of(kind.removeprefix("own_"))
    several = isinstance(loaders, dict)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, *prepared = accelerator.prepare(net, optimizer, *(loaders.values() if several else [loaders]))
    set_seed(7, device_specific=True)
    for epoch in range(epochs) if baseline else plugin.epochs(epochs):
        model.train()
        for index, batch in enumerate(zip(*prepared, strict=False) if several else prepared[0]):
            report.count(f"epoch {epoch} batch {index}")
            stand_still(report.counts.total() - 1)
            loss = model(dict(enumerate(batch)) if several else batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    inner = accelerator.unwrap_model(model)
    digests = training_digest(inner, [optimizer.optimizer], [], {}) | {"generators": generators_digest()}
    accelerator.end_training()
    return digests


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=["plain", "lightning", "accelerate"])
    parser.add_argument("kind")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--still", action="store_true", help="the model draws no random numbers")
    args = parser.parse_args()
    report = Report()
    who = report.who
    os.environ[LOG] = str(report.out / f"reads-{who['rank']}-{who['restart']}-{who['incarnation']}.txt")
    torch.manual_seed(3)
    net = Net(0.0 if args.still else 0.2)
    train = {"plain": plain, "lightning": lightning, "accelerate": accelerate}[args.framework]
    report.finish(train(args.kind, args.epochs, net, report))
    if args.framework == "plain":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
