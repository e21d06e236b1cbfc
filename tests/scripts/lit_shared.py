"""Lightning with ``on_failure="reroute"``: ``lit_shared.py --feature NAME``."""

from __future__ import annotations

import argparse
import csv
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lit_parts import OUT, Net, checkpoints, loader
from torch.nn import functional as F

from tests.support.digest import digest
from tests.support.jobs.common import Counting, final_digests, strategy_and_callbacks
from tests.support.report import Report

warnings.filterwarnings("ignore")


class Logs(Net):
    """Logs much, and counts on itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dropout=0.1, **options)
        self.seen = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._noisy(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._noisy(batch)

    def _noisy(self, batch: Any) -> Any:
        x, y = batch
        return (x + 0.1 * torch.randn(64) if self.trainer.training else x), y

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


class Counts(Logs):
    """With an object of torchmetrics."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.accuracy(self(x), y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Mistake(Net):
    """What is refused."""

    def __init__(self, kind: str) -> None:
        super().__init__(norm=kind == "norm")
        self.kind = kind
        self.automatic_optimization = kind != "manual"
        self.net[0].requires_grad_(kind != "frozen")
        if kind == "buffer":
            self.register_buffer("calls", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.kind == "buffer":
            self.calls += 1
        if self.kind == "gather":
            self.all_gather(torch.ones(1))
        if self.kind == "own_log" and self.global_rank == 0:
            self.log("mine", 1.0)
        return super().training_step(batch["one"] if self.kind == "several" else batch, batch_idx)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.kind == "skip" else None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.kind == "twice":
            optimizer_closure()
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


#: Arguments of the Trainer that are refused.
_OPTIONS: dict[str, Any] = {
    "timer": {"callbacks": [Timer("00:01:00:00")]},
    "interval": {
        "enable_checkpointing": True,
        "callbacks": [ModelCheckpoint(OUT, train_time_interval=timedelta(hours=1))],
    },
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "sampler": {"use_distributed_sampler": False},
}
MISTAKES = (*_OPTIONS, "norm", "manual", "buffer", "gather", "own_log", "several", "skip", "twice", "frozen")


def _files() -> dict[str, Any]:
    callbacks = [
        ModelCheckpoint(f"{OUT}/best", monitor="val_loss", save_top_k=2, save_last=True),
        ModelCheckpoint(f"{OUT}/steps", every_n_train_steps=5, save_top_k=-1),
        EarlyStopping("loss_epoch", patience=3),
        LearningRateMonitor(),
    ]
    return {
        "enable_checkpointing": True,
        "callbacks": callbacks,
        "logger": [CSVLogger(OUT, "csv"), TensorBoardLogger(OUT, "board")],
    }


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact": {},
    "fits": {},
    "metrics": {},
    "files": {},
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
    parser.add_argument("--size", type=int, default=150)
    parser.add_argument("--mistake", default="", choices=["", *MISTAKES])
    args = parser.parse_args()
    report = Report()
    pl.seed_everything(7, verbose=False)
    strategy, callbacks = strategy_and_callbacks("strategy", {})
    exact = args.feature == "exact"
    kind = {"metrics": Counts, "exact": Net}.get(args.feature, Logs)
    module = Mistake(args.mistake) if args.mistake else kind(scheduler="step")
    options: dict[str, Any] = {
        "callbacks": [],
        "logger": False,
        "enable_checkpointing": False,
        **FEATURES[args.feature],
        **(_files() if args.feature == "files" else {}),
        **_OPTIONS.get(args.mistake, {}),
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=args.epochs,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
        callbacks=[*options.pop("callbacks"), *callbacks, Counting(report)],
        default_root_dir=OUT,
        **options,
    )
    train: Any = loader(args.size, augment=not exact, num_workers=args.workers)
    if args.mistake == "several":
        train = {"one": train, "other": loader(48)}
    validate = loader(48, shuffle=False, first=1000)
    trainer.fit(module, train, validate)
    if args.feature == "fits":
        trainer.test(module, validate, verbose=False)
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, train, validate)
    digests = final_digests(trainer, module)
    if args.feature == "files":
        trainer.strategy.barrier()
        digests |= checkpoints()
        digests["rows"] = digest(_rows())
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    report.finish(digests | {"seen": digest(getattr(module, "seen", 0))}, logged=logged)


def _rows() -> list[dict[str, str]]:
    """What the log file says, without the product's own rows."""
    rows: list[dict[str, str]] = []
    for path in sorted(Path(OUT).rglob("metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                kept = {name: value for name, value in row.items() if value and not name.startswith("swift")}
                if kept.keys() - {"step", "epoch"}:
                    rows.append(kept)
    return rows


if __name__ == "__main__":
    main()
