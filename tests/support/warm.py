"""``swiftrun`` without waiting for imports: a server that has them forks the launcher and the zygotes of each job.

A job started here runs the same code as one started from a shell; only the interpreters are not fresh. What a job
leaves behind is adopted by the server, which names and ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from typing import IO, Any

from shared_core.launcher.standby import Standby
from shared_core.protocol.request import SINGLE_THREADED
from shared_core.system import process
from shared_core.worker.start import zygote
from tests.support.processes import describe
from tests.support.server import WARM, Server, end_as, say

PRELOAD = (
    "torch",
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.utils.data",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "shared_core.cli.swiftrun",
    "shared_core.launcher.agent",
    "shared_core.launcher.rendezvous",
    "shared_core.launcher.logs",
    "lightning.pytorch",
    "fsspec.implementations.chained",
    "torchmetrics",
    "lightning_swift",
    "accelerate",
    "accelerate_swift",
    "transformers.models.gpt2.modeling_gpt2",
    "shared_core.pipeline.warm",
)
#: Seconds that what a job started has to be gone in, once its launcher is.
GRACE_S = 1.0


class WarmLauncher(Server):
    """Starts jobs one after the other; :meth:`close` ends it."""

    def __init__(self) -> None:
        super().__init__(WARM)
        #: Process ids of the newest job's launchers.
        self.pids: list[int] = []

    @property
    def pid(self) -> int:
        """Process id of the newest job's launcher."""
        return self.pids[0]

    def start(self, argv: list[str], *, env: dict[str, str], cwd: str, stdout: str, stderr: str) -> None:
        """Start ``swiftrun`` with arguments ``argv`` and exactly the environment ``env``."""
        self.start_all([{"argv": argv, "env": env, "cwd": cwd, "stdout": stdout, "stderr": stderr}])

    def start_all(self, launchers: list[dict[str, Any]]) -> None:
        """Start the launchers of one job; each is given what :meth:`start` takes, and ``netns``, the path of a network
        namespace to be in, if it is to have one of its own, or
        ``setup``, shell commands that mount what only this job sees."""
        self.ask(launchers)
        self.pids = list(self.answer()["pids"])

    def wait(self, timeout_s: float) -> tuple[int, list[str]] | None:
        """Exit status (negative for a signal) and processes the job left (killed by now); None when time is up."""
        ended = self.wait_all(timeout_s)
        return None if ended is None else (ended[0][0], ended[1])

    def wait_all(self, timeout_s: float) -> tuple[list[int], list[str]] | None:
        """As :meth:`wait`, with the status of each launcher."""
        answer = self.answer(timeout_s)
        return None if answer is None else (list(answer["statuses"]), list(answer["orphans"]))


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Start the launchers of jobs, one job after the other."""
    process.become_subreaper()
    for line in requests:
        pids = []
        for request in json.loads(line):
            pid = os.fork()
            if pid == 0:
                requests.close()
                answers.close()
                end_as(partial(_launch, request))
            pids.append(pid)
        say(answers, {"pids": pids})
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        say(answers, {"statuses": statuses, "orphans": _end_orphans()})


def _end_orphans() -> list[str]:
    """Wait for what the job left, which is this process' by now; what stays is killed and described."""
    deadline = time.monotonic() + GRACE_S
    left: list[str] = []
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        alive = process.children()
        if not alive:
            return left
        if time.monotonic() > deadline:
            left += [describe(pid) for pid in alive]
            for pid in alive:
                process.kill_group(pid)
        time.sleep(0.005)


def _launch(request: dict[str, Any]) -> None:
    """Become ``swiftrun``, as the shell would start it."""
    os.setsid()
    if request.get("netns"):
        _enter_namespace(request["netns"], request.get("hosts", ""))
    if request.get("setup"):
        _own_mounts()
        subprocess.run(["sh", "-ec", request["setup"]], check=True)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for target, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        fd = os.open(path, flags, 0o600)
        os.dup2(fd, target)
        os.close(fd)
    process.become_subreaper()  # zygotes come as orphans
    Standby.spawn = staticmethod(_Nursery().spawn)
    from shared_core.cli import swiftrun

    sys.argv = ["swiftrun", *request["argv"]]
    swiftrun.main()


def _enter_namespace(path: str, hosts: str) -> None:
    """Be on the machine of a network namespace, with ``hosts`` as its ``/etc/hosts``: torch looks up its peers' names,
    and there is no name server to ask."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as handle:
        ok = libc.setns(handle.fileno(), 0x40000000) == 0  # CLONE_NEWNET
    if ok and hosts:
        _own_mounts()
        ok = libc.mount(hosts.encode(), b"/etc/hosts", None, ctypes.c_ulong(1 << 12), None) == 0  # MS_BIND
    if not ok:
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {path}")


def _own_mounts() -> None:
    """See file systems that nobody else sees."""
    libc, private = ctypes.CDLL(None, use_errno=True), (1 << 18) | (1 << 14)  # MS_PRIVATE with MS_REC
    if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, ctypes.c_ulong(private), None):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "cannot create a mount namespace")


class _Nursery:
    """A child of the launcher, with one thread, that forks its zygotes: the launcher itself has threads by then."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        launcher = os.getpid()
        if os.fork() == 0:
            self._channel.close()
            _breed(theirs, launcher)  # a worker leaves it with SystemExit, and ends as a program does
            os._exit(0)
        theirs.close()

    def spawn(self, channel: socket.socket, env: dict[str, str]) -> int:
        """As ``Standby.spawn``."""
        socket.send_fds(self._channel, [len(raw := json.dumps(env).encode()).to_bytes(4, "big")], [channel.fileno()])
        self._channel.sendall(raw)
        return int.from_bytes(self._channel.recv(4), "big")


def _breed(channel: socket.socket, launcher: int) -> None:
    stream = channel.makefile("rb")
    while True:
        head, fds, _, _ = socket.recv_fds(channel, 4, 1)
        if not head:
            return
        env = json.loads(stream.read(int.from_bytes(head, "big")))
        pid_read, pid_write = os.pipe()
        middle = os.fork()
        if middle == 0:
            orphaned, alive = os.pipe()
            if (pid := os.fork()) != 0:
                os.write(pid_write, pid.to_bytes(4, "big"))
                os._exit(0)
            os.close(alive)
            os.read(orphaned, 1)  # ends when the process between is gone and the launcher is the parent
            for fd in (orphaned, pid_read, pid_write):
                os.close(fd)
            channel.close()
            _become_zygote(fds[0], launcher, env)
        os.close(pid_write)
        os.close(fds[0])
        channel.sendall(os.read(pid_read, 4))
        os.close(pid_read)
        os.waitpid(middle, 0)


def _become_zygote(fd: int, launcher: int, env: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env | SINGLE_THREADED)
    while os.getppid() != launcher:
        time.sleep(0.0001)  # the kernel is between closing the pipe and handing the orphan over
    sys.argv = ["zygote", str(fd), str(launcher)]
    zygote.main()  # returns in a worker whose program has ended
    raise SystemExit(0)
