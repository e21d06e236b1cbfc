"""What the backend refuses, one rank; the messages go into the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shared_core
from tests.support.report import Report


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def main() -> None:
    report = Report()
    shared_core.install()
    sparse = torch.eye(2).to_sparse()
    said = {"init nccl": message(lambda: dist.init_process_group("nccl"))}
    dist.init_process_group("gloo")
    group: Any = dist.group.WORLD
    said |= {
        "new_group nccl": message(lambda: dist.new_group(backend="nccl")),
        "no memory": message(lambda: dist.all_reduce(torch.empty(2, device="meta"))),
        "sparse all_reduce": message(lambda: dist.all_reduce(sparse, dist.ReduceOp.MAX)),
        "sparse reduce": message(lambda: dist.reduce(sparse, 0)),
        "two tensors": message(lambda: group.send([torch.zeros(1), torch.zeros(1)], 0, 0)),
    }
    report.finish({}, said=said)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
