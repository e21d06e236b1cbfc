"""Says for each model, and for each option, that cannot be sharded and recovered why it is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shared_core
from shared_core import SwiftConfig
from shared_core.errors import Unsupported
from shared_core.worker.sharded.own import refuse, sharded_modules
from tests.support.report import Report


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def models() -> dict[str, Callable[[], Sequence[nn.Module]]]:
    def fsdp1() -> Sequence[nn.Module]:
        return [FullyShardedDataParallel(net(), device_id=torch.device("cpu"))]

    def offload() -> Sequence[nn.Module]:
        mesh = init_device_mesh("cpu", (1,))
        return [fully_shard(net(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))]

    def beside_ddp() -> Sequence[nn.Module]:
        return [fully_shard(net(), mesh=init_device_mesh("cpu", (1,))), nn.parallel.DistributedDataParallel(net())]

    def tensor_parallel() -> Sequence[nn.Module]:
        return [parallelize_module(net(), init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})]

    def both() -> Sequence[nn.Module]:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        split = parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel()})
        return [fully_shard(split, mesh=mesh["dp"])]

    return {each.__name__: each for each in (fsdp1, offload, beside_ddp, tensor_parallel, both)}


def options() -> dict[str, SwiftConfig]:
    return {
        "reroute": SwiftConfig(on_failure="reroute"),
        "shrink": SwiftConfig(on_failure="shrink"),
        "resize": SwiftConfig(resize={"replace_timeout_s": 1.0}),
        "overlapped": SwiftConfig(state={"overlapped_update": True}),
    }


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Unsupported as error:
        return str(error)
    return "not refused"


def main() -> None:
    report = Report()
    shared_core.install()
    dist.init_process_group("gloo")
    job = shared_core.current_job()
    assert job is not None
    attach = job.attach
    refused = {}
    for name, make in models().items():
        refused[name] = said(lambda make=make: attach(make(), []))  # type: ignore[misc]
    fine = [fully_shard(net(), mesh=init_device_mesh("cpu", (1,)))]
    for name, config in options().items():
        refused[name] = said(lambda c=config: refuse(fine, sharded_modules(fine), c))  # type: ignore[misc]
    refused["nothing"] = said(lambda: attach(fine, []))
    report.finish({}, refused=refused)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
