"""Lightning with ``on_failure="reroute"``: ``lit_shared.py --feature NAME``."""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lit_parts import OUT, Net, loader
from torch.nn import functional as F

from shared_core.testing.digest import digest
from shared_core.testing.jobs.common import Counting, final_digests, strategy_and_callbacks
from shared_core.testing.report import Report

warnings.filterwarnings("ignore")


class Logs(Net):
    """Logs much, and counts on itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dropout=0.1, **options)
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.seen += len(x)
        out = self(x)
        loss = F.cross_entropy(out, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("synced", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", out.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("rows", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"gradient_clip_val": 0.1},
    "accumulate": {"accumulate_grad_batches": 3},
    "half_epochs": {"val_check_interval": 0.5},
    "bf16": {"precision": "bf16-mixed"},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--feature", default="plain", choices=sorted(FEATURES))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    report = Report()
    pl.seed_everything(7, verbose=False)
    strategy, callbacks = strategy_and_callbacks("strategy", {})
    module = Logs(scheduler="step")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=args.epochs,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        log_every_n_steps=2,
        callbacks=[*callbacks, Counting(report)],
        default_root_dir=OUT,
        **FEATURES[args.feature],
    )
    trainer.fit(module, loader(150, augment=True, num_workers=args.workers), loader(48, shuffle=False, first=1000))
    digests = final_digests(trainer, module)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    report.finish(digests | {"seen": digest(module.seen)}, logged=logged)


if __name__ == "__main__":
    main()
