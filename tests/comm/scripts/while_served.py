"""Rank 1 gives a result to rank 0's replacement, and fails before the replacement has copied it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from shared_core.events import read_events
from shared_core.worker.comm.op import Op
from tests.support.report import Report, end_group

BASELINE = bool(os.environ.get("SWIFT_BASELINE"))
FOLDER = Path(os.environ.get("SWIFT_RECOVERY_JOB_DIR", ""))
SERVE = Op.serve


def serve(op: Op, results: Sequence[torch.Tensor]) -> None:
    """Kill rank 1 before the first all-reduce is served, and wait until this rank has noticed."""
    pid, events = FOLDER / "rank1.pid", Path(os.environ["SWIFT_RECOVERY_EVENTS"])
    if op.signature[0] == "all_reduce" and pid.exists():
        os.kill(int(pid.read_text()), signal.SIGKILL)
        pid.unlink()
        while not any(e.kind == "survivor_ready" and (e.rank, e.generation) == (0, 2) for e in read_events(events)):
            threading.Event().wait(0.01)
    SERVE(op, results)


def main() -> None:
    report = Report()
    job = None if BASELINE else shared_core.install()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = nn.Linear(2, 2, bias=False)
    nn.init.ones_(net.weight)
    loop = {"step": 0, "seen": 0.0}
    if job is not None:
        job.attach([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
        job.register("loop", lambda: dict(loop), loop.update)
        if os.environ["SWIFT_RECOVERY_INCARNATION"] != "0":
            Op.serve = serve  # type: ignore[method-assign]
        elif rank == 1:
            (FOLDER / "rank1.pid").write_text(str(os.getpid()))
    while loop["step"] < 5:
        if job is not None:
            job.step_boundary()
        for number in (1.0, 100.0):
            value = torch.full((2,), number * (loop["step"] + rank))
            dist.all_reduce(value)
            loop["seen"] += value.sum().item()
            if job is not None and loop["step"] == 2 and rank == 1:
                (FOLDER / "has").touch()
            while job is not None and loop["step"] == 2 and not (FOLDER / "has").exists():
                threading.Event().wait(0.01)
        loop["step"] += 1
    report.finish({"seen": str(loop["seen"])})
    end_group()


if __name__ == "__main__":
    main()
