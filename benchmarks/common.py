"""What the benchmarks share: rows, tables, progress, and the processes of a job."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.namespaces import Machine, write_hosts

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 4
#: Options of torchft's lighthouse: its own defaults, and the shortest heartbeat time-out that held on two cores.
TORCHFT_HEARTBEAT_MS = 5000


@dataclass(frozen=True)
class Row:
    """One measured value.

    Attributes:
        case: what was measured.
        metric: which property of it.
        value: the measurement; ``None`` where it could not be taken.
        unit: unit of ``value``.
        target: what was aimed at; ``None`` where there is none.
        holds: whether the target is met; ``None`` where there is none.
    """

    case: str
    metric: str
    value: float | None
    unit: str
    target: float | None = None
    holds: bool | None = None


def at_most(case: str, metric: str, value: float | None, unit: str, target: float | None) -> Row:
    """A row whose value must not exceed ``target``, if there is one."""
    holds = None if target is None else value is not None and value <= target
    return Row(case, metric, value, unit, target, holds)


def at_least(case: str, metric: str, value: float | None, unit: str, target: float | None) -> Row:
    """A row whose value must reach ``target``, if there is one."""
    holds = None if target is None else value is not None and value >= target
    return Row(case, metric, value, unit, target, holds)


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of what was measured in the same rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one line each under a header."""
    lines = [("case", "metric", "value", "unit", "target", "holds")]
    for row in rows:
        target = "" if row.target is None else f"{row.target:g}"
        holds = "" if row.holds is None else ("yes" if row.holds else "NO")
        value = "-" if row.value is None else f"{row.value:.4g}"
        lines.append((row.case, row.metric, value, row.unit, target, holds))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


#: Sizes of a run: a case is run by all that are at least its own, and what differs by size is a tuple of three.
QUICK, USUAL, FULL = range(3)


def arguments(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark takes: ``json`` (a path or ``None``) and ``size``."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.set_defaults(size=USUAL)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    for option, size, what in (
        ("--quick", QUICK, "fewer repetitions and cases: about a minute"),
        ("--full", FULL, "all repetitions and cases; without it about five minutes on two cores"),
    ):
        parser.add_argument(option, dest="size", action="store_const", const=size, help=what)
    return parser


def begin(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with the command and the load before it. SIGTERM then ends this program like an exception, so that
    the jobs it has started are ended too.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    argv = list(sys.argv[1:] if argv is None else argv)
    at = argv.index("--json") if "--json" in argv else len(argv)
    command = shlex.join([parser.prog.rpartition(".")[2], *argv[:at], *argv[at + 2 :]])
    return parser.parse_args(argv, argparse.Namespace(command=command, load=_load(), began=time.monotonic()))


def _load() -> float:
    """Processes of this machine that run or want to, besides this one: the mean over a second. The system's own average
    over a minute would count the benchmark before this one.
    """
    samples = []
    for _ in range(20):
        time.sleep(0.05)
        samples.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1)
    return statistics.mean(samples)


