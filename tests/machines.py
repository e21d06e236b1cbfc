"""Machines for tests: network namespaces on one bridge, which can be killed whole, cut off and healed.

Namespaces share ``/proc``, ``/dev/shm`` and the disk; only the network is each one's own. A machine that is killed
goes silently: its link is down before its processes end, so that no connection is closed in an orderly way.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shared_core.cluster import jobdir, worker
from shared_core.cluster.process import state_of
from shared_core.testing.faults import Fault, dumps
from shared_core.testing.inject import FAULTS, STRUCK
from shared_core.testing.processes import MARK
from shared_core.testing.report import OUT, start_time
from shared_core.testing.runner import JobResult, collect
from shared_core.testing.warm import WarmLauncher

ROOT = Path(__file__).resolve().parents[1]


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if check and done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def unavailable() -> str:
    """Why machines cannot be made here; empty if they can."""
    name = f"swt{uuid.uuid4().hex[:8]}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("link", "add", f"{name}b", "type", "bridge")
            _ip("link", "del", f"{name}b")
        finally:
            _ip("netns", "del", name, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces cannot be made here (root and iproute2 are needed): {error}"
    return ""


class Machine:
    """One namespace.

    Attributes:
        name: of the namespace.
        address: its IPv4 address on the bridge.
    """

    def __init__(self, name: str, address: str, port: str) -> None:
        self.name, self.address = name, address
        self._port = port

    @property
    def path(self) -> str:
        """Handle of the namespace."""
        return f"/run/netns/{self.name}"

    def processes(self) -> list[int]:
        """All that run in it."""
        inode = os.stat(self.path).st_ino
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and os.stat(entry / "ns/net").st_ino == inode:
                    found.append(int(entry.name))
        return found

    def popen(self, *command: str, output: Path) -> subprocess.Popen[bytes]:
        """Run a program on it."""
        with open(output, "wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cut(self) -> None:
        """Take its link down."""
        _ip("link", "set", self._port, "down")

    def heal(self) -> None:
        """Take its link up again."""
        _ip("link", "set", self._port, "up")

    def kill(self) -> None:
        """The machine is gone: silently, with all that ran there and all that lay in its memory."""
        self.cut()
        for _ in range(100):
            pids = self.processes()
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        jobdir.sweep(Path("/dev/shm"))


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """So many machines that reach each other; everything is removed afterwards."""
    tag = uuid.uuid4().hex[:6]
    net = f"10.{200 + os.getpid() % 50}.{int(tag[:2], 16)}"
    bridge = f"sb{tag}"
    made: list[Machine] = []
    try:
        _ip("link", "add", bridge, "type", "bridge", "forward_delay", "0")
        _ip("link", "set", bridge, "up")
        for place in range(count):
            name, port, address = f"sn{tag}{place}", f"sv{tag}{place}", f"{net}.{place + 1}"
            _ip("netns", "add", name)
            made.append(Machine(name, address, port))
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", port, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield made
    finally:
        for machine in made:
            if machine.processes():
                machine.kill()
            _ip("netns", "del", machine.name, check=False)
            _ip("link", "del", machine._port, check=False)
        _ip("link", "del", bridge, check=False)


def alive(one: dict[str, Any]) -> bool:
    """Whether a process that reported itself still runs."""
    with contextlib.suppress(OSError):
        return start_time(one["pid"]) == one["start"] and state_of(one["pid"]) != "Z"
    return False


@contextlib.contextmanager
def etcd(on: Machine, folder: Path) -> Iterator[str]:
    """Debian's etcd with its old interface, which torchelastic speaks, on a machine; gives its endpoint."""
    client, peer = f"http://{on.address}:2379", f"http://{on.address}:2380"
    process = on.popen(
        *("etcd", "--enable-v2", "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
        output=folder / "etcd.txt",
    )
    try:
        deadline = time.monotonic() + 10.0
        while "ready to serve client requests" not in (folder / "etcd.txt").read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"etcd does not start: {(folder / 'etcd.txt').read_text()[-2000:]}")
            time.sleep(0.02)
        yield f"{on.address}:2379"
    finally:
        process.kill()
        process.wait()


