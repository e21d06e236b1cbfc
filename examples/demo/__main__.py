"""Run training scripts twice, without failures on the stock strategy and with failures under swiftrun, and compare:
data parallel under Lightning, then DeepSpeed pipelines with and without replicas.

    python -m examples.demo [--steps N] [--out FOLDER]

Exit status 0 only if every planned fault struck and the final parameters and optimizer state of all ranks are those of
the run without failures, bit for bit.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demo.plot import side_by_side, write_picture
from shared_core.events import Event, read_events
from shared_core.faults.inject import STRUCK, read_struck
from shared_core.faults.spec import ANY_STEP, Fault, dumps
from shared_core.report import Recovery, format_recoveries, history_of, read_curve, recoveries, to_page

WORKERS = 4
TRAIN = Path(__file__).with_name("train.py")
PIPELINE = Path(__file__).with_name("pipeline.py")
PIPELINE_STEPS = 24
ROOT = TRAIN.parents[2]


@dataclass
class Strike:
    """Faults told as one: what happens, and how many of the alternatives in ``faults`` are to strike."""

    title: str
    faults: list[Fault]
    count: int = 1


def plan(steps: int) -> list[Strike]:
    """The faults of the demo, spread evenly over a run of ``steps`` steps."""
    first, second, third, fourth, fifth = (steps * k // 6 for k in range(1, 6))
    return [
        Strike("rank 0, in the middle of backward", [Fault(0, first, "bucket", "SIGKILL", nth=2)]),
        Strike(
            "rank 2, in the middle of the optimizer's update", [Fault(2, second, "update.during", "SIGKILL", nth=9)]
        ),
        Strike(
            "ranks 1 and 3, at the same time",
            [Fault(1, third, "bucket", "SIGKILL"), Fault(3, third, "bucket", "segfault")],
            count=2,
        ),
        Strike(
            "rank 2, and rank 0 while rank 2 is being recovered",
            [Fault(2, fourth, "bucket", "SIGKILL", nth=2, incarnation=1)]
            # Rank 0 may be in the step before, or beyond it, when it takes part in the recovery: one of these strikes.
            + [Fault(0, fourth + k, "recovery.frontier", "SIGKILL", incarnation=1) for k in (-1, 0, 1)],
            count=2,
        ),
        Strike("rank 1 freezes (SIGSTOP) in forward", [Fault(1, fifth, "forward", "SIGSTOP", incarnation=1)]),
    ]


@dataclass
class Run:
    """One run of the training script and what it left in ``out``."""

    name: str
    out: Path
    seconds: float = 0.0
    status: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def hashes(self) -> set[str]:
        """Final hashes of its ranks: one if all are the same, in a pipeline one a stage."""
        return {str(report["hash"]) for report in self.reports.values()}

    @property
    def by_rank(self) -> dict[int, str]:
        """Final hash of each rank."""
        return {rank: str(report["hash"]) for rank, report in self.reports.items()}


def read_losses(path: Path, name: str = "train_loss") -> list[tuple[int, float]]:
    """(step, loss) from the CSV logger's file; rows that are still being written are left out."""
    found = []
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row.get(name) and row.get("step"):
                    found.append((int(row["step"]) + 1, float(row[name])))
    except (OSError, ValueError):
        pass
    return found


