"""Runs a script on plain gloo without this product: the reference a run with failures is compared with.

The server process imports torch and Lightning once and forks the workers of each job, with the environment that
``torchrun`` would give them. ``python -m torch.distributed.run`` would import them again in every worker.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import runpy
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import IO, Any

from tests.support.ports import free_ports
from tests.support.server import PLAIN, Server, end_as, say

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "lightning.pytorch",
    "torchmetrics",
    "accelerate",
    "transformers.models.gpt2.modeling_gpt2",
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",
    "shared_core.loop",
    "tests.support.report",
)


class PlainLauncher(Server):
    """Starts jobs of plain workers; :meth:`close` ends it."""

    def __init__(self) -> None:
        super().__init__(PLAIN)

    def run(
        self,
        script: str,
        args: list[str],
        *,
        nproc: int,
        env: dict[str, str],
        cwd: str,
        stdout: str,
        stderr: str,
        timeout_s: float,
    ) -> int:
        """Run ``script`` in ``nproc`` workers.

        Returns:
            0, or the first non-zero exit status (negative for a signal, 124 after ``timeout_s`` seconds).
        """
        self.ask(
            {
                "script": script,
                "args": args,
                "nproc": nproc,
                "env": env,
                "cwd": cwd,
                "stdout": stdout,
                "stderr": stderr,
                "timeout_s": timeout_s,
            }
        )
        return int(self.answer()["status"])


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Run jobs one after the other."""
    os.environ.pop("PYTHONHASHSEED")  # stock has none
    for line in requests:
        say(answers, {"status": _run(json.loads(line))})


def _run(request: dict[str, Any]) -> int:
    port = free_ports()[0]
    pids = []
    for rank in range(request["nproc"]):
        pid = os.fork()
        if pid == 0:
            end_as(partial(_worker, request, rank, port))
        pids.append(pid)
    return _wait(pids, request["timeout_s"])


def _wait(pids: list[int], timeout_s: float) -> int:
    """Wait for all workers; at the first failure, or when time is up, the others are killed."""
    deadline, first, left = time.monotonic() + timeout_s, 0, set(pids)
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > deadline:
                first = first or 124
            time.sleep(0.005)
        elif pid in left:
            left.discard(pid)
            first = first or os.waitstatus_to_exitcode(status)
        if first == 124:
            for other in left:
                os.kill(other, signal.SIGABRT)  # prints where each thread is
            time.sleep(0.5)
        if first:
            for other in left:
                os.kill(other, signal.SIGKILL)
            while left:
                left.discard(os.waitpid(-1, 0)[0])
    return first


def _worker(request: dict[str, Any], rank: int, port: int) -> None:
    """Become a worker: environment, files and arguments as ``torchrun`` gives them; run the script."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nproc = str(request["nproc"])
    os.environ.update(request["env"])
    os.environ.setdefault("TMPDIR", request["cwd"])
    tempfile.tempdir = None
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=nproc,
        LOCAL_WORLD_SIZE=nproc,
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=nproc,
        ROLE_NAME="default",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="plain",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
    )
    for target, name in ((1, "stdout"), (2, "stderr")):
        fd = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, target)
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    os.chdir(request["cwd"])
    sys.argv = [request["script"], *request["args"]]
    sys.path[0] = str(Path(request["script"]).parent)
    if "lightning_utilities.core.rank_zero" in sys.modules:
        # It took rank 0 when it was imported, before there was a rank.
        sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank = rank
    _keep_ended_groups()
    runpy.run_path(request["script"], run_name="__main__")


def _keep_ended_groups() -> None:
    """Keep a reference to each group that the script ends, for the same reason as ``report.end_group``.

    Accelerate and Lightning end the group before the model is let go of. Now and then stock hangs there.
    """
    import torch.distributed as dist

    end, kept = dist.destroy_process_group, []

    def end_and_keep(group: dist.ProcessGroup | None = None) -> None:
        kept.append(dist.group.WORLD if group is None else group)
        end(group)

    dist.destroy_process_group = end_and_keep
