"""What the failure of pipeline stages costs: workers are killed (SIGKILL), and all ranks' traces and events are read.

Ways: a stage with a replica takes its state from there; one without replays the steps since the checkpoint from the
logs of its neighbours; torchrun starts all workers again from DeepSpeed's own checkpoint. With emulated compute a stage
sleeps instead of computing, so that a few cores are as good as one for each stage. For each kill:

- stall: from the kill until the step has next returned on all ranks; part of it is the step itself;
- delay: how much later than without the kill the job is once it is two steps beyond where it was;
- replay: from the replacement's join until it is through the last step that the failed worker had finished; where all
  ranks are in one group, so that all go back to the checkpoint, from the first forward pass after that;
- regained: until all ranks are beyond the furthest step that any had made before the kill;
- recomputed: forward passes of micro-batches that a rank had made before.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import FULL, QUICK, Row, Workers, arguments, at_least, at_most, begin, finish, say, scratch
from benchmarks.pipeline_model import ENV, MICRO_BATCHES
from benchmarks.recovery_traces import Traces, end, settled, stalled_until, wait
from shared_core.events import read_events
from shared_core.report import recoveries

SCRIPT = Path(__file__).with_name("pipeline_recovery_worker.py")
#: Steps between two checkpoints, and finished steps since the last one when a worker is killed; of a quick run.
EVERY, SINCE = 6, 4
QUICK_EVERY, QUICK_SINCE = 4, 2
REPLICA_TARGET_S = 1.0
WAYS = ("replica", "replay", "shared replay", "torchrun")


@dataclass(frozen=True)
class Case:
    """A pipeline and how it survives.

    Attributes:
        stages, replicas: its shape.
        way: one of :data:`WAYS`.
        failures: stages that fail, together, in each kind of kill.
        compute: see :data:`COMPUTE`.
        groups: stages that start again together, as ``log_groups`` has them.
    """

    stages: int
    replicas: int
    way: str
    failures: tuple[tuple[int, ...], ...]
    compute: str = "emulated"
    groups: str = "worker"

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.stages * self.replicas

    @property
    def name(self) -> str:
        """In the table."""
        grouped = "" if self.groups == "worker" else f" in groups {self.groups}"
        return f"{self.stages} stages x {self.replicas}, {self.compute}, {self.way}{grouped}"

    def ranks(self, failed: Sequence[int], number: int) -> list[int]:
        """Ranks of failed stages; of each stage one replica, in turn."""
        return [stage * self.replicas + (number + place) % self.replicas for place, stage in enumerate(failed)]

    def replays_together(self, failed: Sequence[int]) -> int:
        """Most neighbouring stages that replay in one line, which is Swift's ``S_group``."""
        spans = [[int(end) for end in span.split("-")] for span in self.groups.split(",") if span != "worker"]
        again = set(failed)
        for span in spans:
            members = set(range(span[0], span[-1] + 1))
            again |= members if members & set(failed) else set()
        longest = length = 0
        for stage in range(self.stages):
            length = length + 1 if stage in again else 0
            longest = max(longest, length)
        return longest


USUALLY = (
    Case(2, 2, "replica", ((0,), (1,), (0, 1))),
    Case(2, 2, "torchrun", ((1,),)),
    Case(4, 1, "replay", ((0,), (2,), (3,), (1, 2))),
    Case(4, 1, "shared replay", ((1,), (2,))),
    Case(4, 2, "replica", ((0,), (2,), (3,), (1, 2))),
)
LONG = (
    *USUALLY,
    Case(4, 1, "shared replay", ((3,),), groups="2-3"),
    Case(4, 1, "torchrun", ((3,),)),
    Case(4, 2, "torchrun", ((3,),)),
    Case(2, 2, "replica", ((0,), (1,)), "real"),
    Case(2, 2, "torchrun", ((1,),), "real"),
    Case(4, 1, "replay", ((0,), (2,), (3,)), "real"),
    Case(4, 1, "torchrun", ((3,),), "real"),
)
FEW = (
    Case(2, 2, "replica", ((1,),)),
    Case(4, 1, "replay", ((2,),)),
    Case(4, 1, "shared replay", ((2,),)),
)


