"""Run a job with faults, run it without, and compare the two rank by rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared_core.events import Event, read_events
from shared_core.faults.inject import STRUCK, read_struck
from shared_core.faults.spec import EXIT_CODE, FLIP_VALUE, FLIPS, REFUSALS, SLOW, Fault, dumps
from tests.support.plain import PlainLauncher
from tests.support.processes import MARK, describe, kill_marked, wait_gone
from tests.support.report import OUT, start_time
from tests.support.server import ROOT
from tests.support.warm import WarmLauncher

BASELINE = "SWIFT_BASELINE"
LAUNCHERS = ("swiftrun", "plain", "torchrun")


class Mismatch(AssertionError):
    """A run differs from its reference, or a survivor did not survive."""


@dataclass
class JobResult:
    """What a job left behind.

    Attributes:
        command: how it was started.
        status: exit status, negative for a signal; 124 if it ran out of time.
        stdout: standard output of all processes.
        stderr: standard error of all processes.
        out: folder the job wrote into.
        duration_s: wall-clock seconds.
        faults: faults asked for.
        events: events of ``events.jsonl``; empty for a plain run.
        struck: records of the faults that struck (see :func:`shared_core.faults.inject.read_struck`).
        workers: one record for each process that ran the script, in order of their starts.
        reports: final report of each rank that finished.
        orphans: processes that outlived the job; they have been killed.
    """

    command: list[str]
    status: int
    stdout: str
    stderr: str
    out: Path
    duration_s: float
    faults: list[Fault] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    struck: list[dict[str, Any]] = field(default_factory=list)
    workers: list[dict[str, Any]] = field(default_factory=list)
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    orphans: list[str] = field(default_factory=list)

    def kinds(self, kind: str) -> list[Event]:
        """Events of one kind, in order."""
        return [event for event in self.events if event.kind == kind]

    def told(self, words: str) -> list[str]:
        """Lines on the console with these words."""
        return [line for line in self.stderr.splitlines() if words in line]

    def struck_ranks(self) -> set[int]:
        """Ranks that a fault struck."""
        return {record["fault"]["rank"] for record in self.struck}

    def tail(self, lines: int = 60) -> str:
        """Last lines of the output and the timeline of events, for a message."""
        start = self.events[0].time if self.events else 0.0
        timeline = [f"{e.time - start:8.3f} {e.kind} rank {e.rank} gen {e.generation} {e.fields}" for e in self.events]
        return "\n".join(
            [
                f"command: {' '.join(self.command)}",
                f"status {self.status} after {self.duration_s:.1f} s, faults {[str(f) for f in self.faults]}",
                "--- stdout",
                *self.stdout.splitlines()[-lines:],
                "--- stderr",
                *self.stderr.splitlines()[-lines:],
                "--- events",
                *timeline[-lines:],
            ]
        )


def run_job(
    script: str | os.PathLike[str],
    *,
    nproc: int,
    out: str | os.PathLike[str],
    faults: Sequence[Fault] = (),
    launcher: str = "swiftrun",
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    launcher_args: Sequence[str] = (),
    standbys: int = 1,
    timeout_s: float = 60.0,
    plain: PlainLauncher | None = None,
    warm: WarmLauncher | None = None,
) -> JobResult:
    """Run ``script`` in ``nproc`` workers and collect what it reports.

    Args:
        script: path of the script; it reports through :class:`tests.support.report.Report`.
        nproc: number of workers.
        out: empty folder for the job's reports, logs and events.
        faults: faults to inject.
        launcher: ``swiftrun``, ``plain`` (plain gloo, no launcher program) or ``torchrun`` (plain gloo too); the last
            two set ``SWIFT_BASELINE=1``, by which scripts choose the stock strategy.
        env: more environment; ``SWIFT_BASELINE`` set to nothing has the product used under ``torchrun``.
        args: arguments of the script.
        launcher_args: more arguments of the launcher.
        standbys: standbys that ``swiftrun`` keeps.
        timeout_s: seconds after which all processes of the job are killed.
        plain: server to use for ``plain``; one is started for this job if none is given.
        warm: server to use for ``swiftrun``; a fresh interpreter is started if none is given.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"unknown launcher {launcher!r}; one of {', '.join(LAUNCHERS)}")
    out = Path(out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    script = str(Path(script).resolve())
    mark = os.environ.get(MARK, "") + uuid.uuid4().hex[:8]
    job_env = {
        OUT: str(out),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    begin = time.monotonic()
    if launcher == "plain":
        job_env[BASELINE] = "1"
        command = [script, *args]
        if plain is None:
            with PlainLauncher() as own:
                status = _run_plain(own, command, nproc, job_env, out, timeout_s)
        else:
            status = _run_plain(plain, command, nproc, job_env, out, timeout_s)
        orphans: list[str] = []
    else:
        full_env = {k: v for k, v in os.environ.items() if not k.startswith("SWIFT_")} | job_env
        full_env[MARK] = mark
        if launcher == "torchrun":
            full_env.setdefault(BASELINE, "1")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        else:
            full_env[STRUCK] = str(out / "struck.jsonl")
            # Unless a test asks for them: on a loaded machine any script may start slowly enough.
            full_env.setdefault("SWIFT_RECOVERY_STANDBY_PREPARED", "0")
            full_env.setdefault("SWIFT_RECOVERY_STRAGGLERS", "off")  # there, any rank is slow now and then
            (out / "faults.json").write_text(dumps(faults))
            command = [sys.executable, "-m", "shared_core.cli.swiftrun", f"--nproc-per-node={nproc}"]
            command += [f"--standbys={standbys}", f"--events={out / 'events.jsonl'}", f"--faults={out / 'faults.json'}"]
        command += [*launcher_args, script, *args]
        if launcher == "swiftrun" and warm is not None:
            status, orphans = _run_warm(warm, command[3:], full_env, out, timeout_s)
        else:
            status, left = _run_command(command, full_env, out, mark, timeout_s)
            orphans = [describe(pid) for pid in left]
    result = JobResult(
        command=command,
        status=status,
        stdout=_read(out / "stdout.txt"),
        stderr=_read(out / "stderr.txt"),
        out=out,
        duration_s=time.monotonic() - begin,
        faults=list(faults),
        orphans=orphans,
    )
    collect(result)
    return result


def collect(result: JobResult) -> None:
    """Read what the job wrote into its folder."""
    out = result.out
    result.struck = read_struck(out / "struck.jsonl")
    if (out / "events.jsonl").exists():
        result.events = list(read_events(out / "events.jsonl"))
    result.workers = _workers(out)
    for path in sorted(out.glob("rank*.json")):
        report = json.loads(path.read_text())
        result.reports[report["rank"]] = report


def _run_plain(
    plain: PlainLauncher, command: list[str], nproc: int, env: dict[str, str], out: Path, timeout_s: float
) -> int:
    return plain.run(
        command[0],
        command[1:],
        nproc=nproc,
        env=env,
        cwd=str(out),
        stdout=str(out / "stdout.txt"),
        stderr=str(out / "stderr.txt"),
        timeout_s=timeout_s,
    )


def _run_command(
    command: list[str], env: dict[str, str], out: Path, mark: str, timeout_s: float
) -> tuple[int, list[int]]:
    """Exit status, and the marked processes that were left (killed by now)."""
    with open(out / "stdout.txt", "wb") as stdout, open(out / "stderr.txt", "wb") as stderr:
        process = subprocess.Popen(
            command, env=env, cwd=out, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = 124
            _end(process, out)
        except BaseException:
            process.kill()
            process.wait()
            kill_marked(mark)
            raise
    if status == 124:
        kill_marked(mark)
        return status, []
    # The launcher is gone; its workers should be too. They are given the time of a process's own exit, no more.
    orphans = wait_gone(mark, 1.0)
    kill_marked(mark)
    return status, orphans


def _run_warm(
    warm: WarmLauncher, argv: list[str], env: dict[str, str], out: Path, timeout_s: float
) -> tuple[int, list[str]]:
    """As :func:`_run_command`, with a launcher that has its imports already."""
    warm.start(argv, env=env, cwd=str(out), stdout=str(out / "stdout.txt"), stderr=str(out / "stderr.txt"))
    ended = warm.wait(timeout_s)
    if ended is not None:
        return ended
    _print_stacks(out)
    os.kill(warm.pid, signal.SIGTERM)
    if warm.wait(10.0) is None:
        os.kill(warm.pid, signal.SIGKILL)
        warm.wait(30.0)
    return 124, []


def _print_stacks(out: Path) -> None:
    """Have the workers of a job that ran out of time print where they are."""
    for worker in _workers(out):
        with contextlib.suppress(OSError):
            if start_time(worker["pid"]) == worker["start"]:
                os.kill(worker["pid"], signal.SIGABRT)
    time.sleep(0.3)


def _end(process: subprocess.Popen[bytes], out: Path) -> None:
    """End a launcher that ran out of time, which may clean up."""
    _print_stacks(out)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _workers(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _read(out / "workers.jsonl").splitlines()]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def compare(result: JobResult, reference: JobResult, parts: Sequence[str] | None = None) -> None:
    """Check that a run ended bit for bit like its reference, on every rank.

    Args:
        result: the run with faults.
        reference: the run without.
        parts: parts of the digest that are compared; all of them by default.

    Raises:
        Mismatch: saying which part of which rank differs, or which run did not end well.
    """
    for what, job in (("the reference run", reference), ("the run", result)):
        if job.status != 0:
            raise Mismatch(f"{what} ended with status {job.status}\n{job.tail()}")
    if not reference.reports or set(result.reports) != set(reference.reports):
        ranks = f"ranks {sorted(result.reports)} reported, expected {sorted(reference.reports)}"
        raise Mismatch(f"{ranks}\n{result.tail()}")
    wrong = []
    for rank, expected in sorted(reference.reports.items()):
        got, want = result.reports[rank]["digests"], expected["digests"]
        for part in parts if parts is not None else sorted(want.keys() | got.keys()):
            if got.get(part) != want.get(part):
                struck = " (struck)" if rank in result.struck_ranks() else ""
                wrong.append(f"rank {rank}{struck}: {part} is {got.get(part)}, expected {want.get(part)}")
    if wrong:
        raise Mismatch("differs from the reference:\n  " + "\n  ".join(wrong) + "\n" + result.tail())


def check_survivors(result: JobResult, reference: JobResult | None = None, besides: Collection[int] = ()) -> None:
    """Check that ranks that no fault struck are the processes that began, and ran no batch twice.

    Args:
        result: the run with faults.
        reference: the run without; survivors must have run each batch as often as it did. Without it: once.
        besides: ranks that are not checked.

    Raises:
        Mismatch: saying which rank was restarted or ran which batch again.
    """
    wrong = []
    for rank, report in sorted(result.reports.items()):
        if rank in result.struck_ranks() or rank in besides:
            continue
        starts = [worker for worker in result.workers if worker["rank"] == rank]
        if len(starts) != 1:
            wrong.append(f"rank {rank} survived but {len(starts)} processes ran it")
        elif any(starts[0][name] != report[name] for name in ("pid", "start")):
            wrong.append(f"rank {rank} survived but its process changed from {starts[0]} to {report}")
        expected = reference.reports[rank]["counts"] if reference else dict.fromkeys(report["counts"], 1)
        for key in sorted(expected.keys() | report["counts"].keys()):
            if report["counts"].get(key, 0) != expected.get(key, 0):
                times = f"{report['counts'].get(key, 0)} times instead of {expected.get(key, 0)}"
                wrong.append(f"rank {rank} survived but ran {key} {times}")
    if wrong:
        raise Mismatch("survivors were touched:\n  " + "\n  ".join(wrong) + "\n" + result.tail())


def check_clean(result: JobResult) -> None:
    """Check that the job left no process and no private folder.

    Raises:
        Mismatch: naming what was left, or saying that the job had to be killed.
    """
    if result.status == 124:
        raise Mismatch(f"the job hung and was killed\n{result.tail()}")
    folders = {worker["job_dir"] for worker in result.workers if worker.get("job_dir")}
    left = [f"folder {folder}" for folder in sorted(folders) if Path(folder).exists()]
    left += [f"process {text}" for text in result.orphans]
    if left:
        raise Mismatch("the job left behind:\n  " + "\n  ".join(left) + "\n" + result.tail())


#: Words of a wait status that confirm a kind; a stopped worker is killed by its agent.
_CONFIRMS: dict[str, tuple[str, ...]] = {
    "SIGKILL": ("SIGKILL", "signal 9"),
    "SIGSTOP": ("SIGKILL", "SIGSTOP", "stopped", "signal 9"),
    "SIGTERM": ("SIGTERM", "signal 15"),
    "segfault": ("SIGSEGV", "signal 11"),
    "os._exit": (f"{EXIT_CODE}",),
    "exception": ("code 1", "status 1", "FaultInjected", "exception"),
} | dict.fromkeys((*FLIPS, FLIP_VALUE), ("corruption",))


def unconfirmed(result: JobResult) -> list[str]:
    """Faults that did not strike, or whose rank did not fail with a fitting cause; empty if all did."""
    struck = {record["index"]: record for record in result.struck}
    failures = [(event.rank, str(event.fields.get("cause", event.fields))) for event in result.kinds("failed")]
    wrong = []
    for index, fault in enumerate(result.faults):
        if index not in struck:
            wrong.append(f"{fault}: did not strike")
            continue
        if fault.kind in (*REFUSALS, SLOW):
            continue
        for place, (rank, cause) in enumerate(failures):
            if rank == fault.rank and any(word in cause for word in _CONFIRMS[fault.kind]):
                del failures[place]
                break
        else:
            causes = [cause for rank, cause in failures if rank == fault.rank]
            wrong.append(f"{fault}: struck, but the failure was reported as {causes or 'nothing'}")
    return wrong
