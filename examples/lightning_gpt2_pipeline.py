"""A small GPT-2 over the text of the Python standard library, as a pipeline of stages that may be killed at any time.

    swiftrun --nproc-per-node 4 examples/lightning_gpt2_pipeline.py

Four workers are two pipelines of two stages. Kill one (the process numbers are printed): the result does not change.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning.pytorch as pl
import torch
from gpt2_layers import fingerprint, gpt2_layers, loss, windows
from torch.utils.data import DataLoader

from lightning_swift import SwiftPipelineStrategy


class PipelineGPT2(pl.LightningModule):
    """What Lightning is given: the layers, and the loss of the last one's output."""

    def __init__(self, blocks: int, steps: int) -> None:
        super().__init__()
        self.blocks, self.steps = blocks, steps

    def pipeline_layers(self) -> list[Any]:
        return gpt2_layers(self.blocks)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(outputs, targets)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)  # the parameters of this rank's stage
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=int(os.environ.get("WORLD_SIZE", 4)))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    pl.seed_everything(1234, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.workers,
        strategy=SwiftPipelineStrategy(stages=options.stages, micro_batches=options.micro_batches),
        max_steps=options.steps,
        val_check_interval=options.steps // 2,
        limit_val_batches=4,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    print(f"rank {trainer.global_rank} is process {os.getpid()}", flush=True)
    rows = 2 * options.micro_batches  # of a step of one pipeline
    pipelines = options.workers // options.stages
    count = options.steps * rows * pipelines
    model = PipelineGPT2(options.blocks, options.steps)
    trainer.fit(
        model,
        DataLoader(windows(count), batch_size=rows, shuffle=True),
        DataLoader(windows(4 * rows * pipelines, skip=count + 1), batch_size=rows),
    )
    print(f"rank {trainer.global_rank}: {fingerprint(model)[:16]}", flush=True)
    if trainer.is_global_zero:
        print(f"validation loss {float(trainer.callback_metrics['val_loss']):.9f}", flush=True)


if __name__ == "__main__":
    main()
