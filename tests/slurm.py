"""A SLURM of one machine for tests: Debian's ``munged``, ``slurmctld`` and ``slurmd``, in a folder of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.ports import free_ports
from tests.support.processes import MARK, kill_marked

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "squeue", "setpriv")
#: Nothing of the machine is used: no cgroup, no accounting, no other user, and the processor count is as written here.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=500 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing() -> str | None:
    """Why SLURM cannot be started here; None if it can."""
    absent = [name for name in PROGRAMS if _find(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "slurmd starts jobs for others and must be run by root"
    return None


class Slurm:
    """A running SLURM.

    Attributes:
        env: what its commands need in their environment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def ask(self, name: str, *arguments: str) -> str:
        """Standard output of one of its commands."""
        return subprocess.run(
            [program(name), *arguments], env=os.environ | self.env, capture_output=True, text=True, timeout=30
        ).stdout.strip()

    def wait(self, what: str, done: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until ``done``.

        Raises:
            TimeoutError: after ``timeout_s`` seconds; says what was waited for and ends with the daemons' logs.
        """
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for {what}\n{self.logs()}")
            time.sleep(0.05)

    def idle(self) -> bool:
        """Whether the node is up and has no job, nor the rest of one."""
        return self.ask("sinfo", "--noheader", "--format=%T") == "idle"

    def logs(self) -> str:
        """The end of each daemon's log."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"-- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


@contextmanager
def running_slurm() -> Iterator[Slurm]:
    """A SLURM with one node of two processors, ended and removed with all that it started."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: the paths of sockets are limited
    slurm, mark = Slurm(folder), uuid.uuid4().hex
    environ = os.environ | slurm.env | {MARK: mark}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(kill_marked, mark)

        def daemon(name: str, *arguments: str) -> subprocess.Popen[bytes]:
            command = [program("setpriv"), "--pdeathsig", "KILL", program(name), *arguments]
            with (folder / f"{name}.out.log").open("wb") as log:
                child = subprocess.Popen(
                    command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            stack.callback(_end, child)
            return child

        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        ports = free_ports(2)
        host = socket.gethostname().partition(".")[0]
        (folder / "slurm.conf").write_text(CONF.format(host=host, controller=ports[0], daemon=ports[1], folder=folder))
        files = {name: folder / f"munge.{name}" for name in ("sock", "pid", "log", "seed")}
        munge = daemon(
            "munged",
            "--foreground",
            "--force",  # the folder belongs to root, not to a user of its own
            f"--key-file={key}",
            f"--socket={files['sock']}",
            f"--pid-file={files['pid']}",
            f"--log-file={files['log']}",
            f"--seed-file={files['seed']}",
        )
        slurm.wait("the socket of munged", lambda: files["sock"].exists() or munge.poll() is not None)
        daemons = {
            "munged": munge,
            "slurmctld": daemon("slurmctld", "-D"),
            "slurmd": daemon("slurmd", "-D", "-N", host),
        }

        def up() -> bool:
            for name, child in daemons.items():
                if child.poll() is not None:
                    raise RuntimeError(f"{name} ended with status {child.returncode}\n{slurm.logs()}")
            return slurm.idle()

        slurm.wait("the node to be idle", up)
        stack.callback(lambda: slurm.ask("scancel", "--signal=KILL", "--full", "--state=RUNNING"))
        yield slurm


def program(name: str) -> str:
    """Path of a program of SLURM's.

    Raises:
        FileNotFoundError: if it is not installed.
    """
    found = _find(name)
    if found is None:
        raise FileNotFoundError(name)
    return found


def _find(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin")


def _end(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(5)
