"""torchft's side of the benchmarks, as its README shows: one replica group a process. Imported only where installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore


def wrap(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    name: str,
    min_replicas: int,
    extra: tuple[Callable[[], Any], Callable[[Any], None]] | None = None,
) -> tuple[Any, nn.Module, Any]:
    """Manager, model and optimizer of torchft around ``net`` and ``optimizer``.

    Args:
        net: the model.
        optimizer: its optimizer.
        name: part of the replica's identity.
        min_replicas: replicas without which no step is made.
        extra: reads and sets more state that a replica copies from another.
    """
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    rank = os.environ["RANK"]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def save() -> dict[str, Any]:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        return state | ({"extra": extra[0]()} if extra else {})

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if extra:
            extra[1](state["extra"])

    timeout = timedelta(seconds=float(os.environ.get("BENCH_TORCHFT_TIMEOUT_S", "60")))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=min_replicas,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"{name}_{rank}",
        hostname="127.0.0.1",
        timeout=timeout,
    )
    manager.benchmark_store = store  # it must live as long as the manager
    model = DistributedDataParallel(manager, net)
    assert not dist.is_initialized()
    return manager, model, Optimizer(manager, optimizer)
