"""Text classification under Accelerate: a small BERT says whether the second line of a pair follows the first.

    swiftrun --nproc-per-node 2 examples/accelerate_text.py

Collation with padding, gradient accumulation, a schedule with warm-up and a metric over all workers. Nothing is
downloaded: the lines are those of the Python standard library, the model is built from its configuration. Kill a worker
while it runs (its process number is printed): the fingerprints at the end do not change.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from accelerate_swift import SwiftPlugin

#: Tokens are bytes, but for these.
CLS, SEP, PAD = 256, 257, 258
LONGEST = 64

Example = tuple[list[int], list[int], int]


def pairs(count: int) -> list[Example]:
    """``count`` pairs of lines; every other one is of lines that do not belong together."""
    lines: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(lines) <= count:
            lines += [line.strip() for line in path.read_text(errors="replace").splitlines() if len(line.strip()) > 8]
    draw = random.Random(7)
    found: list[Example] = []
    for number in range(count):
        follows = number % 2
        second = lines[number + 1] if follows else draw.choice(lines)
        found.append((list(lines[number].encode()), list(second.encode()), follows))
    return found


def collate(examples: list[Example]) -> dict[str, torch.Tensor]:
    """Pads to the longest pair of a batch: ``[rows, length]`` tokens, segments and mask, ``[rows]`` labels."""
    tokens = [[CLS, *first[:LONGEST], SEP, *second[:LONGEST], SEP] for first, second, _ in examples]
    segments = [[0] * (2 + len(first[:LONGEST])) + [1] * (1 + len(second[:LONGEST])) for first, second, _ in examples]
    length = max(map(len, tokens))
    return {
        "input_ids": torch.tensor([row + [PAD] * (length - len(row)) for row in tokens]),
        "token_type_ids": torch.tensor([row + [0] * (length - len(row)) for row in segments]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in tokens]),
        "labels": torch.tensor([label for _, _, label in examples]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000, help="that are trained on in each epoch")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    plugin = SwiftPlugin(num_processes=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[plugin])
    print(f"rank {accelerator.process_index} is process {os.getpid()}", flush=True)
    set_seed(7)
    data = pairs(options.pairs + 200)
    train = DataLoader(data[: options.pairs], batch_size=8, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    held_out = DataLoader(data[options.pairs :], batch_size=16, collate_fn=collate)  # type: ignore[arg-type]
    config = BertConfig(
        vocab_size=259,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=2 * LONGEST + 3,
        pad_token_id=PAD,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = len(train) * options.epochs // accelerator.gradient_accumulation_steps
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, train, held_out, schedule = accelerator.prepare(model, optimizer, train, held_out, schedule)

    seen = plugin.register(right=0, all=0)
    for epoch in plugin.epochs(options.epochs):  # instead of range(options.epochs)
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        seen.right = seen.all = 0
        for batch in held_out:
            with torch.no_grad():
                guess = model(**batch).logits.argmax(-1)
            guess, labels = accelerator.gather_for_metrics((guess, batch["labels"]))
            seen.right += int((guess == labels).sum())
            seen.all += len(labels)
        accelerator.print(f"epoch {epoch}: accuracy {seen.right / seen.all:.4f}")
    weights = b"".join(each.detach().numpy().tobytes() for each in accelerator.unwrap_model(model).parameters())
    print(f"rank {accelerator.process_index}: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