def execute(run: Run, launcher: Sequence[str], script: Sequence[str], steps: int, env: Mapping[str, str]) -> None:
    """Run a training script under ``launcher``, showing its progress, and read what it left."""
    shutil.rmtree(run.out, ignore_errors=True)
    run.out.mkdir(parents=True)
    command = [sys.executable, "-m", *launcher, *script, "--steps", str(steps), "--out", str(run.out)]
    everything = {name: value for name, value in os.environ.items() if not name.startswith("SWIFT_")} | dict(env)
    everything["OMP_NUM_THREADS"] = "1"
    everything["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    begin = time.monotonic()
    with (run.out / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, env=everything, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            progress = Progress(run, steps, begin)
            while process.poll() is None:
                progress.show()
                time.sleep(0.25)
        finally:
            if process.poll() is None:
                process.terminate()
            run.status = process.wait()
    progress.show(last=True)
    run.seconds = time.monotonic() - begin
    run.losses = read_losses(run.out / "metrics.csv")
    run.validation = read_losses(run.out / "metrics.csv", "val_loss")
    for path in sorted(run.out.glob("rank*.json")):
        report = json.loads(path.read_text())
        run.reports[report["rank"]] = report


class Progress:
    """Losses and recoveries as they come, and a line kept up to date on a terminal, written now and then elsewhere."""

    def __init__(self, run: Run, steps: int, begin: float) -> None:
        self.run, self.steps, self.begin = run, steps, begin
        self.live = sys.stdout.isatty()
        self.told = 0
        self.shown = -1

    def show(self, last: bool = False) -> None:
        """Say what is new; called a few times a second."""
        self._news()
        losses = read_losses(self.run.out / "metrics.csv")
        step, loss = losses[-1] if losses else (0, float("nan"))
        if not (self.live or last or step >= self.shown + self.steps // 8 or self.shown < 0):
            return
        self.shown = step
        filled = 30 * step // self.steps
        line = f"  {'#' * filled}{'.' * (30 - filled)} step {step:>3}/{self.steps}"
        line += f"  loss {loss:6.4f}" if losses else "  starting    "
        line += f"  {time.monotonic() - self.begin:5.1f} s"
        print(f"\r{line}" if self.live else line, end="" if self.live and not last else "\n", flush=True)

    def _news(self) -> None:
        path = self.run.out / "events.jsonl"
        if not path.exists():
            return
        events = list(read_events(path))
        for event in events[self.told :]:
            text = describe(event)
            if text:
                print(f"{chr(13) if self.live else ''}    {text:<100}", flush=True)
        self.told = len(events)


def describe(event: Event) -> str | None:
    """One line for the events that the demo tells while it runs."""
    if event.kind == "failed":
        return f"rank {event.rank} failed: {event.fields.get('cause', 'unknown cause')}"[:100]
    if event.kind == "replacement_ready":
        return f"rank {event.rank} has a new worker, which continues at step boundary {event.fields.get('boundary')}"
    return None


@dataclass
class Chain:
    """A recovery with those it superseded: what a person would call one outage."""

    parts: list[Recovery]

    def to_dict(self) -> dict[str, Any]:
        """Row of the report; durations in seconds from the detection of the first loss."""
        first, last = self.parts[0], self.parts[-1]
        stall = last.longest_stall_s
        ready = [one.slowest_survivor_ready_s for one in self.parts if one.slowest_survivor_ready_s is not None]
        return {
            "generations": [one.generation for one in self.parts],
            "failed": [rank for one in self.parts for rank in one.failed],
            "causes": [loss.cause for one in self.parts for loss in one.losses],
            "detected": first.detected,
            "survivor_ready_s": max(ready, default=None),
            "stall_s": None if stall is None else max(stall, last.detected - first.detected + stall),
            "recomputed_steps": max(one.recomputed_steps for one in self.parts),
            "bytes_moved": sum(one.bytes_moved for one in self.parts),
            "resolution": last.resolution,
            "boundary": last.boundary,
        }


def chains(found: Sequence[Recovery]) -> list[Chain]:
    """Recoveries, each joined with the one that superseded it."""
    joined: list[Chain] = []
    for one in found:
        if joined and joined[-1].parts[-1].superseded_by == one.generation:
            joined[-1].parts.append(one)
        else:
            joined.append(Chain([one]))
    return joined


def problems(
    plain: Run, faulty: Run, strikes: Sequence[Strike], outages: Sequence[Chain], steps: int, states: int = 1
) -> list[str]:
    """Why the demo has failed; empty if it has not. ``states`` is how many different ones the ranks are to end in."""
    found = []
    for run in (plain, faulty):
        if run.status != 0:
            found.append(f"{run.name}: exit status {run.status}; see {run.out / 'log.txt'}")
        if len(run.reports) != WORKERS:
            found.append(f"{run.name}: {len(run.reports)} of {WORKERS} ranks reported a final state")
        if any(report["steps"] != steps for report in run.reports.values()):
            found.append(f"{run.name}: not every rank made {steps} steps")
        if len(run.hashes) > states:
            found.append(f"{run.name}: the ranks' final states differ from each other")
    if plain.by_rank != faulty.by_rank:
        found.append("the final states of the two runs differ")
    if plain.losses != faulty.losses or plain.validation != faulty.validation:
        found.append("the logged losses of the two runs differ")
    struck = read_struck(faulty.out / "struck.jsonl")
    for strike in strikes:
        hits = sum(Fault.from_dict(record["fault"]) in strike.faults for record in struck)
        if hits != strike.count:
            found.append(f"planned fault did not strike as planned ({hits} of {strike.count}): {strike.title}")
    for outage in outages:
        if outage.parts[-1].longest_stall_s is None:
            found.append(f"generation {outage.parts[-1].generation} was never completed")
    return found


def _armed(run: Run, strikes: Sequence[Strike]) -> str:
    """Write the faults of a run beside its folder; the option that arms them."""
    path = run.out.with_name(run.out.name + "-faults.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps([fault for strike in strikes for fault in strike.faults]))
    return f"--faults={path}"


def pipelines(out: Path, stages: int, strikes: Sequence[Strike]) -> dict[str, Any]:
    """Run a pipeline of ``stages`` stages without and with failures; returns what the report says of it."""
    name = f"pipeline {stages} x {WORKERS // stages}"
    plain, faulty = Run("without failures", out / f"{stages}-without"), Run("with failures", out / f"{stages}-with")
    script = [str(PIPELINE), "--stages", str(stages), "--strategy"]
    print(f"\n{name}: torchrun, DeepSpeed's own engine", flush=True)
    stock = ["torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    execute(plain, stock, [*script, "stock"], PIPELINE_STEPS, {})
    print(f"\n{name}: swiftrun. Planned:", flush=True)
    for strike in strikes:
        print(f"   step {strike.faults[0].step:>3}: {strike.title}", flush=True)
    env = {
        STRUCK: str(faulty.out / "struck.jsonl"),
        "SWIFT_RECOVERY_CHECKPOINT_DIR": str(faulty.out / "checkpoints"),
        "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "5",
    }
    path = faulty.out / "events.jsonl"
    swift = ["shared_core.cli.swiftrun", f"--nproc-per-node={WORKERS}", f"--events={path}", _armed(faulty, strikes)]
    execute(faulty, swift, [*script, "swift"], PIPELINE_STEPS, env)
    events = list(read_events(path)) if path.exists() else []
    found = recoveries(events)
    outages = chains(found)
    print(f"\n{format_recoveries(found, events[0].time if events else 0.0)}\n")
    failures = problems(plain, faulty, strikes, outages, PIPELINE_STEPS, stages)
    return {
        "stages": stages,
        "identical": plain.by_rank == faulty.by_rank and len(faulty.reports) == WORKERS,
        "problems": [f"{name}: {failure}" for failure in failures],
        "hashes": faulty.by_rank,
        "seconds": {run.name: round(run.seconds, 2) for run in (plain, faulty)},
        "workers_failed": sum(len(one.losses) for one in found),
        "recoveries": [outage.to_dict() for outage in outages],
    }


def pipeline_plans() -> dict[int, list[Strike]]:
    """The faults of the pipelines, by number of stages: four without replicas, two with."""
    return {
        4: [
            Strike("the first stage, in a forward pass", [Fault(0, 4, "pipe.forward", "SIGKILL", nth=2)]),
            Strike("the last stage, in a backward pass", [Fault(3, 9, "pipe.backward", "SIGKILL", nth=3)]),
            Strike(
                "both middle stages, at the same time",
                [Fault(1, 14, "pipe.forward", "SIGKILL", nth=2), Fault(2, 14, "pipe.forward", "SIGKILL")],
                count=2,
            ),
            Strike(
                "the third stage, in the optimizer's update",
                [Fault(2, 19, "update.during", "SIGKILL", nth=3, incarnation=1)],
            ),
        ],
        2: [
            Strike("a first stage, in the middle of backward", [Fault(0, 5, "pipe.backward", "SIGKILL", nth=2)]),
            Strike("a last stage, before it sends a gradient", [Fault(3, 11, "pipe.send_grad", "SIGKILL", nth=2)]),
            Strike("a first stage, in the update", [Fault(1, 17, "update.during", "SIGKILL", nth=3)]),
        ],
    }


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Training with and without failures.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    options = parser.parse_args()
    if options.steps < 24:
        parser.error("--steps must be at least 24, so that the faults lie apart")
    # SIGTERM ends this program like Ctrl-C does, with the run that it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    out: Path = options.out.resolve()
    strikes = plan(options.steps)
    plain = Run("without failures", out / "without")
    faulty = Run("with failures", out / "with")

    print(f"1. {plain.name}: torchrun, strategy='ddp', plain gloo, {WORKERS} workers", flush=True)
    stock = ["torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    execute(plain, stock, [str(TRAIN), "--strategy", "ddp"], options.steps, {})

    print(f"\n2. {faulty.name}: swiftrun, strategy='swift_ddp', {WORKERS} workers. Planned:", flush=True)
    for strike in strikes:
        when = min(fault.step for fault in strike.faults if fault.step != ANY_STEP and "recovery" not in fault.point)
        print(f"   step {when:>3}: {strike.title}", flush=True)
    env = {STRUCK: str(faulty.out / "struck.jsonl")}
    path = faulty.out / "events.jsonl"
    swift = ["shared_core.cli.swiftrun", f"--nproc-per-node={WORKERS}", f"--events={path}", _armed(faulty, strikes)]
    execute(faulty, swift, [str(TRAIN), "--strategy", "swift_ddp"], options.steps, env)

    events = list(read_events(path)) if path.exists() else []
    found = recoveries(events)
    outages = chains(found)
    failures = problems(plain, faulty, strikes, outages, options.steps)
    identical = plain.hashes == faulty.hashes and len(plain.hashes) == 1 and len(faulty.reports) == WORKERS
    print()
    print(side_by_side([(run.name, run.losses) for run in (plain, faulty)]))
    print()
    print(format_recoveries(found, events[0].time if events else 0.0))
    print()
    for run in (plain, faulty):
        print(f"final hash {run.name:<17} {', '.join(sorted(run.hashes)) or 'none'}  ({run.seconds:.0f} s)")
    in_pipelines = [pipelines(out, stages, faults) for stages, faults in pipeline_plans().items()]
    failures += [failure for each in in_pipelines for failure in each["problems"]]
    report = {
        "identical": identical and all(each["identical"] for each in in_pipelines),
        "ok": not failures,
        "problems": failures,
        "steps": options.steps,
        "hash": min(faulty.hashes, default=None),
        "hash_without_failures": min(plain.hashes, default=None),
        "seconds": {run.name: round(run.seconds, 2) for run in (plain, faulty)},
        "workers_failed": sum(len(one.losses) for one in found),
        "recoveries": [outage.to_dict() for outage in outages],
        "pipelines": in_pipelines,
        "losses": {run.name: run.losses for run in (plain, faulty)},
    }
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    struck = [Fault.from_dict(record["fault"]) for record in read_struck(faulty.out / "struck.jsonl")]
    failed = [(fault.step, fault.rank) for fault in struck]
    picture = write_picture(out / "losses.svg", [(run.name, run.losses) for run in (plain, faulty)], failed)
    if events:
        metric = read_curve(faulty.out / "metrics.csv") if faulty.losses else None
        (out / "report.html").write_text(to_page(history_of(events), metric), encoding="utf-8")
        print(f"report of the run with failures, for a browser: {out / 'report.html'}")
    print(f"results: {out / 'report.json'}" + (f", picture: {out / 'losses.svg'}" if picture else ""))
    for failure in failures:
        print(f"FAILED: {failure}")
    if failures:
        return 1
    count = sum(each["workers_failed"] for each in (report, *in_pipelines))
    print(f"identical: {count} failed workers changed no bit on any rank")
    return 0


if __name__ == "__main__":
    sys.exit(main())
