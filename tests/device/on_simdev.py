"""What a process does on the simulated device: ``on_simdev.py WHAT``, run by ``test_simdev.py``; prints JSON."""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import threading
from typing import Any

import simdev
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.digest import training_digest

VOCABULARY, LENGTH, WIDTH, HEADS = 29, 12, 24, 3


class Block(nn.Module):
    """Attention and a perceptron, with dropout in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            part.view(rows, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(WIDTH, -1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        seen = self.dropout(scores.masked_fill(future, -math.inf).softmax(-1)) @ v
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH)))
        out: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class Gpt(nn.Module):
    """A small language model whose first and last layer share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        out: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return out


def trained(device: str, steps: int = 12) -> dict[str, Any]:
    """Train the model; what its end is, as digests."""
    torch.manual_seed(3)
    net = Gpt().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(5)
    torch.manual_seed(7)  # of both generators: from here on only dropout draws
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=data).to(device)
        loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    drawn = torch.get_rng_state() if device == "cpu" else torch.get_device_module(device).get_rng_state()
    assert net.head.weight is net.tokens.weight
    return training_digest(net, [optimizer], metrics={"losses": losses, "drawn": drawn})


def gpt() -> dict[str, Any]:
    """The same model on both devices; how much was queued; what dropout on the device did to the host's generator."""
    on_device = trained("sim")
    moved = not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(7).get_state())
    queued, at_once = simdev.counts()
    return {"cpu": trained("cpu"), "sim": on_device, "queued": queued, "at_once": at_once, "host_moved": moved}


def reads() -> dict[str, Any]:
    """The host reads memory of the device: the process dies here."""
    there = torch.ones(4, device="sim")
    torch.accelerator.synchronize()
    print(json.dumps({"before": there.cpu().tolist()}), flush=True)
    return {"read": ctypes.string_at(there.data_ptr(), 4).hex()}


def generator() -> dict[str, Any]:
    """Draws on the device and on the host; a state that is put back."""
    torch.manual_seed(1)
    host, there = torch.get_rng_state(), torch.sim.get_rng_state()  # type: ignore[attr-defined]
    first = torch.rand(5, device="sim").cpu()
    host_same = torch.equal(host, torch.get_rng_state())
    after = torch.sim.get_rng_state()  # type: ignore[attr-defined]
    torch.rand(3)
    device_same = torch.equal(after, torch.sim.get_rng_state())  # type: ignore[attr-defined]
    torch.sim.set_rng_state(there)  # type: ignore[attr-defined]
    again = torch.rand(5, device="sim").cpu()
    return {
        "host_stays": host_same,
        "device_stays": device_same,
        "device_moved": not torch.equal(there, after),
        "again": torch.equal(first, again),
    }


def late() -> dict[str, Any]:
    """The host goes ahead of a device that is held; fresh memory is not zero; what waits for the device waits."""
    fresh = torch.empty(3, device="sim").cpu()
    done = torch.Event(device="sim")
    read: list[float] = []
    with simdev.held():
        x = torch.ones(3, device="sim") + 1
        done.record()
        before = done.query()
        thread = threading.Thread(target=lambda: read.append(x.sum().item()))
        thread.start()
        waits = thread.is_alive() and not read
    thread.join()
    done.synchronize()
    return {"fresh": fresh.isnan().all().item(), "before": before, "waits": waits, "after": done.query(), "read": read}


def fork() -> dict[str, Any]:
    """A child of a process that has used the device cannot; one of a process that has only loaded it can."""
    return {"loaded": _in_child(), "used": [torch.ones(1, device="sim").item(), _in_child()][1]}


def _in_child() -> bool:
    """Whether a forked child can use the device."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(2, device="sim").sum().item()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


if __name__ == "__main__":
    found = {each.__name__: each for each in (gpt, reads, generator, late, fork)}[sys.argv[1]]()
    print(json.dumps(found), flush=True)
