"""FSDP2: a model that is sharded, and what torch itself offers against failures, asynchronous checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def shard(net: nn.Module, parts: Iterable[nn.Module]) -> nn.Module:
    """Divide a model over all workers: each of ``parts`` is a group of parameters, and what is left is another one.

    Make the optimizer afterwards: parameters are new objects.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in parts:
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


class AsyncCheckpoints:
    """Checkpoints of ``torch.distributed.checkpoint``, written during the next steps. The newest one is loaded.

    Args:
        folder: for all of them.
        net: the model, sharded.
        optimizer: its optimizer.
        every: steps between two checkpoints.

    Attributes:
        step: that of the checkpoint that was loaded; 0 if there was none.
    """

    def __init__(self, folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
        self._folder, self._net, self._optimizer, self._every = folder, net, optimizer, every
        self._group = dist.new_group(backend="gloo")  # saves speak beside the training
        self._saving: Any = None
        # The file that is written last.
        whole = [int(path.parent.name) for path in folder.glob("*/.metadata")]
        self.step = max(whole, default=0)
        if self.step:
            state = self._state()
            dcp.load(state, checkpoint_id=folder / str(self.step))
            set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def after_step(self, step: int) -> None:
        """A step is done; begin a checkpoint if one is due."""
        if step % self._every == 0:
            self.wait()
            self._saving = dcp.async_save(
                self._state(), checkpoint_id=self._folder / str(step), process_group=self._group
            )

    def wait(self) -> None:
        """Until the newest checkpoint is whole."""
        if self._saving is not None:
            self._saving.result()

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._net, self._optimizer)
        return {"model": model, "optimizer": optimizer}
