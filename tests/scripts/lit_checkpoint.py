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
from tests.support.digest import digest
from tests.support.jobs.common import Counting, final_digests, without_ours
from tests.support.report import Report

warnings.filterwarnings("ignore")


class Stop(pl.Callback):
    """Rank 0 stands still at a batch."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        stand_still(trainer.global_step)


def slow_files() -> Any:
    """In the first start, the files of the best models take five seconds more, on the thread that writes them."""
    import lightning_swift

    class Slow(lightning_swift.SwiftCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
            if "/best/" in str(path) and "STOP_AT" in os.environ:
                self.wait()
                plain = storage.operation
                waits = iter([5.0])
                storage.operation = lambda: (threading.Event().wait(next(waits, 0.0)), plain())[1]
            super().save_checkpoint(checkpoint, path, storage_options)

    return Slow


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
    parser.add_argument("--best", type=int, default=1, help="models that are kept")
    args = parser.parse_args()
    report = Report()
    pl.seed_everything(7, verbose=False)
    callbacks: list[pl.Callback] = [
        ModelCheckpoint(f"{args.files}/models", save_top_k=-1, every_n_train_steps=5, save_last=True),
        ModelCheckpoint(f"{args.files}/best", "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=args.best),
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
        if args.durable:
            kind = slow_files() if args.durable == "slow" else lightning_swift.SwiftCheckpointIO
            plugins.append(kind(asynchronous=True))
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
