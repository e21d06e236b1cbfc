"""A loop without a loader, as nanoGPT's: ``get_batch``, ``iter_num``, accumulation of gradients, and no ``DataLoader``.

    swiftrun --nproc-per-node 2 examples/nanogpt_loop.py

Four lines differ from a script for torchrun; each says why. Kill a worker while it runs (its process number is
printed): the fingerprints at the end do not change.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shared_core

BLOCK, BATCH, ACCUMULATE = 32, 8, 2


class TinyGPT(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(BLOCK, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of texts ``x``, each byte of which is followed by that of ``y``."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.blocks(self.bytes(x) + self.places(torch.arange(x.shape[1])), mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=400)
    max_iters = parser.parse_args().iterations
    shared_core.install()  # 1: before the process group, which is to survive failures of workers
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"rank {rank} is process {os.getpid()}", flush=True)
    torch.manual_seed(1337 + rank)  # each worker draws its own batches; DDP makes the parameters equal
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    parts = {"train": text[: len(text) * 9 // 10], "validation": text[len(text) * 9 // 10 :]}

    def get_batch(part: str) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(parts[part]) - BLOCK, (BATCH,))
        x = torch.stack([parts[part][i : i + BLOCK] for i in starts.tolist()])
        y = torch.stack([parts[part][i + 1 : i + 1 + BLOCK] for i in starts.tolist()])
        return x, y

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        loss = sum(model.module(*get_batch("validation")).item() for _ in range(10)) / 10
        model.train()
        return loss

    model = DistributedDataParallel(TinyGPT())
    optimizer = torch.optim.AdamW(model.parameters())
    job = shared_core.attach(model, optimizer)  # 2: what is trained
    x, y = get_batch("train")  # the first batch; later ones are drawn ahead
    best = math.inf
    for iter_num, _ in job.steps(range(max_iters)):  # 3: in the place of "while True", and 4: of "iter_num += 1"
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * iter_num / max_iters))
        if iter_num % 100 == 0 and rank == 0:
            best = min(best, estimate_loss())
            print(f"iteration {iter_num}: best validation loss {best:.4f}", flush=True)
        for micro_step in range(ACCUMULATE):
            model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
            loss = model(x, y) / ACCUMULATE
            x, y = get_batch("train")
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        print(f"validation loss {estimate_loss():.4f}", flush=True)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"rank {rank}: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
