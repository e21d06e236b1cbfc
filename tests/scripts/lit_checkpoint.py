"""A Lightning job with ``SwiftCheckpoint``, beside ``ModelCheckpoint`` and a logger; ``--stop`` waits to be killed."""

from __future__ import annotations

import argparse
import csv
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lit_parts import Net, loader
from standstill import noted, stand_still

from shared_core.checkpoint import storage
from shared_core.testing.digest import digest
from shared_core.testing.jobs.common import Counting, final_digests, without_ours
from shared_core.testing.report import Report

warnings.filterwarnings("ignore")


class Stop(pl.Callback):
    """Rank 0 stands still at a batch."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        stand_still(trainer.global_step)


def without(value: Any, folder: str) -> Any:
    """Plain data without the name of the run's folder."""
    if isinstance(value, dict):
        return {str(without(k, folder)): without(v, folder) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without(v, folder) for v in value]
    return value.replace(folder, "FILES") if isinstance(value, str) else value


def files(folder: str) -> dict[str, str]:
    """Digest of what is in each checkpoint file."""
    found = {}
    for path in sorted(Path(folder).rglob("*.ckpt")):
        saved = torch.load(path, weights_only=False)
        saved["callbacks"] = without_ours(saved["callbacks"])
        found[str(path.relative_to(folder))] = digest(without(saved, folder))
    return found


def rows(folder: str) -> list[dict[str, str]]:
    """Of the only log, without the product's own."""
    (log,) = Path(folder, "csv").glob("*/metrics.csv")
    with open(log, newline="") as file:
        every = [{k: v for k, v in row.items() if v and not k.startswith("swift")} for row in csv.DictReader(file)]
    return [row for row in every if row.keys() - {"step", "epoch"}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", required=True)
    parser.add_argument("--checkpoints")
    parser.add_argument("--every", type=int)
    parser.add_argument("--price", type=float, default=0.0)
    parser.add_argument("--durable", default="")
    args = parser.parse_args()
    report = Report()
    pl.seed_everything(7, verbose=False)
    callbacks: list[pl.Callback] = [
        ModelCheckpoint(f"{args.files}/models", save_top_k=-1, every_n_train_steps=5, save_last=True),
        ModelCheckpoint(f"{args.files}/best", "{epoch}-{val_loss:.3f}", monitor="val_loss"),
        Stop(),
        Counting(report),
    ]
    strategy, plugins = "ddp", []
    if not os.environ.get("SWIFT_BASELINE"):
        import lightning_swift

        strategy = "swift_ddp"
        if args.checkpoints:
            callbacks.append(
                lightning_swift.SwiftCheckpoint(args.checkpoints, every_n_steps=args.every, price=args.price)
            )
        if args.durable == "slow":
            operation = storage.operation
            storage.operation = lambda: (threading.Event().wait(0.1), operation())[1]
        if args.durable:
            plugins.append(lightning_swift.SwiftCheckpointIO(asynchronous=args.durable != "plain"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "2")),
        strategy=strategy,
        max_epochs=3,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
        callbacks=callbacks,
        plugins=plugins,
        logger=CSVLogger(args.files, "csv"),
        default_root_dir=args.files,
    )
    module = Net(norm=True, dropout=0.1, scheduler="step")
    trainer.fit(module, loader(320, augment=True), loader(48, shuffle=False, first=1000))
    digests = final_digests(trainer, module)
    del digests["callbacks"]  # they have paths; what is in the files is compared
    if trainer.is_global_zero:
        digests |= {"files": digest(files(args.files)), "rows": digest(rows(args.files))}
    extra: dict[str, Any] = {"noted": noted(getattr(trainer.strategy, "job", None))}
    if trainer.is_global_zero:
        extra |= {"files": files(args.files), "rows": rows(args.files)}
    report.finish(digests, **extra)


if __name__ == "__main__":
    main()
