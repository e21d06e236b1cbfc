"""Runs a random program stock and with a failure, and says how the two compare."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from shared_core import errors
from shared_core.events import read_events
from shared_core.faults import Fault
from shared_core.protocol import progress_file
from tests.support.plain import PlainLauncher
from tests.support.runner import JobResult, run_job
from tests.support.warm import WarmLauncher

from .grammar import Program, write

SAME, REFUSED, OTHER, HANG = "same", "refused by name", "other", "hang"
_POINTS = ("step_boundary", "collective.before", "collective.after", "forward", "update.before", "update.during")
_POINTS += ("update.after",)
#: Longest time of a run, and of a wait that nobody can end, in seconds.
_RUN_S, _WAIT_S = 60.0, 10.0
_EACH_BOUNDARY = {
    "SWIFT_RECOVERY_CHECKPOINT_POLICY": "fixed",
    "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "1",
    "SWIFT_RECOVERY_CHECKPOINT_BACKGROUND": "false",
}
_ASKED_FOR = "on_failure is restart"
_FAILED = re.compile(r"the job failed after .*?: rank \d+(?: raised|:) (\w+): (.*)")


@dataclass(frozen=True)
class Kill:
    """SIGKILL from outside, when a rank has passed so many step boundaries.

    Attributes:
        rank: whose process is killed.
        boundaries: step boundaries.
        inside: only while the process waits in a collective, or while it does not.
    """

    rank: int
    boundaries: int
    inside: bool

    def __str__(self) -> str:
        return f"kill {self.rank} from outside at {self.boundaries} {'in a' if self.inside else 'between'} collective"


class _Killer:
    """Kills a worker of a job that runs.

    Args:
        out: folder of the job's events.
        kill: which, and when.
    """

    def __init__(self, out: Path, kill: Kill) -> None:
        self._events, self._kill = out / "events.jsonl", kill
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.struck = False

    def __enter__(self) -> _Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        folder = pid = None
        while not self._over.wait(0.0005):
            if folder is None or pid is None:
                for event in read_events(self._events) if self._events.exists() else ():
                    if event.kind == "start":
                        folder, pid = Path(event.fields["job_dir"]), int(event.fields["pids"][str(self._kill.rank)])
            elif self._is_there(folder):
                os.kill(pid, signal.SIGKILL)
                self.struck = True
                return

    def _is_there(self, folder: Path) -> bool:
        found = progress_file.read_progress(progress_file.path_of(folder, self._kill.rank))
        if found is None or found[0] < self._kill.boundaries:
            return False
        return found[0] > self._kill.boundaries or bool(found[1]) == self._kill.inside


@dataclass(frozen=True)
class Outcome:
    """How a program with a failure ended, beside the same without.

    Attributes:
        program: the script.
        fault: what struck, as the job was told, or from outside.
        verdict: :data:`SAME`, :data:`REFUSED`, :data:`OTHER` or :data:`HANG`.
        why: the error, or what differs.
        struck: the fault has struck.
    """

    program: Program
    fault: Fault | Kill
    verdict: str
    why: str
    struck: bool

    def row(self) -> str:
        """A line of a table."""
        struck = "" if self.struck else " (not struck)"
        text = f"{self.program.seed:>6} {self.verdict:<16}{struck} {self.fault}: {', '.join(self.program.parts)}"
        return f"{text}; {self.why}" if self.why else text


class Trials:
    """Runs programs, from servers that have the imports already."""

    def __init__(self, folder: Path, plain: PlainLauncher, warm: WarmLauncher) -> None:
        self._folder, self._plain, self._warm = folder, plain, warm

    def run(self, seed: int, *, plain: bool = True, restart: bool = False) -> Outcome:
        """The program of this seed, with the failure of this seed.

        Args:
            seed: any number.
            plain: see :func:`write`.
            restart: nobody is replaced: all start again, from the newest checkpoint. One is made at each step boundary.

        Raises:
            AssertionError: the program does not run stock: the grammar is wrong.
        """
        program = write(seed, plain=plain)
        fault = fault_of(program)
        stock = self._job(program, program.stock, "plain", ())
        assert stock.status == 0, f"seed {seed} does not run stock\n{program.stock}\n{stock.tail()}"
        if isinstance(fault, Fault):
            swift = self._job(program, program.swift, "swiftrun", (fault,), restart)
            struck = bool(swift.struck)
        else:
            with _Killer(self._folder / f"{program.seed}-swiftrun", fault) as killer:
                swift = self._job(program, program.swift, "swiftrun", (), restart)
            struck = killer.struck
        verdict, why = judge(swift, stock, fault.rank)
        return Outcome(program, fault, verdict, why, struck)

    def _job(
        self, program: Program, text: str, launcher: str, faults: tuple[Fault, ...], restart: bool = False
    ) -> JobResult:
        out = self._folder / f"{program.seed}-{launcher}"
        out.mkdir()
        (out / "program.py").write_text(text)
        return run_job(
            out / "program.py",
            nproc=2,
            out=out,
            faults=faults,
            launcher=launcher,
            env={"SWIFT_RECOVERY_DETECTION_WAIT_TIMEOUT_S": f"{_WAIT_S:g}"} | (_EACH_BOUNDARY if restart else {}),
            launcher_args=["--on-failure=restart", f"--checkpoint-dir={out / 'checkpoints'}"] if restart else (),
            timeout_s=_RUN_S,
            plain=self._plain,
            warm=self._warm,
        )


def fault_of(program: Program) -> Fault | Kill:
    """The failure of a program: a worker is killed at a point, or at any moment after one, or from outside."""
    draw = random.Random(f"fault {program.seed}")
    if draw.random() < 0.5:
        boundaries = draw.randrange(program.passes) * program.boundaries + draw.randint(1, program.batches)
        return Kill(draw.randint(0, 1), boundaries, draw.random() < 0.5)
    point = draw.choice(_POINTS)
    nth = 1 if point in ("step_boundary", "update.before", "update.after", "forward") else draw.randint(1, 2)
    return Fault(
        draw.randint(0, 1),
        draw.randrange(program.passes) * program.boundaries + draw.randint(1, program.batches),
        point,
        "SIGKILL",
        nth=nth,
        delay_s=round(draw.uniform(0.0, 0.03), 4) if draw.random() < 0.4 else 0.0,
    )


def judge(swift: JobResult, stock: JobResult, killed: int) -> tuple[str, str]:
    """The verdict on a run with a failure, and why.

    Args:
        swift: the run.
        stock: the same without this product, and without a failure.
        killed: rank that was killed; it may print lines twice.
    """
    if swift.status == 124:
        return HANG, ""
    if swift.status:
        found = _FAILED.search(swift.stderr)
        refused = found is not None and isinstance(getattr(errors, found[1], None), type)
        return (REFUSED if refused else OTHER), found[0].partition(": ")[2][:300] if found else swift.tail()
    wrong = []
    restarts = swift.kinds("restart")  # all go back, for a reason that names it
    refusals = [why for each in restarts if (why := str(each.fields["reason"])) != _ASKED_FOR]
    for rank in (0, 1):
        want, got = _held(stock, rank), _held(swift, rank)
        wrong += [f"rank {rank}: {name}" for name in want.keys() | got.keys() if want.get(name) != got.get(name)]
        lines = [_printed(stock, rank), _printed(swift, rank)]
        if rank == killed or restarts:  # what was printed after the step boundary is printed again
            lines = [list(dict.fromkeys(each)) for each in lines]
        if lines[0] != lines[1]:
            wrong.append(f"rank {rank}: printed lines")
    if wrong:
        return OTHER, ", ".join(sorted(wrong))
    return (REFUSED, refusals[0]) if refusals else (SAME, "")


def _held(result: JobResult, rank: int) -> dict[str, str]:
    path = result.out / f"held{rank}.json"
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {"nothing": "was held"}
    return found


def _printed(result: JobResult, rank: int) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith(f"r{rank} ")]


@contextmanager
def trials() -> Iterator[Trials]:
    """Servers, and a folder for what the programs leave; both end with this."""
    plain, warm = PlainLauncher(), WarmLauncher()
    try:
        with TemporaryDirectory(prefix="swift-programs-") as folder:
            yield Trials(Path(folder), plain, warm)
    finally:
        plain.close()
        warm.close()
