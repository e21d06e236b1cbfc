"""``transformers.Trainer``: a GPT-2 built from its configuration, on the text of the Python standard library.

    swiftrun --nproc-per-node 2 examples/transformers_trainer.py

Two lines differ from a script for ``Trainer``: the import of ``SwiftTrainer``, before ``TrainingArguments`` are made,
and its name. Kill a worker while it runs (its process number is printed): the fingerprints do not change.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from accelerate_swift.trainer import SwiftTrainer


class Text(Dataset[dict[str, torch.Tensor]]):
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

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=2000, help="of text, that are trained on in each epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output-dir", default=str(Path(tempfile.gettempdir()) / "swift-example"))
    options = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        use_cpu=True,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=20,
        report_to="none",
        seed=7,
    )
    print(f"rank {arguments.process_index} is process {os.getpid()}", flush=True)
    set_seed(7)
    context = 64
    config = GPT2Config(
        vocab_size=256, n_positions=context, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    trainer = SwiftTrainer(
        model,
        arguments,
        train_dataset=Text(options.windows, context),
        eval_dataset=Text(64, context, skip=options.windows),
    )
    trainer.train()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"rank {arguments.process_index}: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
