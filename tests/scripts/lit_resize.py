"""Lightning's ``Trainer`` while the number of workers changes; see ``resize.py``."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from resize import FIRST, SAMPLES, Net, Numbered
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lightning_swift  # noqa: F401
from tests.support.digest import training_digest
from tests.support.report import Report


class Module(pl.LightningModule):
    """Counts the uses of each sample."""

    def __init__(self, epochs: int, until: int) -> None:
        super().__init__()
        self.model = Net()
        self.mean = MeanMetric()
        self.epochs, self.until = epochs, until
        self.losses: list[float] = []
        self.exact: list[bool] = []
        self.worlds: list[int] = []
        self.validations = 0
        self.batches = 0

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        FIRST.batch(self.trainer.global_step, self.model)
        indices, x = batch
        guess, uses = self.model(indices, x)
        loss = (guess - x.sin().sum(1)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(x))
        self.mean.update(loss.detach())
        self.batches += 1
        return loss - self.trainer.world_size * uses.sum()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        guess, _ = self.model(*batch)
        self.log("val", (guess - batch[1].sin().sum(1)).square().mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations += 1

    def on_train_epoch_end(self) -> None:
        self.losses.append(float(self.mean.compute()))
        self.mean.reset()
        self.exact.append(bool((self.model.uses.detach() == self.current_epoch + 1).all()))
        self.worlds.append(self.trainer.world_size)
        if self.current_epoch + 1 >= self.epochs and (not self.until or self.trainer.world_size == self.until):
            self.trainer.should_stop = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": self.model.net.parameters()}, {"params": [self.model.uses], "lr": 1.0}], 0.02
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--until", type=int, default=0)
    parser.add_argument("--devices", type=int, default=int(os.environ["WORLD_SIZE"]))
    parser.add_argument("--failed-after", type=int, default=-1, help="a rank that fails when the fit is over")
    args = parser.parse_args()
    report = Report()
    pl.seed_everything(3)
    module = Module(args.epochs, args.until)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="swift_ddp",
        max_epochs=200,
        logger=CSVLogger(str(report.out), name="logs"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(report.out),
    )
    data = Numbered()
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=SAMPLES // 4))
    if args.failed_after >= 0:
        dist.barrier()  # all have finished the call
    if args.failed_after == dist.get_rank() and report.who["incarnation"] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # nobody says goodbye before
    seen = {name: getattr(module, name) for name in ("losses", "exact", "worlds", "validations", "batches")}
    rows = Path(report.out, "logs", "version_0", "metrics.csv")
    report.finish(
        training_digest(module.model, trainer.optimizers, [], {}),
        **seen,
        steps=trainer.global_step,
        first=FIRST.parameters,
        rows=rows.read_text() if dist.get_rank() == 0 else "",
    )


if __name__ == "__main__":
    main()
