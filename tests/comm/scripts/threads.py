"""Collectives on other threads than the program's, waited for in the batch in which they begin, or in the next one."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shared_core
from tests.support.digest import training_digest
from tests.support.report import Report, end_group

ACROSS = sys.argv[1] == "across"


def main() -> dist.ProcessGroup:
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    side, saving = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job = shared_core.attach(model, optimizer)
    seen = job.register(sum=0.0)
    pool, gate = ThreadPoolExecutor(1), threading.Event()
    begun: Future[float] | None = None

    def agreed(value: float, waits: bool) -> float:
        total = torch.tensor(value)
        dist.all_reduce(total, group=side)
        if waits:
            gate.wait()
        dist.all_reduce(total, group=side)
        return total.item()

    with tempfile.TemporaryDirectory() as folder:
        for _ in job.epochs(1):
            for index, x in job.steps([torch.full((4, 8), float(k)) for k in range(8)]):
                report.count(f"batch {index}")
                if begun is None:
                    begun = pool.submit(agreed, index, ACROSS and index == 3)
                if not ACROSS or index != 3:
                    if index == 4:
                        gate.set()
                    seen.sum += begun.result()
                    begun = None
                if not ACROSS and index in (3, 4):
                    path = Path(folder) / str(index)
                    dcp.async_save({"model": model.state_dict()}, checkpoint_id=path, process_group=saving).result()  # type: ignore[union-attr]
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    pool.shutdown()
    report.finish(training_digest(model, [optimizer], [], vars(seen)), sum=seen.sum)
    return end_group()


if __name__ == "__main__":
    group = main()  # let go of after the model
