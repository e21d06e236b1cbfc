"""Makes groups in every way that frameworks do and reports what they are."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import shared_core
from shared_core.worker.comm import SwiftProcessGroup
from tests.support.digest import digest
from tests.support.report import Report


def from_torch() -> dict[str, Any]:
    groups: dict[str, Any] = {
        "default": dist.group.WORLD,
        "new_group": dist.new_group(),
        "new_group(gloo)": dist.new_group(backend="gloo"),
        "new_group(swift)": dist.new_group(backend="swift"),
        # Before any group that only some are in: torch derives its name from the number of groups here.
        "new_group(local)": dist.new_group([0, 1], use_local_synchronization=True),
        "new_group(None, [0])": dist.new_group([0]),
        "subgroups": dist.new_subgroups(group_size=1)[0],
    }
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    groups["mesh data"] = mesh.get_group("data")
    groups["mesh model"] = mesh["model"].get_group()
    return {name: group for name, group in groups.items() if group is not dist.GroupMember.NON_GROUP_MEMBER}


def from_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2 and str(accelerator.distributed_type).endswith("MULTI_CPU")
    net = accelerator.prepare(torch.nn.Linear(2, 2))
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [0, 1]
    return {"accelerate's DDP": net.process_group, "accelerate's state": dist.group.WORLD}


def from_checkpoints() -> dict[str, Any]:
    folder = [tempfile.mkdtemp(prefix="dcp-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    state = {"mine": torch.arange(4.0) + dist.get_rank(), "number": 3}
    dcp.save(state, checkpoint_id=os.path.join(str(folder[0]), "a"))
    group = dist.new_group(backend="gloo")
    dcp.async_save(state, checkpoint_id=os.path.join(str(folder[0]), "b"), process_group=group).result()  # type: ignore[union-attr]
    for name in "ab":
        loaded = {"mine": torch.zeros(4), "number": 0}
        dcp.load(loaded, checkpoint_id=os.path.join(str(folder[0]), name))
        assert loaded["number"] == 3
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))
    return {"async_save": group}


def from_deepspeed() -> dict[str, Any]:
    import deepspeed
    import deepspeed.comm.torch
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    deepspeed.comm.torch.build_shm_op = lambda: None  # compiled when first used, which takes a minute
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1), dist.group.WORLD)
    found = {name: value for name, value in vars(grid).items() if isinstance(value, dist.ProcessGroup)}
    for name, value in vars(grid).items():
        if isinstance(value, list | tuple):
            found |= {f"{name}[{i}]": g for i, g in enumerate(value) if isinstance(g, dist.ProcessGroup)}
    assert len(found) >= 3, found
    return {f"deepspeed {name}": group for name, group in found.items()}


def main() -> None:
    report = Report()
    shared_core.install()
    dist.init_process_group("gloo")
    groups = from_torch() | from_accelerate() | from_checkpoints() | from_deepspeed()
    kinds = {}
    for name, group in groups.items():
        swift = isinstance(group, SwiftProcessGroup)
        kinds[name] = [swift, dist.get_backend(group), dist.get_world_size(group)]
        x = torch.ones(3)
        if dist.get_rank(group) >= 0:
            dist.all_reduce(x, group=group)
            assert x.tolist() == [dist.get_world_size(group)] * 3
    # Destroyed and made again: a new group, for which nothing of the old one is taken.
    again = dist.new_group([0, 1])
    dist.destroy_process_group(again)
    other = dist.new_group([0, 1])
    dist.all_reduce(y := torch.ones(2), group=other)
    assert y.tolist() == [2.0, 2.0]
    report.finish({"y": digest(y)}, kinds=kinds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