@dataclass
class Kill:
    """One kill and what followed; times in seconds, from the kill if not said otherwise.

    Attributes:
        failed: stages.
        stall_s, delay_s, regained_s: see above.
        resumed_s: from the detection until the last survivor's step had returned, from the events.
        recovered_s: from the detection until the last survivor had exchanged state and logs, from the events.
        joined_s: until the last replacement had joined.
        replayed: finished steps that the replacement ran again.
        replay_s: how long that took.
        survivors, replacements: most micro-batches that one of them computed again.
        moved, logged: bytes that the recovery moved when it formed, and of all logs on disk at the kill.
        user_s: of the replacement's start, what came before the loop, after imports.
        alone_s, planned_s, shared_s: of a replayed step, what it was expected to take alone and shared, and what a
            shared one took; 0 where none was shared.
    """

    failed: tuple[int, ...]
    stall_s: float
    delay_s: float
    regained_s: float
    survivors: int
    replacements: int
    user_s: float
    alone_s: float = 0.0
    planned_s: float = 0.0
    shared_s: float = 0.0
    logged: int = 0
    resumed_s: float | None = None
    recovered_s: float | None = None
    joined_s: float | None = None
    replayed: int = 0
    replay_s: float | None = None
    moved: int | None = None


@dataclass
class Outcome:
    """All kills of a case."""

    case: Case
    kills: list[Kill] = field(default_factory=list)
    step_s: float = 0.0


def run(case: Case, repeats: int, folder: Path, every: int, since: int) -> Outcome:
    """Run the job of a case and make each kind of kill ``repeats`` times."""
    out = folder / case.name.replace(" ", "-").replace(",", "")
    out.mkdir()
    traces, outcome = Traces(out, case.workers), Outcome(case)
    args = ["--out", str(out), "--compute", case.compute, "--stages", str(case.stages)]
    env = ENV | {"SWIFT_RECOVERY_LOG_DIR": str(out / "logs"), "SWIFT_RECOVERY_LOG_GROUPS": case.groups}
    if case.way == "torchrun":
        args += ["--every", str(every)]
    else:
        args += ["--ours"]
    if case.way == "shared replay":
        env |= {"SWIFT_RECOVERY_REPLAY_RANDOMNESS": "seeded"}
    if case.way in ("replay", "shared replay"):
        env |= {
            "SWIFT_RECOVERY_CHECKPOINT_DIR": str(out / "checkpoints"),
            "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": str(every),
        }
    launcher, rng = "torchrun" if case.way == "torchrun" else "swift", random.Random(case.name)
    workers = Workers(launcher, SCRIPT, args, out, standbys=2, restarts=1000, env=env, nproc=case.workers)
    with workers:
        wait(traces, workers, lambda: settled(traces, 2 * every))
        outcome.step_s = normal_step(traces)
        for number in range(repeats):
            for failed in case.failures:
                kill = strike(case, failed, number, workers, traces, outcome.step_s, (every, since), rng)
                outcome.kills.append(kill)
                say(
                    f"{case.name}: failed stage {' and '.join(map(str, failed))}: delayed {kill.delay_s:.2f} s, "
                    f"stalled {kill.stall_s:.2f} s, joined {kill.joined_s or 0:.2f} s, regained {kill.regained_s:.2f} "
                    f"s, replayed {kill.replayed} steps in {kill.replay_s or 0:.2f} s"
                )
        traces.refresh()
        outcome.step_s = normal_step(traces)
        end(workers, traces.furthest() + 3)
    return outcome


def normal_step(traces: Traces) -> float:
    """Median seconds between two steps of the first stage so far."""
    times = [line["time"] for line in traces.steps(0)][2:]
    return statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


