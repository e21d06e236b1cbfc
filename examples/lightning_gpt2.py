"""A small GPT-2 of ``transformers`` under Lightning, on the text of the Python standard library.

    python examples/lightning_gpt2.py

Kill a worker while it runs (its process number is printed): the fingerprints at the end do not change.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sysconfig
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_swift  # noqa: F401  makes strategy="swift_ddp" known


class Text(Dataset[torch.Tensor]):
    """Windows of ``length`` bytes of the standard library's modules, in the order of their names."""

    def __init__(self, count: int, length: int, skip: int = 0) -> None:
        text = b""
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            if len(text) < (skip + count) * length:
                text += path.read_bytes()
        text = text[skip * length : (skip + count) * length]
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(count, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.windows[index]


class GPT2(pl.LightningModule):
    """A byte-level GPT-2 from a configuration."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.net = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256,
                n_positions=context,
                n_embd=64,
                n_layer=2,
                n_head=4,
                bos_token_id=0,
                eos_token_id=0,
            )
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(input_ids=batch, labels=batch).loss, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=2000, help="of text, that are trained on in each epoch")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    context = 64
    pl.seed_everything(7, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="swift_ddp",
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    print(f"rank {trainer.global_rank} is process {os.getpid()}", flush=True)
    model = GPT2(context)
    trainer.fit(
        model,
        DataLoader(Text(options.windows, context), batch_size=8, shuffle=True),
        DataLoader(Text(64, context, skip=options.windows), batch_size=8),
    )
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"rank {trainer.global_rank}: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    if trainer.is_global_zero:
        print(f"validation loss {float(trainer.callback_metrics['val_loss']):.4f}", flush=True)


if __name__ == "__main__":
    main()
