"""Rank 1 makes its batches in other epochs than rank 0, under a framework; as many in all."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FRAMEWORK = sys.argv[1]


def limit(rank: int, epoch: int) -> int:
    return ((3, 5), (4, 4))[rank][epoch]


def in_lightning() -> None:
    import lightning.pytorch as pl

    import lightning_swift  # noqa: F401 (has the strategy)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def on_train_batch_start(self, _: Any, number: int) -> int | None:
            return -1 if number == limit(self.trainer.global_rank, self.trainer.current_epoch) else None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    pl.Trainer(
        accelerator="cpu", devices=2, strategy="swift_ddp", logger=False, enable_checkpointing=False, max_epochs=2,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=2))  # fmt: skip


def in_a_loop() -> None:
    net = nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01)
    loader: Any = DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=2)
    if FRAMEWORK == "fabric":
        from lightning.fabric import Fabric

        import lightning_swift

        fabric = Fabric(accelerator="cpu", devices=2, strategy="swift_ddp")
        fabric.launch()
        model, optimizer = fabric.setup(net, optimizer)
        loader = fabric.setup_dataloaders(loader)
        job: Any = lightning_swift.attach(model, optimizer)
        rank, backward = fabric.global_rank, fabric.backward
    else:
        from accelerate import Accelerator

        from accelerate_swift import SwiftPlugin

        job = SwiftPlugin()
        accelerator = Accelerator(cpu=True, kwargs_handlers=[job])
        model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        rank, backward = accelerator.process_index, accelerator.backward
    for epoch in job.epochs(2):
        for number, (x,) in job.steps(loader):
            optimizer.zero_grad()
            backward(model(x).square().mean())
            optimizer.step()
            if number + 1 == limit(rank, epoch):
                break


if __name__ == "__main__":
    in_lightning() if FRAMEWORK == "lightning" else in_a_loop()
