"""Elastic Horovod's way, on torch: state is committed to memory every k steps; after a failure all go back to it.

As in its documentation (elastic.rst): a failed collective raises on the survivors, they restore the last commit, meet
the new worker in a fresh communicator, and the state is broadcast from one of them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WORKERS = "BENCH_COMMIT_WORKERS"
STORE = "BENCH_COMMIT_STORE"
#: How long a collective may take before it counts as failed, in seconds: gloo tells only the neighbours of a dead rank.
TIMEOUT_S = 3.0


class Committed:
    """A training state with commits.

    Args:
        net: the model, not wrapped.
        optimizer: its optimizer.
        counter: plain counters of the loop.
        every: steps between two commits.
    """

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, counter: dict[str, int], every: int) -> None:
        self.net, self.optimizer, self.counter, self.every = net, optimizer, counter, every
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ[WORKERS])
        host, _, port = os.environ[STORE].rpartition(":")
        self.store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=60))
        self.round = int(self.store.get("round"))
        self.model: Any = None
        self.kept: tuple[dict[str, Any], dict[str, Any], dict[str, int]] | None = None
        self.meet()

    def commit(self) -> None:
        """Copy the state."""
        self.kept = (
            copy.deepcopy(self.net.state_dict()),
            copy.deepcopy(self.optimizer.state_dict()),
            dict(self.counter),
        )

    def meet(self) -> None:
        """Form a communicator of all workers, and take the state of one that has a commit."""
        name = f"round{self.round}"
        self.store.set(f"{name}/here/{self.rank}", "1")
        self.store.wait([f"{name}/here/{rank}" for rank in range(self.size)])
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(name, self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        have = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(have, torch.tensor([-1 if self.kept is None else self.kept[2]["step"]]))
        steps = [int(step) for step in have]
        if max(steps) >= 0:
            root = steps.index(max(steps))
            if self.rank == root:
                assert self.kept is not None
                state = [self.kept]
            else:
                state = [None]  # type: ignore[list-item]
            dist.broadcast_object_list(state, src=root)
            model, optimizer, counter = state[0]
            self.net.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
            self.counter.update(counter)
        self.model = nn.parallel.DistributedDataParallel(self.net)
        self.commit()

    def run(self, step: Callable[[Any], None]) -> bool:
        """Run one step; False if it failed, and the state is that of the last commit."""
        try:
            step(self.model)
        except RuntimeError:
            self.model = None
            dist.destroy_process_group()  # closes the sockets, by which the others notice too
            self.round += 1
            self.optimizer.zero_grad()
            self.meet()
            return False
        if self.counter["step"] % self.every == 0:
            self.commit()
        return True
