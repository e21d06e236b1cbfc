"""Train a byte-level GPT-2 on the source code of the Python standard library, as any user of Lightning would.

The only lines that concern failures are the import of ``lightning_swift`` and ``strategy="swift_ddp"``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from model import CONTEXT, byte_gpt2
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset[torch.Tensor]):
    """Consecutive windows of ``CONTEXT`` bytes of a text; an item is a tensor of that many integers below 256."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.text[index * CONTEXT : (index + 1) * CONTEXT].long()


def standard_library(limit: int = 3_000_000) -> bytes:
    """The first ``limit`` bytes of the standard library's modules, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b""
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return text[:limit]


class ByteGPT(pl.LightningModule):
    """GPT-2 of 1.2 million parameters over single bytes."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.model = byte_gpt2()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fingerprint(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> str:
    """SHA-256 over every bit of the parameters, buffers and optimizer state."""
    hasher = hashlib.sha256()
    tensors = list(model.state_dict().values())
    for optimizer in optimizers:
        for _, state in sorted(optimizer.state_dict()["state"].items()):
            tensors += [torch.as_tensor(value) for _, value in sorted(state.items())]
    for tensor in tensors:
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="swift_ddp")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=6, help="of each worker")
    parser.add_argument("--out", type=Path, default=Path("runs/demo/run"))
    options = parser.parse_args()
    if options.strategy == "swift_ddp":
        import lightning_swift  # noqa: F401  registers the strategy

    pl.seed_everything(1234)
    text = standard_library()
    cut = len(text) * 9 // 10
    train = DataLoader(Windows(text[:cut]), batch_size=options.batch_size, shuffle=True)
    val = DataLoader(Windows(text[cut:]), batch_size=options.batch_size)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=options.strategy,
        max_steps=options.steps,
        val_check_interval=options.steps // 2,
        limit_val_batches=4,
        gradient_clip_val=1.0,
        logger=CSVLogger(options.out, name="", version="", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = ByteGPT(options.steps)
    trainer.fit(model, train, val)
    report = {"rank": trainer.global_rank, "steps": trainer.global_step, "hash": fingerprint(model, trainer.optimizers)}
    (options.out / f"rank{trainer.global_rank}.json").write_text(json.dumps(report))
    trainer.strategy.barrier()  # nobody leaves while another still needs it


if __name__ == "__main__":
    main()