def machine() -> dict[str, str | int]:
    """What rows depend on; memory in GB."""
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), ":")
    return {
        "processor": cpu.partition(":")[2].strip() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def finish(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """Print the table, and write it where ``options`` of :func:`begin` say so; the exit status is 0 unless a target was
    missed.
    """
    print()
    print(table(rows), flush=True)
    if options.json is not None:
        git = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=8"]
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        run = {"command": options.command, "commit": commit, "date": time.strftime("%Y-%m-%d")}
        run |= {"machine": machine(), "load": [round(load, 1) for load in (options.load, _load())]}
        run |= {"seconds": round(time.monotonic() - options.began)}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(run | {"rows": [asdict(row) for row in rows]}, indent=2) + "\n")
        print(f"\nwritten to {options.json}")
    missed = [row for row in rows if row.holds is False]
    for row in missed:
        print(f"target missed: {row.case}, {row.metric}")
    return 1 if missed else 0


def say(text: str) -> None:
    """One line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def has_torchft() -> bool:
    """Whether torchft is installed; says so in one line where it is not."""
    if importlib.util.find_spec("torchft") is not None:
        return True
    say("torchft is not installed, its rows are left out; to have them: pip install 'swift-recovery[torchft]'")
    return False


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is removed afterwards, with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def lighthouse(min_replicas: int, heartbeat_timeout_ms: int = TORCHFT_HEARTBEAT_MS) -> Iterator[str]:
    """torchft's coordinator, in a process of its own; yields its address."""
    code = (
        "import sys, torchft.coordination as c\n"
        "server = c.LighthouseServer('127.0.0.1:0', int(sys.argv[1]), heartbeat_timeout_ms=int(sys.argv[2]))\n"
        "print(server.address(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(min_replicas), str(heartbeat_timeout_ms)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().decode().strip().rpartition(":")[2]
        if not port:
            raise RuntimeError("torchft's lighthouse did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


class Workers:
    """The processes of one job under one system; a context manager that leaves none of them.

    Args:
        system: ``swift``, ``accelerate`` and ``shared`` (which are ``swift`` too), ``torchrun``, ``checkfreq``,
            ``commit`` or ``torchft``.
        script: path of the worker script.
        args: its arguments.
        out: folder for the log.
        standbys: standbys of ``swift``.
        restarts: how often torchrun may start all workers again.
        env: more environment.
        machines: those of a ``swift`` job on several, one more than it has places.
        nproc: number of workers.
        options: more options of swiftrun.
    """

    def __init__(
        self,
        system: str,
        script: Path,
        args: Sequence[str],
        out: Path,
        *,
        standbys: int = 1,
        restarts: int = 0,
        env: Mapping[str, str] | None = None,
        machines: Sequence[Machine] = (),
        nproc: int = WORKERS,
        options: Sequence[str] = (),
    ) -> None:
        self.system, self.nproc, self.script, self.args = system, nproc, script, list(args)
        self.log = out / f"{system}.log"
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("SWIFT_")}
        self.env["OMP_NUM_THREADS"] = "1"
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # without it torchrun cannot restart gloo jobs
        self.env |= dict(env or {})
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.machines = list(machines)
        if machines:
            nnodes, self.hosts = len(machines) - 1, write_hosts(machines, out / "hosts")
            command = ["-m", "shared_core.cli.swiftrun", f"--nnodes={nnodes}", "--spare-nodes=1"]
            command += [f"--nproc-per-node={nproc // nnodes}", f"--standbys={standbys}", "--rdzv-backend=c10d"]
            command += [f"--rdzv-endpoint={machines[0].address}:29400", f"--rdzv-id={uuid.uuid4().hex}"]
            self.command = [*command, f"--events={out / 'events.jsonl'}", str(script), *self.args]
            for place in range(len(machines)):
                self.start_machine(place)
        elif system in ("swift", "accelerate", "shared"):
            command = ["-m", "shared_core.cli.swiftrun", f"--nproc-per-node={nproc}", f"--standbys={standbys}"]
            command += options
            self._launch(-1, [*command, f"--events={out / 'events.jsonl'}", str(script), *self.args], {})
        elif system in ("torchrun", "checkfreq"):
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
            self._launch(-1, [*command, f"--max-restarts={restarts}", str(script), *self.args], {})
        else:
            for rank in range(nproc):
                self.start_replica(rank)

    def start_replica(self, rank: int) -> None:
        """Start (again) the one process of a rank, where nobody else does."""
        self._launch(rank, [str(self.script), *self.args], {"RANK": str(rank), "WORLD_SIZE": str(self.nproc)})

    def start_machine(self, place: int) -> None:
        """Start (again) the launcher of a machine."""
        self._launch(-1 - place, self.command, {}, self.machines[place])

    def _launch(
        self, key: int, arguments: Sequence[str], env: Mapping[str, str], machine: Machine | None = None
    ) -> None:
        command = [sys.executable, *arguments]
        with self.log.open("ab") as log:
            self.processes[key] = subprocess.Popen(
                machine.command(*command, hosts=self.hosts) if machine is not None else command,
                env=self.env | dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def check(self) -> None:
        """Make sure that the job is running.

        Raises:
            RuntimeError: it has ended, with the end of its log.
        """
        if -1 not in self.processes:
            return
        status = self.processes[-1].poll()
        if status is not None:
            raise RuntimeError(f"the {self.system} job has ended with status {status}\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait(self, timeout_s: float) -> int:
        """Wait for a normal end; the first status that is not 0, or 0.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """
        deadline = time.monotonic() + timeout_s
        statuses = [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes.values()]
        return next((status for status in statuses if status), 0)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Line:
    """JSON messages over a Unix socket, one a line; both ends block without using the processor while they wait."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.file = connection.makefile("rwb")

    @classmethod
    def of_worker(cls, address: str, system: str) -> Line:
        """A worker's to its benchmark, which hears who it is (:mod:`benchmarks.turns`)."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        line = cls(connection)
        line.send({"system": system, "rank": int(os.environ["RANK"])})
        return line

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message."""
        self.file.write(json.dumps(message).encode() + b"\n")
        self.file.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            EOFError: the other side has gone.
        """
        line = self.file.readline()
        if not line:
            raise EOFError("the other side has gone")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Close the connection."""
        self.file.close()
        self.connection.close()
