"""Each rank notes the digest of a stop-the-world copy at each step boundary, for comparison with the checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests.support.digest import digest, training_digest
from tests.support.report import Report, end_group, generators_digest


def copy_late() -> None:
    """Have snapshots copied as late as can be: when an update is about to begin."""
    from shared_core.checkpoint.image import Stager

    begin, fence = Stager.begin, Stager.fence
    waiting: list[threading.Event] = []

    def begin_late(self: Stager, work: Callable[[], None]) -> None:
        due = threading.Event()

        def late() -> None:
            due.wait(20.0)
            work()

        begin(self, late)
        waiting.append(due)

    def fence_now(self: Stager) -> None:
        while waiting:
            waiting.pop().set()
        fence(self)

    Stager.begin, Stager.fence = begin_late, fence_now  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--two", action="store_true", help="two optimizers, which step one after the other")
    parser.add_argument("--inside", action="store_true", help="each parameter is updated inside backward")
    parser.add_argument("--late", action="store_true", help="see copy_late; and wait for each checkpoint")
    args = parser.parse_args()
    report = Report()
    job = None
    if not os.environ.get("SWIFT_BASELINE"):
        import shared_core

        if args.late:
            copy_late()
        shared_core.install()
        job = shared_core.current_job()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    width = args.width
    net = nn.Sequential(
        nn.Linear(16, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.Linear(width, 4),
    )
    ddp: nn.Module = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1)
    split = 2 if args.two else 0
    parameters = list(net.parameters())
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(parameters[split:], lr=1e-3)]
    if split:
        optimizers.append(torch.optim.Adam(parameters[:split], lr=1e-3))
    if args.inside:
        optimizers = [torch.optim.AdamW([parameter], lr=1e-3) for parameter in parameters]
        ddp = net  # of one rank; DistributedDataParallel would put the gradients back

        def step(parameter: torch.Tensor) -> None:
            optimizer = optimizers[next(i for i, each in enumerate(parameters) if each is parameter)]
            optimizer.step()
            optimizer.zero_grad()

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(step)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    loop = {"step": 0}
    if job is not None:
        job.attach([ddp], optimizers)
        job.register("loop", lambda: dict(loop), loop.update)
    while loop["step"] < args.steps:
        if job is not None:
            # The whole state, copied while nothing else runs: what the checkpoint of this step boundary must hold.
            replicated = job.updates.replicated
            assert replicated is not None
            noted = {
                "state": digest([tensor.clone() for tensor in replicated.export()[1]]),
                "buffers": digest([buffer.clone() for buffer in net.buffers()]),
                "torch": digest(torch.get_rng_state()),
                "loop": digest(dict(loop)),
            }
            job.step_boundary()
            with Path(os.environ["SWIFT_TEST_OUT"], f"boundaries{rank}.jsonl").open("a") as file:
                print(json.dumps({"boundary": job.position.boundaries, **noted}), file=file)
        report.count(f"batch {loop['step']}")
        x = torch.randn(8, 16) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        loss = (ddp(x) - x[:, :4].sin()).pow(2).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers if not args.inside else ():
            optimizer.step()
        loop["step"] += 1
        if job is not None and args.late and job.checkpoints.due:
            assert job._worker.start.checkpoints._spool.wait_committed(job.position.boundaries, 20.0)
    report.finish(training_digest(net, optimizers, [], {}) | {"generators": generators_digest()})
    group = end_group()
    del ddp, group


if __name__ == "__main__":
    main()
