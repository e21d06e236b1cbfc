"""The job of the soak test: a perceptron, a GAN trained by hand, or one with BatchNorm, dropout and augmentation.

Fourteen steps in two epochs on four ranks, a validation after every third batch of an epoch, several gradient buckets.
"""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.support.jobs.clusters import Clusters
from tests.support.jobs.common import Counting, final_digests, strategy_and_callbacks
from tests.support.report import OUT, Report

BATCH = 8
BATCHES = 7
EPOCHS = 2


class Classifier(pl.LightningModule):
    """A perceptron; ``full`` adds BatchNorm and dropout."""

    def __init__(self, full: bool) -> None:
        super().__init__()
        more: list[nn.Module] = [nn.BatchNorm1d(32), nn.Dropout(0.2)] if full else []
        self.net = nn.Sequential(nn.Linear(64, 32), *more, nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=EPOCHS * BATCHES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Gan(pl.LightningModule):
    """Two optimizers by hand; the critic's half of a batch uses points made before the generator's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
        self.critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        optimizers: Any = self.optimizers()
        opt_g, opt_c = optimizers
        made = self.generator(torch.randn(len(real), 8))
        stale = made.detach().clone()
        self.toggle_optimizer(opt_g)
        loss_g = F.softplus(-self.critic(made)).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_c)
        loss_c = F.softplus(self.critic(stale)).mean() + F.softplus(-self.critic(real)).mean()
        opt_c.zero_grad()
        self.manual_backward(loss_c)
        self.clip_gradients(opt_c, 0.5, "norm")
        opt_c.step()
        self.untoggle_optimizer(opt_c)
        self.log_dict({"loss_g": loss_g, "loss_c": loss_c}, on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_score", self.critic(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        return [opt_g, torch.optim.RMSprop(self.critic.parameters(), lr=1e-3)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["mlp", "gan", "bn"], required=True)
    parser.add_argument("--how", default="strategy", choices=["strategy", "callback", "env"])
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    world = int(os.environ["WORLD_SIZE"])
    report = Report()
    pl.seed_everything(11, verbose=False)
    gan = args.model == "gan"
    module = Gan() if gan else Classifier(full=args.model == "bn")
    train = DataLoader(Clusters(BATCH * BATCHES * world, 1, augment=args.model == "bn"), batch_size=BATCH, shuffle=True)
    validation = DataLoader(Clusters(BATCH * world, 2), batch_size=BATCH)
    # Small buckets: several collectives in each backward.
    options: dict[str, Any] = {"bucket_cap_mb": 0.004, "find_unused_parameters": gan}
    strategy, callbacks = strategy_and_callbacks(args.how, options)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=EPOCHS,
        val_check_interval=3,
        gradient_clip_val=None if gan else 1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, Counting(report)],
        default_root_dir=os.environ[OUT],
    )
    trainer.fit(module, train, validation)
    report.finish(final_digests(trainer, module), steps=EPOCHS * BATCHES)


if __name__ == "__main__":
    main()
