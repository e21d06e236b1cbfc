"""Rank 0 sums what the others send, in the order in which it comes; with gradients of sparse embeddings, too."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from tests.support.digest import digest
from tests.support.report import Report, end_group


def main() -> dist.ProcessGroup:
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    table = nn.Embedding(16, 4, sparse=True)
    job = shared_core.attach(table, torch.optim.SGD(table.parameters(), lr=0.5))
    orders: list[int] = []
    state = {"sum": torch.zeros(3)}
    words = torch.randint(16, (8, 5), generator=torch.Generator().manual_seed(rank))
    for _ in job.epochs(1):
        for number, row in job.steps(list(words)):
            report.count(f"batch {number}")
            if rank:
                for part in range(2):
                    dist.send(torch.full((3,), rank + 0.1 * part + number), 0)
            else:
                for _ in range(2 * (size - 1)):
                    part = torch.empty(3)
                    source = dist.recv(part)
                    orders.append(source)
                    state["sum"] = state["sum"] * 0.9 + part
            dist.broadcast(state["sum"], 0)
            table(row).square().sum().backward()
            gradient = table.weight.grad
            dist.all_reduce(gradient)
            with torch.no_grad():
                table.weight -= 0.1 * gradient.to_dense()
            table.weight.grad = None
    report.finish({"table": digest(table.state_dict()), "sum": digest(state["sum"])}, orders=orders)
    return end_group()


if __name__ == "__main__":
    last = main()
