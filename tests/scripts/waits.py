"""Ranks that wait: for a late peer, for a replacement that starts slowly, hangs, or does something
else than its peers.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from tests.support.report import Report

HOW, TIMEOUT_S = sys.argv[1], float(sys.argv[2])


def replacement() -> bool:
    """Asked each time: a variable would be given the failed worker's value."""
    return os.environ["SWIFT_RECOVERY_INCARNATION"] != "0"


RANK = int(os.environ["RANK"])
GATES = Path(os.environ["SWIFT_RECOVERY_JOB_DIR"])


class Listening:
    """Standard error; a gate opens when a line has these words."""

    def __init__(self, out: TextIO, gates: dict[str, str]) -> None:
        self._out, self._gates = out, gates

    def write(self, text: str) -> int:
        for words, gate in self._gates.items():
            if words in text:
                (GATES / gate).touch()
        return self._out.write(text)

    def flush(self) -> None:
        self._out.flush()


def pass_gate(name: str) -> None:
    while not (GATES / name).exists():
        threading.Event().wait(0.01)


def main() -> None:
    late = {"waits for rank 0 in all_reduce": "late", "wait for rank 0 in all_reduce": "late"}
    sys.stderr = Listening(sys.stderr, late | {"waits for rank 1 to create the process group": "start"})  # type: ignore[assignment]
    report = Report()
    job = shared_core.install()
    assert job is not None
    if replacement() and HOW == "slow":
        pass_gate("start")
    if replacement() and HOW == "hangs":
        threading.Event().wait()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    side = dist.new_group([0, 1])
    net = nn.Linear(2, 2)
    job.attach([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
    loop = {"step": 0}
    job.register("loop", lambda: dict(loop), loop.update)
    while loop["step"] < 5:
        job.step_boundary()
        report.count(f"batch {loop['step']}")
        value = torch.full((4, 3), float(loop["step"]))
        elsewhere = loop["step"] == 4 and RANK == 1 and (replacement() or HOW == "mistake")
        if loop["step"] == 1 and RANK == 0 and HOW in ("slow", "late"):
            if HOW == "slow":
                pass_gate("late")
            else:
                threading.Event().wait()
        if elsewhere and HOW in ("group", "mistake"):
            dist.barrier(group=side)
        elif elsewhere and HOW == "message":
            dist.recv(value, 0)
        elif elsewhere and HOW == "ends":
            break
        dist.all_reduce(value)
        loop["step"] += 1
    report.finish({"value": str(value.sum().item())})
    if HOW != "ends":
        dist.barrier()


if __name__ == "__main__":
    main()