def strike(
    case: Case,
    failed: tuple[int, ...],
    number: int,
    workers: Workers,
    traces: Traces,
    step_s: float,
    when: tuple[int, int],
    rng: random.Random,
) -> Kill:
    """Kill workers somewhere in the step that follows ``since`` finished ones after a checkpoint; wait; measure."""
    every, since = when
    ranks = case.ranks(failed, number)
    traces.refresh()
    target = (traces.furthest() // every + 1) * every + since
    wait(traces, workers, lambda: all(traces.steps(rank)[-1]["step"] >= target for rank in ranks))
    traces.refresh()
    last = [x["time"] for x in traces.steps(ranks[0])][-3:]
    time.sleep(rng.random() * (last[-1] - last[0]) / 2)  # as long as steps take now, to stay in this one
    traces.refresh()
    pids = [traces.lines[rank][-1]["pid"] for rank in ranks]
    logs = workers.log.parent / "logs"
    logged = sum(path.stat().st_size for path in logs.rglob("*") if path.is_file())
    at = time.time()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    traces.refresh()
    furthest = traces.furthest(before=at)

    def beyond(rank: int) -> float | None:
        return next((x["time"] for x in traces.steps(rank, at) if x["step"] > furthest), None)

    wait(traces, workers, lambda: all(beyond(rank) is not None for rank in traces.ranks))
    wait(traces, workers, lambda: all(traces.steps(rank)[-1]["step"] >= furthest + 2 for rank in traces.ranks))
    return measure(case, failed, ranks, at, traces, step_s, furthest, logged, workers.log.parent / "events.jsonl")


def measure(
    case: Case,
    failed: tuple[int, ...],
    ranks: Sequence[int],
    at: float,
    traces: Traces,
    step_s: float,
    furthest: int,
    logged: int,
    events: Path,
) -> Kill:
    """Read traces and events."""
    regained = [next(x["time"] for x in traces.steps(rank, at) if x["step"] > furthest) for rank in traces.ranks]
    others = [rank for rank in traces.ranks if rank not in ranks]
    again = {rank: computed_again(traces, rank, at) for rank in traces.ranks}
    loops = [x for lines in traces.lines for x in lines if x["kind"] == "loop" and x["time"] > at]
    kill = Kill(
        failed,
        stall_s=max(stalled_until(traces, rank, at, step_s) for rank in others) - at,
        delay_s=max(delay(traces, rank, at, step_s, furthest + 2) for rank in others),
        regained_s=max(regained) - at,
        survivors=max(again[rank] for rank in others),
        replacements=max(again[rank] for rank in ranks),
        user_s=max((x["user_s"] + x["import_s"] for x in loops), default=0.0),
        logged=logged,
    )
    if case.way == "torchrun":
        return kill
    # Two failures may be noticed one after the other: the first generation is then abandoned for another.
    found = [one for one in recoveries(read_events(events)) if one.detected >= at - 0.001]
    if not found:
        raise RuntimeError(f"{case.name}: no recovery in the events after the kill of ranks {ranks}")
    kill.moved = sum(one.bytes_moved for one in found)
    later = [e for e in read_events(events) if e.time > at]
    kill.recovered_s = max((e.fields["stall_s"] for e in later if e.kind == "recovered"), default=None)
    kill.resumed_s = max((e.fields["stall_s"] for e in later if e.kind == "resumed"), default=None)
    for event in later:
        if event.kind == "help":
            kill.alone_s, kill.planned_s, kill.shared_s = (event.fields[f] for f in ("alone_s", "planned_s", "step_s"))
    joins = [(e.rank, e.time) for e in later if e.kind == "replacement_ready"]
    restarted = max((e.time for e in later if e.kind == "restart"), default=None)
    if restarted is not None:  # a rank's first forward pass after it is past the calls that it skips
        passes = [[x["time"] for x in lines if x["kind"] == "forward"] for lines in traces.lines]
        joins = [(rank, min(t for t in times if t > restarted)) for rank, times in enumerate(passes)]
    begun = min((joined for _, joined in joins), default=0.0) if restarted is not None else None
    if not joins:
        return kill
    kill.joined_s = max(joined for _, joined in joins) - at
    for rank, joined in joins:
        if rank in ranks:
            before = max(x["step"] for x in traces.steps(rank) if x["time"] <= at)
            made = [x for x in traces.steps(rank, joined) if x["step"] <= before]
            if made:
                kill.replayed = max(kill.replayed, len(made))
                kill.replay_s = max(kill.replay_s or 0.0, made[-1]["time"] - (begun or joined))
    return kill


def delay(traces: Traces, rank: int, at: float, step_s: float, goal: int) -> float:
    """How much longer than normal a rank took from its last step before the kill until it had made step ``goal``."""
    last = [x for x in traces.steps(rank) if x["time"] <= at][-1]
    made = next(x["time"] for x in traces.steps(rank, at) if x["step"] == goal)
    return float(made - last["time"] - (goal - last["step"]) * step_s)


def computed_again(traces: Traces, rank: int, at: float) -> int:
    """Micro-batches that went forward once more after the kill."""
    passes = [x for x in traces.lines[rank] if x["kind"] == "forward"]
    before = Counter(x["step"] for x in passes if x["time"] <= at)
    after = Counter(x["step"] for x in passes if x["time"] > at)
    return sum(max(0, min(before[step], before[step] + after[step] - MICRO_BATCHES)) for step in after)


def rows_of(outcome: Outcome) -> list[Row]:
    """Rows of a case, by what failed."""
    case, rows = outcome.case, []
    rows.append(Row(case.name, "normal step, median", outcome.step_s, "s"))
    for failed in case.failures:
        kills = [kill for kill in outcome.kills if kill.failed == failed]
        who = f"stage {' and '.join(map(str, failed))}"

        def median(name: str, kills: Sequence[Kill] = kills) -> float | None:
            values = [value for value in (getattr(kill, name) for kill in kills) if value is not None]
            return statistics.median(values) if values else None

        target = REPLICA_TARGET_S if case.way == "replica" else None
        rows.append(at_most(case.name, f"{who}: delay", median("delay_s"), "s", target))
        rows.append(Row(case.name, f"{who}: stall until the next step", median("stall_s"), "s"))
        rows.append(Row(case.name, f"{who}: step regained", median("regained_s"), "s"))
        rows.append(Row(case.name, f"{who}: user's start-up with imports", median("user_s"), "s"))
        again = max(kill.survivors for kill in kills)
        if case.way == "torchrun":
            rows.append(Row(case.name, f"{who}: recomputed by a survivor", again, "micro-batches"))
            continue
        rows.append(Row(case.name, f"{who}: survivors' state and logs exchanged", median("recovered_s"), "s"))
        rows.append(Row(case.name, f"{who}: survivors resumed", median("resumed_s"), "s"))
        rows.append(Row(case.name, f"{who}: replacement joined", median("joined_s"), "s"))
        if case.groups == "worker" and case.way != "shared replay":
            rows.append(at_most(case.name, f"{who}: recomputed by a survivor", again, "micro-batches", 0))
        rows.append(Row(case.name, f"{who}: recomputed by a replacement", median("replacements"), "micro-batches"))
        rows.append(Row(case.name, f"{who}: moved when it joined", (median("moved") or 0) / 1e6, "MB"))
        if case.way not in ("replay", "shared replay"):
            continue
        rows.append(Row(case.name, f"{who}: logs on disk", (median("logged") or 0) / 1e6, "MB"))
        replayed = [kill for kill in kills if kill.replay_s is not None and kill.replayed]
        together = case.replays_together(failed)
        bound = (MICRO_BATCHES + together - 1) / (MICRO_BATCHES + case.stages - 1)
        steps = statistics.median(kill.replayed for kill in replayed) if replayed else None
        rows.append(Row(case.name, f"{who}: steps replayed", steps, "steps"))
        rows.append(Row(case.name, f"{who}: replay of them", median("replay_s"), "s"))
        ratio = None
        if replayed:
            ratio = statistics.median((k.replay_s or 0.0) / (k.replayed * outcome.step_s) for k in replayed)
        metric = f"{who}: replay of a step / normal step (target: bound)"
        judged = case.compute == "emulated" and case.way == "replay"
        rows.append(
            at_most(case.name, metric, ratio, "ratio", bound)
            if judged
            else Row(case.name, metric, ratio, "ratio", bound)
        )
        shared = [kill for kill in kills if kill.planned_s]
        if case.way == "shared replay" and shared:
            factor = statistics.median(kill.alone_s / kill.shared_s for kill in shared)
            planned = statistics.median(kill.alone_s / kill.planned_s for kill in shared)
            rows.append(
                at_least(
                    case.name, f"{who}: shared steps are faster (target: 0.8 x planned)", factor, "times", 0.8 * planned
                )
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a target is missed."""
    parser = arguments("pipeline_recovery", "Delay and work done again after SIGKILL of pipeline stages.")
    parser.add_argument("--only", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=3, help="kills of each kind in a full run")
    options = begin(parser, argv)
    rows: list[Row] = []
    every, since = (QUICK_EVERY, QUICK_SINCE) if options.size == QUICK else (EVERY, SINCE)
    for case in (FEW, USUALLY, LONG)[options.size]:
        if options.only and options.only not in case.name:
            continue
        with scratch() as folder:
            say(f"{case.name}: starting {case.workers} workers")
            rows += rows_of(run(case, options.repeats if options.size == FULL else 1, folder, every, since))
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
