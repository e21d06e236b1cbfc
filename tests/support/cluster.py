"""Jobs on the machines of :mod:`tests.support.namespaces`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_core.faults.inject import STRUCK
from shared_core.faults.spec import Fault, dumps
from shared_core.protocol import progress_file
from shared_core.system import jobdir
from shared_core.system.process import state_of
from shared_core.system.secret import VARIABLE
from tests.support.namespaces import Machine, write_hosts
from tests.support.processes import MARK
from tests.support.report import OUT, start_time
from tests.support.runner import JobResult, collect
from tests.support.server import ROOT
from tests.support.warm import WarmLauncher


def alive(one: dict[str, Any]) -> bool:
    """Whether a process that reported itself still runs."""
    with contextlib.suppress(OSError):
        return start_time(one["pid"]) == one["start"] and state_of(one["pid"]) != "Z"
    return False


class Cluster:
    """A job on several machines.

    Attributes:
        out: folder of its reports and events, which all machines share; each has its own output files.

    Args:
        warm: starts the launchers.
        on: the machines.
        out: an empty folder.
        script: path of the script; of no meaning with ``command``.
        nnodes: places, or MIN:MAX; the machines beyond are spares.
        nproc: workers a machine.
        endpoint: where the machines meet; the first machine by default.
        backend: of the rendezvous.
        name: of the job; a new one by default.
        faults: faults to inject.
        args: of the script.
        options: more options of ``swiftrun``.
        command: all arguments of ``swiftrun``, in place of those above; the machines are called node1, node2, ...
        called: names of the machines, in place of those.
        env: more environment.
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
        command: Sequence[str] = (),
        called: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.out, self.faults, self.machines = out, list(faults), list(on)
        self._warm = warm
        self._ended = False
        self._begin = time.monotonic()
        self._mark = os.environ.get(MARK, "") + uuid.uuid4().hex[:8]
        env = {name: value for name, value in os.environ.items() if not name.startswith("SWIFT_")} | dict(env or {})
        env |= {OUT: str(out), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: self._mark}
        env[STRUCK] = str(out / "struck.jsonl")
        (out / "faults.json").write_text(dumps(self.faults))
        endpoint = endpoint or f"{on[0].address}:29400"
        most = int(str(nnodes).rpartition(":")[2])
        self.argv = [f"--nnodes={nnodes}", f"--nproc-per-node={nproc}", f"--spare-nodes={max(0, len(on) - most)}"]
        self.argv += [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={name or self._mark}"]
        self.argv += [
            f"--faults={out / 'faults.json'}",
            f"--events={out / 'events.jsonl'}",
            *options,
            str(script),
            *args,
        ]
        self.argv = list(command) or self.argv
        secret = out / "secret"
        secret.write_text(uuid.uuid4().hex)
        secret.chmod(0o600)
        env[VARIABLE] = str(secret)
        hosts = write_hosts(on, out / "hosts", called)
        warm.start_all(
            [
                {
                    "argv": self.argv,
                    "env": env | {"SWIFT_TEST_MACHINE": str(place)},
                    "cwd": str(out),
                    "stdout": str(out / f"stdout.{place}.txt"),
                    "stderr": str(out / f"stderr.{place}.txt"),
                    "netns": machine.path,
                    "hosts": str(hosts),
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

    def boundaries(self, rank: int) -> int:
        """Step boundaries that a rank has passed."""
        folders = [one["job_dir"] for one in self.workers(rank)]
        progress = progress_file.read_progress(Path(folders[-1]) / f"rank{rank}" / "progress") if folders else None
        return progress[0] if progress else 0

    def kept(self, rank: int) -> list[str]:
        """Names of the step boundaries for which a rank keeps what it has published."""
        folder = Path(self.workers(rank)[-1]["job_dir"]) / f"rank{rank}"
        return sorted(path.name for path in folder.rglob("boundary.*") if path.suffix != ".tmp")

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