class Cluster:
    """A job on several machines.

    Attributes:
        out: folder of its reports and events, which all machines share; each has its own output files.

    Args:
        warm: starts the launchers.
        on: the machines.
        out: an empty folder.
        script: path of the script.
        nnodes: places, or MIN:MAX; the machines beyond are spares.
        nproc: workers a machine.
        endpoint: where the machines meet; the first machine by default.
        backend: of the rendezvous.
        name: of the job; a new one by default.
        faults: faults to inject.
        args: of the script.
        options: more options of ``swiftrun``.
    """

    def __init__(
        self,
        warm: WarmLauncher,
        on: Sequence[Machine],
        out: Path,
        script: Path,
        *,
        nnodes: int | str = 2,
        nproc: int = 2,
        endpoint: str = "",
        backend: str = "c10d",
        name: str = "",
        faults: Sequence[Fault] = (),
        args: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        self.out, self.faults, self.machines = out, list(faults), list(on)
        self._warm = warm
        self._ended = False
        self._begin = time.monotonic()
        self._mark = os.environ.get(MARK, "") + uuid.uuid4().hex[:8]
        env = {name: value for name, value in os.environ.items() if not name.startswith("SWIFT_")}
        env |= {OUT: str(out), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: self._mark}
        env |= {FAULTS: dumps(self.faults), STRUCK: str(out / "struck.jsonl")}
        endpoint = endpoint or f"{on[0].address}:29400"
        most = int(str(nnodes).rpartition(":")[2])
        self.argv = [f"--nnodes={nnodes}", f"--nproc-per-node={nproc}", f"--spare-nodes={max(0, len(on) - most)}"]
        self.argv += [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={name or self._mark}"]
        self.argv += [f"--events={out / 'events.jsonl'}", *options, str(script), *args]
        names = [f"{machine.address} {machine.name}" for machine in on]
        (out / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        warm.start_all(
            [
                {
                    "argv": self.argv,
                    "env": env | {"SWIFT_TEST_MACHINE": str(place)},
                    "cwd": str(out),
                    "stdout": str(out / f"stdout.{place}.txt"),
                    "stderr": str(out / f"stderr.{place}.txt"),
                    "netns": machine.path,
                    "hosts": str(out / "hosts"),
                }
                for place, machine in enumerate(on)
            ]
        )

    @property
    def pids(self) -> list[int]:
        """The launchers, one for each machine."""
        return self._warm.pids

    def said(self, place: int) -> str:
        """What a machine's launcher wrote to stderr."""
        path = self.out / f"stderr.{place}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, what: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait for something.

        Raises:
            AssertionError: if it does not come.
        """
        deadline = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > deadline:
                raise AssertionError(f"it did not come within {timeout_s} s\n{self.result(124, []).tail()}")
            time.sleep(0.005)

    def place_of(self, rank: int) -> int:
        """Which machine has the newest worker of a rank."""
        pid = self.workers(rank)[-1]["pid"]
        return next(place for place, machine in enumerate(self.machines) if pid in machine.processes())

    def workers(self, *ranks: int) -> list[dict[str, Any]]:
        """Processes that have held these ranks (all if none is given); see :func:`alive`."""
        path = self.out / "workers.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [one for line in lines if (one := json.loads(line))["rank"] in ranks or not ranks]

    def tops(self, rank: int) -> int:
        """Batch tops that a rank has passed."""
        folders = [one["job_dir"] for one in self.workers(rank)]
        progress = worker.read_progress(Path(folders[-1]) / f"rank{rank}" / "progress") if folders else None
        return progress[0] if progress else 0

    def finish(self, timeout_s: float = 40.0) -> tuple[JobResult, list[int]]:
        """Wait for the end: the result (its status is the worst of the machines that were not killed) and each
        machine's status."""
        ended = self._warm.wait_all(timeout_s)
        if ended is None:
            for one in self.workers():
                if alive(one):
                    os.kill(one["pid"], signal.SIGABRT)  # prints where it is
            time.sleep(0.3)
            stacks = self.result(124, []).tail(200)
            self.stop()
            raise AssertionError(f"no end within {timeout_s} s\n{stacks}")
        self._ended = True
        statuses, orphans = ended
        jobdir.sweep(Path("/dev/shm"))
        worst = max((status for status in statuses if status != -signal.SIGKILL), default=0)
        return self.result(worst, orphans), statuses

    def stop(self) -> None:
        """Kill what is left."""
        if not self._ended:
            self._ended = True
            for machine in self.machines:
                machine.kill()
            self._warm.wait_all(30.0)
        jobdir.sweep(Path("/dev/shm"))

    def result(self, status: int, orphans: list[str]) -> JobResult:
        """What the job left behind so far."""
        result = JobResult(
            command=["swiftrun", *self.argv],
            status=status,
            stdout="",
            stderr="\n".join(f"--- machine {place}\n{self.said(place)}" for place in range(len(self.machines))),
            out=self.out,
            duration_s=time.monotonic() - self._begin,
            faults=self.faults,
            orphans=orphans,
        )
        collect(result)
        return result
