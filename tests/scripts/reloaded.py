"""Lightning whose data module counts how often it is asked for a loader, and gives another one each time."""

from __future__ import annotations

import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.digest import digest, training_digest
from tests.support.report import Report


class Source(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.sizes: list[int] = []

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        self.asked += 1
        self.sizes.append(16 + 8 * (self.asked % 3))
        data = torch.randn(24, 4, generator=torch.Generator().manual_seed(self.asked))
        return DataLoader(TensorDataset(data[: self.sizes[-1]]), 4, shuffle=True)


class Module(pl.LightningModule):
    def __init__(self, report: Report) -> None:
        super().__init__()
        self.net, self.report = nn.Linear(4, 1), report

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        self.report.count("batch")
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    strategy = "ddp"
    if not os.environ.get("SWIFT_BASELINE"):
        import lightning_swift  # noqa: F401

        strategy = "swift_ddp"
    pl.seed_everything(3, verbose=False)
    report = Report()
    source, module = Source(), Module(report)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=4,
        reload_dataloaders_every_n_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=source)
    found = {"asked": digest([source.asked, source.sizes])}
    report.finish(training_digest(module, trainer.optimizers, metrics=found), found=repr(source.sizes))


if __name__ == "__main__":
    main()
