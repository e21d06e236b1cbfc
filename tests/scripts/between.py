"""Plain PyTorch that evaluates and saves between loops over epochs, at the top of an epoch and between two passes."""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import shared_core
from shared_core.untrained import UntrainedUse
from tests.support.digest import training_digest
from tests.support.report import OUT, Report, end_group

DATA = torch.randn(32, 4, generator=torch.Generator().manual_seed(5))


def main() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", help="what is done where; the loops have two epochs of five step boundaries")
    parser.add_argument("--unwatched", action="store_true", help="the control")
    args = parser.parse_args()
    report, out = Report(), Path(os.environ[OUT])
    if args.unwatched:
        UntrainedUse.begin = lambda *_: None  # type: ignore[method-assign]
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    job = shared_core.attach(model, optimizer)
    sampler: DistributedSampler[Any] = DistributedSampler(DATA)
    loader = DataLoader(DATA, 4, sampler=sampler)
    history: list[float] = []
    teacher: nn.Module = nn.Identity()

    def train() -> None:
        for _, x in job.steps(loader):
            report.count("batch")
            optimizer.zero_grad()
            with torch.no_grad():
                aim = teacher(x).mean()
            loss = (model(x) - 1 - aim).square().mean()
            loss.backward()
            optimizer.step()
            history.append(loss.item())

    def evaluate() -> float:
        with torch.no_grad():
            return net(DATA).mean().item()

    def save(name: str) -> None:
        if dist.get_rank() == 0:
            torch.save(net.state_dict(), out / f"{name}.pt")
            torch.save(net, out / f"{name}_whole.pt")
            save_file(net.state_dict(), out / f"{name}.safetensors")

    for phase in range(2):
        for epoch in job.epochs(2):
            sampler.set_epoch(epoch)
            if args.part == "leaves" and evaluate() > -1 and not os.environ.get("SWIFT_RECOVERY_RESTART", "0") == "0":
                break
            if args.part == "saves" and epoch:
                save(f"top{phase}{epoch}")
            train()
            if args.part == "passes":
                save(f"mid{phase}{epoch}")
                train()
        if args.part == "saves":
            save(f"end{phase}")
            if dist.get_rank() == 0:
                (out / f"history{phase}.json").write_text(json.dumps(history))
            teacher = copy.deepcopy(net)
        if args.part == "evaluates":
            print(f"\nmean {evaluate()}", flush=True)
    digests = training_digest(net, [optimizer], metrics={"history": sum(history)})
    if dist.get_rank() == 0:
        written = [path for path in out.iterdir() if path.suffix in (".pt", ".safetensors") or "history" in path.name]
        digests |= {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in written}
    report.finish(digests)
    return end_group()


if __name__ == "__main__":
    group = main()  # let go of after the model
