"""What a failed worker costs: under each system one is killed (SIGKILL) again and again, and all ranks' traces are
read.

Systems: this one with a standby, and without (``--standbys 0``); with fewer workers after a failure, and as many again
later; on two machines (network namespaces), one of which fails while a third waits; torchrun with a checkpoint every
1, 5 and 20 steps; torchft where it is installed. The job is plain DDP on a 6-layer MLP of width 512 with four workers;
in rows of FSDP2 and ZeRO-3 it is a sharded MLP, and DDP of one that has as many parameters as a shard. For each kill:

- stall: from the kill until ``optimizer.step`` has next returned on all ranks, and on the survivors alone (torchft's go
  on without the failed one, and its samples);
- regained: until all ranks are beyond the furthest step that any had made before the kill;
- recomputed: steps that a worker other than the killed one made again;
- lost: samples of the whole run whose gradients are in no update.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from benchmarks import commit_side
from benchmarks.common import (
    FULL,
    WORKERS,
    Row,
    Workers,
    arguments,
    at_least,
    at_most,
    begin,
    finish,
    has_torchft,
    lighthouse,
    say,
    scratch,
)
from benchmarks.recovery_traces import (
    Traces,
    end,
    lost_samples,
    repeated,
    settled,
    stalled_until,
    step_time,
    user_time,
    wait,
)
from benchmarks.recovery_worker import LAYERS, WIDTH
from shared_core.events import read_events
from shared_core.report import recoveries
from tests.support.namespaces import machines, unavailable

SCRIPT = Path(__file__).with_name("recovery_worker.py")
STALL_TARGET_S = 0.6
FACTOR_TARGET = 8.0
READY_TARGET_MS = 60.0
#: Stall of FSDP2 and ZeRO-3 over that of DDP with a shard's parameters.
SHARDED_TARGET = 2.0
#: Seconds that a job continues with fewer workers, starting them included, until it grows again.
GROW_AFTER_S = 4.0
#: Seconds that a spare machine waits before the next fails, so that its standby has imported what it needs.
SPARE_WAITS_S = 5.0


@dataclass(frozen=True)
class System:
    """One way to run the job.

    Attributes:
        name: in the table.
        system: what the worker script calls it.
        kills: by size of the run; 0 leaves it out.
        standbys: of this product, on each machine.
        every: steps between two checkpoints or commits.
        heartbeat_ms: torchft's heartbeat time-out.
        timeout_s: torchft's other time-outs.
        resizes: the others continue without the failed worker, and the job grows again later.
        machines: whole machines are killed, and one more waits.
        model: its layers and their width.
        sharded: what divides the model: ``fsdp2``, with checkpoints of ``torch.distributed.checkpoint``, or ``zero3``;
            empty for DDP.
        pace: most steps before a kill.
    """

    name: str
    system: str
    kills: tuple[int, int, int]
    standbys: int = 1
    every: int = 0
    heartbeat_ms: int = 5000
    timeout_s: int = 60
    resizes: bool = False
    machines: int = 1
    model: tuple[int, int] = (LAYERS, WIDTH)
    sharded: str = ""
    pace: int = 25

    @property
    def ours(self) -> bool:
        """Whether it is this product."""
        return self.system in ("swift", "accelerate", "shared")

    @property
    def judged(self) -> bool:
        """Whether the targets for a failed worker whose place a standby takes apply."""
        return self.ours and self.usual and self.standbys > 0 and not self.resizes and self.machines == 1

    @property
    def usual(self) -> bool:
        """Whether the model is the one that systems are compared with."""
        return self.model == (LAYERS, WIDTH)

    def holds_a_shard_of(self, other: System) -> bool:
        """Whether each worker has as many parameters as one of ``other``, a sharded job of four."""
        layers, width = self.model
        return self.ours and other.ours and other.sharded and not self.sharded and other.model == (layers, 2 * width)


SYSTEMS = [
    System("swift, standby", "swift", (3, 10, 10)),
    System("swift, respawn (no standby)", "swift", (1, 3, 5), standbys=0),
    System("swift under Accelerate, standby", "accelerate", (0, 3, 5)),
    System("swift, shrink and growth", "swift", (0, 2, 5), resizes=True),
    System("swift, spare machine", "swift", (0, 2, 3), machines=2),
    System("torchrun, checkpoint every step", "torchrun", (0, 0, 4), every=1),
    System("torchrun, checkpoint every 5 steps", "torchrun", (0, 0, 4), every=5),
    System("torchrun, checkpoint every 20 steps", "torchrun", (1, 3, 4), every=20),
    System("torchrun, CheckFreq's way", "checkfreq", (0, 0, 4)),
    System("in-memory commit every step (Elastic Horovod's way)", "commit", (0, 2, 4), every=1),
    System("in-memory commit every 20 steps", "commit", (0, 0, 4), every=20),
    System("torchft, defaults", "torchft", (0, 0, 3)),
    System("torchft, heartbeat time-out 1 s", "torchft", (1, 2, 3), heartbeat_ms=1000, timeout_s=5),
    # Half the width: as many parameters as one shard of four.
    System("swift, DDP, a shard of FSDP2's or ZeRO-3's 10 M", "swift", (0, 2, 5), model=(10, 512)),
    System("swift, FSDP2, 10 M", "swift", (0, 2, 5), model=(10, 1024), sharded="fsdp2"),
    System("swift, ZeRO-3, 10 M", "swift", (0, 0, 5), model=(10, 1024), sharded="zero3"),
    System(
        "torchrun, FSDP2, 10 M, async_save every 20", "torchrun", (0, 0, 3), every=20, model=(10, 1024), sharded="fsdp2"
    ),
    System("swift, DDP, a shard of FSDP2's or ZeRO-3's 50 M", "swift", (0, 0, 3), model=(12, 1024), pace=10),
    System("swift, FSDP2, 50 M", "swift", (0, 0, 3), model=(12, 2048), sharded="fsdp2", pace=10),
    System("swift, ZeRO-3, 50 M", "swift", (0, 0, 3), model=(12, 2048), sharded="zero3", pace=10),
]


@dataclass
class Kill:
    """One kill and what followed; times in seconds from the kill, ``growth_s`` from the decision to grow."""

    ranks: tuple[int, ...]
    at: float
    stall_s: float
    survivors_s: float
    regained_s: float
    recomputed: int
    user_s: float
    detected_s: float | None = None
    ready_s: float | None = None
    growth_s: float | None = None


@dataclass
class Outcome:
    """All kills under one system."""

    system: System
    kills: list[Kill] = field(default_factory=list)
    step_s: float = 0.0
    lost_samples: int | None = 0


def folder_of(system: System, folder: Path) -> Path:
    """A new folder for a run under ``system``."""
    out = folder / system.name.replace(" ", "-").replace(",", "")
    out.mkdir()
    return out


@contextlib.contextmanager
def started(system: System, out: Path) -> Iterator[tuple[Workers, Any]]:
    """The job under ``system``, and the store in which its workers meet where no launcher helps them."""
    args = ["--system", system.system, "--out", str(out), "--every", str(system.every)]
    args += ["--layers", str(system.model[0]), "--width", str(system.model[1])]
    args += ["--sharded", system.sharded] if system.sharded else []
    env = {"BENCH_TORCHFT_TIMEOUT_S": str(system.timeout_s)}
    if system.resizes:
        env |= {"SWIFT_RECOVERY_ON_FAILURE": "shrink", "SWIFT_RECOVERY_RESIZE_GROW_AFTER_S": str(GROW_AFTER_S)}
    if system.system == "shared":
        env |= {"SWIFT_RECOVERY_ON_FAILURE": "reroute", "SWIFT_RECOVERY_REROUTE_REDUCTION": "ordered"}
    with contextlib.ExitStack() as stack:
        if system.system == "torchft":
            env["TORCHFT_LIGHTHOUSE"] = stack.enter_context(lighthouse(1, system.heartbeat_ms))
        store: Any = None
        if system.system == "commit":
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set("round", "0")
            env |= {commit_side.STORE: f"127.0.0.1:{store.port}", commit_side.WORKERS: str(WORKERS)}
        on = stack.enter_context(machines(system.machines + 1)) if system.machines > 1 else []
        yield (
            stack.enter_context(
                Workers(system.system, SCRIPT, args, out, standbys=system.standbys, restarts=1000, env=env, machines=on)
            ),
            store,
        )


def run(system: System, kills: int, folder: Path, rng: random.Random) -> Outcome:
    """Run the job under ``system`` and kill a worker ``kills`` times."""
    out = folder_of(system, folder)
    traces = Traces(out)
    outcome = Outcome(system)
    with started(system, out) as (workers, store):
        wait(traces, workers, lambda: settled(traces, system.pace))
        outcome.step_s = step_time(traces)
        for number in range(kills):
            rank = (WORKERS - 1 + number) % WORKERS
            wait_for_a_moment(workers, traces, rng, outcome.step_s, system.pace)
            if system.resizes:
                kill = resize(rank, workers, traces, out / "events.jsonl")
            elif workers.machines:
                kill = strike_machine(workers, traces, outcome.step_s)
            else:
                kill = strike(rank, workers, traces, outcome.step_s, store, number)
            outcome.kills.append(kill)
            growth = "" if kill.growth_s is None else f", grew in {kill.growth_s:.2f} s"
            say(
                f"{system.name}: kill {number + 1}/{kills} of rank {', '.join(map(str, kill.ranks))}: "
                f"stalled {kill.stall_s:.2f} s, regained after {kill.regained_s:.2f} s, "
                f"{kill.recomputed} steps recomputed{growth}"
            )
        traces.refresh()
        last = traces.furthest() + max(3, min(60, round(2.0 / outcome.step_s)))
        end(workers, last)
    traces.refresh()
    # With another number of workers a step is of other samples.
    outcome.lost_samples = None if system.resizes else lost_samples(traces)
    if system.ours and not system.resizes:
        add_readiness(outcome, out / "events.jsonl")
    return outcome


def wait_for_a_moment(workers: Workers, traces: Traces, rng: random.Random, step_s: float, pace: int) -> None:
    """Let the job continue until somewhere in a step, up to ``pace`` steps later: anywhere between two checkpoints."""
    target = traces.furthest() + rng.randint(5, pace)
    wait(traces, workers, lambda: traces.furthest() >= target)
    time.sleep(rng.random() * step_s)
    traces.refresh()


def strike(rank: int, workers: Workers, traces: Traces, step_s: float, store: Any, number: int) -> Kill:
    """Kill a worker and wait until all is as before."""
    at = hit(rank, workers, traces, store, number)
    return measure([rank], at, workers, traces, step_s)


def hit(rank: int, workers: Workers, traces: Traces, store: Any, number: int) -> float:
    """Kill a worker, the ``number``-th of this run, counted from 0; returns when.

    A worker that nobody else starts again is started here; before that it is told in ``store``, if there is one, which
    communicator the survivors are about to form.
    """
    at = time.time()
    os.kill(traces.lines[rank][-1]["pid"], signal.SIGKILL)
    if store is not None:
        store.set("round", str(number + 1))
    if rank in workers.processes:
        workers.processes[rank].wait()
        workers.start_replica(rank)
    return at


def strike_machine(workers: Workers, traces: Traces, step_s: float) -> Kill:
    """Kill the machine of the last rank and wait until all is as before; then it is started again, as the spare one.

    The first machine hosts the meeting point, and with c10d the job ends with it.
    """
    pid = traces.lines[WORKERS - 1][-1]["pid"]
    place = next(place for place, machine in enumerate(workers.machines) if pid in machine.processes())
    there = workers.machines[place].processes()
    ranks = [rank for rank in range(WORKERS) if traces.lines[rank][-1]["pid"] in there]
    at = time.time()
    workers.machines[place].kill()
    kill = measure(ranks, at, workers, traces, step_s)
    waiting = workers.log.read_text().count("waits as a spare")
    workers.machines[place].heal()
    workers.start_machine(place)
    wait(traces, workers, lambda: workers.log.read_text().count("waits as a spare") > waiting)
    time.sleep(SPARE_WAITS_S)
    return kill


def measure(failed: Sequence[int], at: float, workers: Workers, traces: Traces, step_s: float) -> Kill:
    """Wait until all is as before the failure of some ranks, and read the traces."""
    traces.refresh()
    furthest = traces.furthest(before=at)

    def beyond(one: int) -> float | None:
        return next((line["time"] for line in traces.steps(one, at) if line["step"] > furthest), None)

    wait(traces, workers, lambda: all(beyond(one) is not None for one in range(WORKERS)))
    others = [one for one in range(WORKERS) if one not in failed]
    stalled = {one: stalled_until(traces, one, at, step_s) - at for one in range(WORKERS)}
    return Kill(
        tuple(failed),
        at,
        stall_s=max(stalled.values()),
        survivors_s=max(stalled[one] for one in others),
        regained_s=max(beyond(one) or at for one in range(WORKERS)) - at,
        recomputed=max(repeated(traces, one, at) for one in others),
        user_s=user_time(traces, at),
    )


def resize(rank: int, workers: Workers, traces: Traces, events: Path) -> Kill:
    """Kill a worker; wait until the others have continued without it, in new processes, and until the job has grown."""
    before = traces.pids()
    killed, at = traces.lines[rank][-1]["pid"], time.time()
    os.kill(killed, signal.SIGKILL)
    left, everyone = range(WORKERS - 1), range(WORKERS)
    stall_s = wait_for_steps(left, before, workers, traces) - at
    steps = [line for one in everyone for line in traces.steps(one)]
    furthest = max(line["step"] for line in steps if line["pid"] in before)
    regained_s = wait_for_steps(left, before, workers, traces, furthest) - at
    made = {line["step"] for line in steps if line["pid"] in before - {killed}}
    again = {line["step"] for one in left for line in traces.steps(one) if line["pid"] not in before} & made
    user_s = user_time(traces, at)
    grown = wait_for_steps(everyone, traces.pids(), workers, traces)
    decided = [
        event.fields["detected"]
        for event in read_events(events)
        if event.kind == "generation" and event.fields.get("stay") and not event.fields["failed"] and event.time > at
    ]
    return Kill((rank,), at, stall_s, stall_s, regained_s, len(again), user_s, growth_s=grown - max(decided))


def wait_for_steps(ranks: Sequence[int], before: set[int], workers: Workers, traces: Traces, beyond: int = 0) -> float:
    """When new processes of all these ranks, not those ``before``, had made a step beyond a number of steps."""

    def first(rank: int) -> float | None:
        return next((x["time"] for x in traces.steps(rank) if x["pid"] not in before and x["step"] > beyond), None)

    wait(traces, workers, lambda: None not in map(first, ranks))
    return max(first(rank) or 0.0 for rank in ranks)


def add_readiness(outcome: Outcome, path: Path) -> None:
    """Add from the events, for each kill, how long it took until the last survivor was ready."""
    found = recoveries(read_events(path))
    for kill in outcome.kills:
        for one in found:
            ready = one.slowest_survivor_ready_s
            if ready is not None and 0 <= one.detected - kill.at < kill.regained_s:
                kill.detected_s = one.detected - kill.at
                kill.ready_s = kill.detected_s + ready
                break


def rows_of(outcome: Outcome, best_other: float | None, shard: float | None = None) -> list[Row]:
    """Rows of one system.

    Args:
        outcome: what was measured.
        best_other: the shortest median stall of other products, in seconds.
        shard: median stall of DDP with as many parameters as a shard has, in seconds.
    """
    name, kills, ours, judged = outcome.system.name, outcome.kills, outcome.system.ours, outcome.system.judged
    stalls = [kill.stall_s for kill in kills]
    median = statistics.median(stalls)
    rows = [Row(name, "kills", len(kills), "")]
    rows.append(at_most(name, "stall, median", median, "s", STALL_TARGET_S if judged else None))
    rows.append(Row(name, "stall, maximum", max(stalls), "s"))
    if shard is not None:
        rows.append(
            at_most(name, "stall / that of DDP with a shard's parameters", median / shard, "ratio", SHARDED_TARGET)
        )
    if outcome.system.machines > 1:
        noticed = [kill.detected_s for kill in kills if kill.detected_s is not None]
        after = [kill.stall_s - kill.detected_s for kill in kills if kill.detected_s is not None]
        rows.append(Row(name, "failure noticed, median", statistics.median(noticed) if noticed else None, "s"))
        rows.append(Row(name, "stall after it was noticed, median", statistics.median(after) if after else None, "s"))
    rows.append(Row(name, "stall of survivors alone, median", statistics.median(k.survivors_s for k in kills), "s"))
    if judged:
        factor = None if best_other is None else best_other / median
        metric = "stall, how many times shorter than the best other"
        rows.append(at_least(name, metric, factor, "times", None if factor is None else FACTOR_TARGET))
    rows.append(Row(name, "step regained, median", statistics.median(kill.regained_s for kill in kills), "s"))
    rows.append(Row(name, "step regained, maximum", max(kill.regained_s for kill in kills), "s"))
    rows.append(Row(name, "user's start-up code", statistics.median(kill.user_s for kill in kills), "s"))
    in_place = ours and not outcome.system.resizes
    if ours:
        ready = [1e3 * kill.ready_s for kill in kills if kill.ready_s is not None]
        slowest = max(ready) if len(ready) == len(kills) else None
        rows.append(Row(name, "survivors ready, median", statistics.median(ready) if ready else None, "ms"))
        usual = in_place and outcome.system.usual and outcome.system.machines == 1
        rows.append(at_most(name, "survivors ready, maximum", slowest, "ms", READY_TARGET_MS if usual else None))
    recomputed = max(kill.recomputed for kill in kills)
    mean = statistics.mean(kill.recomputed for kill in kills)
    if in_place:
        rows.append(at_most(name, "steps recomputed, maximum", recomputed, "steps", 0))
    else:
        rows.append(Row(name, "steps recomputed, mean", mean, "steps"))
    rows.append(at_most(name, "samples lost", outcome.lost_samples, "samples", 0 if in_place else None))
    grown = [kill.growth_s for kill in kills if kill.growth_s is not None]
    if grown:
        rows.append(Row(name, "growth, median", statistics.median(grown), "s"))
        rows.append(Row(name, "growth, maximum", max(grown), "s"))
    rows.append(Row(name, "step time without failures, median", 1e3 * outcome.step_s, "ms"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a target is missed."""
    parser = arguments("recovery", "Stall and lost work after SIGKILL of a worker, under this and other systems.")
    parser.add_argument("--only", metavar="TEXT", default="", help="only systems whose name contains this")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the kills")
    options = begin(parser, argv)
    torchft = has_torchft()
    outcomes = []
    with scratch() as folder:
        for system in SYSTEMS:
            kills = system.kills[options.size] or (system.kills[FULL] if options.only else 0)
            if not kills or options.only not in system.name:
                continue
            if system.system == "torchft" and not torchft:
                continue
            if system.machines > 1 and unavailable():
                say(f"{system.name}: left out, {unavailable()}")
                continue
            say(f"{system.name}: starting, {kills} kills")
            outcomes.append(run(system, kills, folder, random.Random(options.seed)))
    stalls = {o.system.name: statistics.median(kill.stall_s for kill in o.kills) for o in outcomes}
    others = [stalls[o.system.name] for o in outcomes if o.system.usual and not o.system.ours]
    best_other = min(others, default=None)
    rows = []
    for one in outcomes:
        shard = next((o for o in outcomes if o.system.holds_a_shard_of(one.system)), None)
        rows += rows_of(one, best_other, stalls[shard.system.name] if shard is not None else None)
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
