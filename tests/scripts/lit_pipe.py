"""A DeepSpeed pipeline under Lightning, or, with ``--by-hand``, DeepSpeed's own engine on the same data.

A reference run has the same strategy, outside ``swiftrun``: then its engine is DeepSpeed's.
"""

from __future__ import annotations

import argparse
import csv
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from standstill import stand_still
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import shared_core
from lightning_swift import SwiftCheckpoint, SwiftPipelineStrategy
from shared_core.worker.recovery.survivor_groups import WaitFor
from tests.support.digest import digest, training_digest
from tests.support.jobs.common import Counting, final_digests, without_folder, without_ours
from tests.support.report import Report

warnings.filterwarnings("ignore")
#: Where the run leaves its files; two starts of one run may share a folder.
OUT = Path(os.environ.get("SWIFT_TEST_FILES") or os.environ["SWIFT_TEST_OUT"])
WIDTH, BATCH, MICRO_BATCHES, STAGES = 16, 8, 4, 2


class Waves(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of noise, and their sines."""

    def __init__(self, size: int, seed: int) -> None:
        self.x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.x[index].sin()


class Block(nn.Module):
    """A layer with dropout."""

    dropout = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(self.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.drop(self.linear(x)))


class Layers(pl.LightningModule):
    """Blocks between two tied layers."""

    changes = False

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[str] = []

    def pipeline_layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        def tied() -> Any:
            return TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH)

        return [tied(), *(LayerSpec(Block) for _ in range(3)), torch.tanh, tied()]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, targets)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = sum(p.grad.square().sum() for p in self.parameters() if p.grad is not None)
        self.hooks.append(digest(norm))
        for p in self.parameters() if self.changes else ():
            p.grad *= 0.5

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Losses(pl.Callback):
    """Keeps the loss of each step, and sees it on every rank.

    Args:
        waits: before an epoch's last step, stand still until those who are away wait to be admitted.
    """

    def __init__(self, waits: bool = False) -> None:
        self.losses: list[float] = []
        self.waits = waits

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        stand_still(trainer.global_step)
        job = shared_core.current_job()
        if self.waits and trainer.is_last_batch and job is not None and job.survivor_groups.absent:
            job.survivor_groups.joining_ranks(wait=WaitFor.FOR_ALL)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not outputs["loss"].isnan():
            assert torch.allclose(
                outputs["loss"].float() * trainer.accumulate_grad_batches,
                trainer.callback_metrics["train_loss"].float(),
                rtol=1e-6,
            )
        self.losses.append(float(outputs["loss"]))


class Stepping(Layers):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...


class Lossless(Layers):
    loss = None  # type: ignore[assignment]


class ExternalMutation(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


#: What is refused: arguments of the Trainer, of the strategy, and the module.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Layers]]] = {
    "training_step": ({}, {}, Stepping),
    "loss": ({}, {}, Lossless),
    "outside": ({}, {}, ExternalMutation),
    "value": ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, {}, Layers),
    "clip": ({"gradient_clip_val": 0.5}, {"config": {"gradient_clipping": 1.0}}, Layers),
    "accumulate": ({"accumulate_grad_batches": 3}, {"micro_batches": 4}, Layers),
    "precision": ({"precision": "16-true"}, {}, Layers),
    "bf16": ({}, {"config": {"bf16": {"enabled": True}}}, Layers),
    "zero": ({}, {"config": {"zero_optimization": {"stage": 2}}}, Layers),
    "optimizer": ({}, {"config": {"optimizer": {"type": "Adam"}}}, Layers),
    "rows": ({}, {"micro_batches": 3}, Layers),
    "stages": ({}, {"stages": 3}, Layers),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--no-validation", action="store_true")
    parser.add_argument("--resume", action="store_true", help="fit again, from the checkpoint of the first epoch")
    parser.add_argument("--test", action="store_true", help="validate before and test after the fit")
    parser.add_argument("--calls", action="store_true", help="validate, fit, test, and fit on")
    parser.add_argument("--precision")
    parser.add_argument("--zero", action="store_true", help="ZeRO stage 1")
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--change-gradients", action="store_true", help="in a hook")
    parser.add_argument("--reroute", action="store_true", help="said by the script alone")
    parser.add_argument("--wait", action="store_true", help="for replacements, before an epoch's last step")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--refuse", choices=sorted(REFUSED))
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--checkpoints")
    args = parser.parse_args()
    Layers.changes = args.change_gradients
    Block.dropout = 0.0 if args.no_dropout else 0.1
    report = Report()
    pl.seed_everything(7, verbose=False)
    if args.by_hand:
        by_hand(report, args)
        return
    if args.refuse:
        trainer_options, strategy_options, kind = REFUSED[args.refuse]
        refused = fitting(report, args, SwiftPipelineStrategy(**strategy_options), **trainer_options)
        refused.fit(kind(), loader(48, 1))
        return
    config: dict[str, Any] = {}
    if args.zero:
        config["zero_optimization"] = {"stage": 1, "reduce_bucket_size": 1 << 20}
    pieces = None if args.accumulate > 1 else MICRO_BATCHES
    options = {"on_failure": "reroute"} if args.reroute else {}
    one = SwiftPipelineStrategy(stages=STAGES, micro_batches=pieces, config=config, options=options)
    module, losses = Layers(), Losses(args.wait)
    ours = [SwiftCheckpoint(args.checkpoints, every_n_steps=4)] if args.checkpoints else []
    trainer = fitting(report, args, one, losses, *ours)
    extra: dict[str, Any] = {}
    val = loader(20, 2, shuffle=False)
    told: list[str] = []

    def tell(call: str) -> None:
        """What rank 0 says between two calls."""
        told.append(trainer.strategy.broadcast(f"{call}: {trainer.callback_metrics} of rank {trainer.global_rank}"))

    if args.test or args.calls:
        extra["validated"] = trainer.validate(module, val, verbose=False)
        tell("validated")
    trainer.fit(module, loader(args.rows, 1), val)
    if args.test or args.calls:
        tell("fitted")
        extra["tested"] = trainer.test(module, val, verbose=False)
    if args.calls:
        tell("tested")
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader(48, 1), val)
    if args.resume:
        trainer = fitting(report, args, SwiftPipelineStrategy(stages=STAGES, micro_batches=pieces, config=config))
        module = Layers()
        trainer.fit(module, loader(48, 1), val, ckpt_path=str(OUT / "epoch=0.ckpt"))
    digests = final_digests(trainer, module) | {"hooks": digest(module.hooks), "checkpoints": checkpoints()}
    digests["told"] = digest(told)
    digests["trained"] = digest([p for o in trainer.optimizers for group in o.param_groups for p in group["params"]])
    if trainer.is_global_zero:
        digests["rows"] = rows()
    same = training_digest(module, trainer.optimizers)
    extra["dtypes"] = sorted({str(p.dtype) for p in module.parameters()})
    report.finish(digests, losses=losses.losses, same=[same["parameters"], same["optimizers"]], **extra)


def fitting(
    report: Report, args: argparse.Namespace, strategy: Any, *callbacks: pl.Callback, **options: Any
) -> pl.Trainer:
    """A trainer."""
    given: dict[str, Any] = {
        "gradient_clip_val": args.clip,
        "accumulate_grad_batches": args.accumulate,
        "precision": args.precision,
    }
    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=args.epochs,
        logger=CSVLogger(OUT, name="", version="logs", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(OUT),
        limit_val_batches=0 if args.no_validation else None,
        callbacks=[*callbacks, ModelCheckpoint(OUT, "{epoch}", save_top_k=-1, save_last=True), Counting(report)],
        **given | options,
    )


def loader(size: int, seed: int, shuffle: bool = True) -> DataLoader[Any]:
    """A loader of waves."""
    return DataLoader(Waves(size, seed), batch_size=BATCH, shuffle=shuffle)


def rows() -> str:
    """Digest of what the logger has written, without our own scalars."""
    with (OUT / "logs" / "metrics.csv").open() as file:
        found = [{k: v for k, v in without_ours(row).items() if v} for row in csv.DictReader(file)]
    return digest([dict(sorted(row.items())) for row in found if set(row) - {"step"}])


def checkpoints() -> str:
    """Digest of all checkpoints of the run."""
    found: dict[str, Any] = {}
    for path in sorted(OUT.glob("*.ckpt/*.ckpt")):
        saved = torch.load(path, weights_only=False)
        parts = {k: saved[k] for k in ("state_dict", "optimizer_states", "lr_schedulers", "global_step") if k in saved}
        parts["callbacks"] = without_ours({k: v for k, v in saved.get("callbacks", {}).items() if "Losses" not in k})
        found[str(path.relative_to(OUT))] = without_folder(parts)
    return digest(found)


def by_hand(report: Report, args: argparse.Namespace) -> None:
    """The same training in a loop over DeepSpeed's own engine."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, and not used
    deepspeed.init_distributed(dist_backend="gloo")
    rank, pipelines = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // STAGES
    module = Layers()
    stage = deepspeed.PipelineModule(
        module.pipeline_layers(), num_stages=STAGES, loss_fn=module.loss, partition_method="parameters"
    )
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": args.clip,
        "steps_per_print": None,
    }
    engine, *_ = deepspeed.initialize(model=stage, optimizer=optimizer, config=config)
    data = Waves(48, 1)
    sampler = DistributedSampler(data, num_replicas=pipelines, rank=rank % pipelines, shuffle=True, seed=7)
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=BATCH, sampler=sampler):
            pairs = zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)
            losses.append(float(engine.train_batch(iter(pairs))))
            scheduler.step()
    module.add_module("pipeline_stage", stage)
    same = training_digest(module, [optimizer])
    report.finish({}, losses=losses, same=[same["parameters"], same["optimizers"]])


if __name__ == "__main__":
    main()
