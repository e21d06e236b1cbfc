"""Jobs that are started once and take turns: while one runs a block of steps, the workers of the others are blocked
on a socket, so that whatever else the machine does hits all alike.

A worker script connects to ``--socket``, sends ``{"system", "rank"}`` and then answers messages: ``{"run": steps}``
with ``{"seconds"}``, ``{"memory": True}`` with ``{"before", "after"}``, and what else it has agreed with its benchmark.
``{"stop": True}`` ends it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import WORKERS, Line, Workers, scratch

MAX_WAIT_S = 300.0
#: The same of glibc's allocator on all sides, which otherwise follows from what each has allocated and freed so far:
#: blocks up to 32 MB come from memory that the process keeps.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


@dataclass(frozen=True)
class Start:
    """How a job is started.

    Attributes:
        launcher: see :class:`Workers`.
        args: of the worker script, apart from the socket.
        env: more environment.
    """

    launcher: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Side:
    """The workers of one job, which do what they are told and report."""

    def __init__(self, system: str, workers: Workers, lines: list[Line]) -> None:
        self.system, self.workers, self.lines = system, workers, lines

    def ask(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Tell all workers something; their answers, in the order of ranks.

        Raises:
            RuntimeError: a worker has ended, with the end of the log.
        """
        try:
            for line in self.lines:
                line.send(message)
            return [line.receive() for line in self.lines]
        except (OSError, EOFError) as error:
            raise RuntimeError(f"the {self.system} job does not answer ({error})\n{self.workers.tail()}") from error

    def step_time(self, steps: int) -> float:
        """Seconds a step, over a block of ``steps`` steps, of the slowest worker."""
        return float(max(answer["seconds"] for answer in self.ask({"run": steps})) / steps)

    def peak(self) -> float:
        """Most bytes that a worker had over what it had before the model was built, mapped files apart."""
        growth = []
        for answer in self.ask({"memory": True}):
            before, after = answer["before"], answer["after"]
            growth.append(after["VmHWM"] - after["RssFile"] - before["RssAnon"] - before["RssShmem"])
        return float(max(growth))

    def published(self) -> float:
        """Bytes in the job's shared memory for one worker."""
        return float(max(answer["after"]["published"] for answer in self.ask({"memory": True})))

    def stop(self) -> None:
        """Let the workers end."""
        for line in self.lines:
            line.send({"stop": True})
            line.close()


#: What workers say: by side, by round, by rank.
Answers = dict[str, list[list[dict[str, Any]]]]


def in_turns(ready: Mapping[str, Side], rounds: int, message: Mapping[str, Any]) -> Answers:
    """What each side answers in each round; every other round they take turns in the opposite order."""
    answers: Answers = {system: [] for system in ready}
    order = list(ready)
    for _ in range(rounds):
        for system in order:
            answers[system].append(ready[system].ask(message))
        order.reverse()
    return answers


@contextlib.contextmanager
def sides(
    starts: Mapping[str, Start], script: Path, *, nproc: int = WORKERS, standbys: int = 1
) -> Iterator[dict[str, Side]]:
    """Start the jobs; yields them by name once all workers have called, and ends them.

    Raises:
        RuntimeError: a job did not start or end as it should, with the end of its log.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        listener = stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
        address = str(folder / "bench")
        listener.bind(address)
        listener.listen(len(starts) * nproc)
        listener.settimeout(1.0)
        jobs: dict[str, Workers] = {}
        for number, (system, start) in enumerate(starts.items()):
            out = folder / f"job{number}"
            out.mkdir()
            args = [*start.args, "--socket", address]
            env = MALLOC | dict(start.env)
            workers = Workers(start.launcher, script, args, out, env=env, nproc=nproc, standbys=standbys)
            jobs[system] = stack.enter_context(workers)
        called: dict[tuple[str, int], Line] = {}
        deadline = time.monotonic() + MAX_WAIT_S
        while len(called) < len(starts) * nproc:
            for job in jobs.values():
                job.check()
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {system}\n{job.tail()}" for system, job in jobs.items())
                raise RuntimeError(f"only {sorted(called)} have started\n{logs}")
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(MAX_WAIT_S)
                line = Line(connection)
                hello = line.receive()
                called[hello["system"], hello["rank"]] = line
        ready = {s: Side(s, jobs[s], [called[s, rank] for rank in range(nproc)]) for s in starts}
        yield ready
        for side in ready.values():
            side.stop()
        for system, job in jobs.items():
            status = job.wait(60)
            if status:
                raise RuntimeError(f"the {system} job has ended with status {status}\n{job.tail()}")
