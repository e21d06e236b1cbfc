"""A small GPT-2 over the text of the Python standard library, as a pipeline of stages that may be killed at any time.

    swiftrun --nproc-per-node 4 examples/lightning_gpt2_pipeline.py

Four workers are two pipelines of two stages. Kill one (the process numbers are printed): the result does not change.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import lightning_swift  # noqa: F401  makes the strategy's name known
from lightning_swift import SwiftPipelineStrategy

CONTEXT, WIDTH = 64, 64
#: Dropout is 0.1 everywhere, as in GPT-2.
CONFIG = GPT2Config(
    vocab_size=256,
    n_positions=CONTEXT,
    n_embd=WIDTH,
    n_head=4,
    bos_token_id=0,
    eos_token_id=0,
    attn_implementation="sdpa",
)


class Characters(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a text and the same windows one character on: two tensors of ``CONTEXT`` integers below 256."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * CONTEXT
        return self.text[start : start + CONTEXT], self.text[start + 1 : start + CONTEXT + 1]


class Embedding(nn.Embedding):
    """The table of characters: first layer of the model, and, tied, its last one."""

    def __init__(self) -> None:
        super().__init__(CONFIG.vocab_size, WIDTH)
        nn.init.normal_(self.weight, std=0.02)


class Positions(nn.Module):
    """Adds the places of the characters. (rows, CONTEXT, WIDTH) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop = nn.Parameter(0.01 * torch.randn(CONTEXT, WIDTH)), nn.Dropout(CONFIG.embd_pdrop)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drop(hidden + self.table)  # type: ignore[no-any-return]


class Block(GPT2Block):
    """A block that returns its hidden state only."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: Any = super().forward(hidden)
        return found[0] if isinstance(found, tuple) else found


def scores(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    """(rows, CONTEXT, WIDTH) to (rows, CONTEXT, 256)."""
    return hidden @ embedding.weight.T


class PipelineGPT2(pl.LightningModule):
    """What Lightning is given: the layers, and the loss of the last one's output."""

    def __init__(self, blocks: int, steps: int) -> None:
        super().__init__()
        self.blocks, self.steps = blocks, steps

    def pipeline_layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        return [
            TiedLayerSpec("embedding", Embedding),
            LayerSpec(Positions),
            *(LayerSpec(Block, CONFIG, layer_idx=number) for number in range(self.blocks)),
            LayerSpec(nn.LayerNorm, WIDTH),
            TiedLayerSpec("embedding", Embedding, forward_fn=scores),
        ]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)  # the parameters of this rank's stage
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def standard_library(limit: int) -> bytes:
    """The first ``limit`` bytes of the standard library's modules, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=int(os.environ.get("WORLD_SIZE", 4)))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    pl.seed_everything(1234, verbose=False)
    text = standard_library(1_000_000)
    cut = len(text) * 9 // 10
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
    rows = 2 * options.micro_batches
    trainer.fit(
        PipelineGPT2(options.blocks, options.steps),
        DataLoader(Characters(text[:cut]), batch_size=rows, shuffle=True, drop_last=True),
        DataLoader(Characters(text[cut:]), batch_size=rows),
    )
    if trainer.is_global_zero:
        print(f"validation loss {float(trainer.callback_metrics['val_loss']):.9f}", flush=True)


if __name__ == "__main__":
    main()
