"""Total time of a training under failures, over that without: this system and what others use.

Real: the job of *recovery* makes a fixed number of steps under each system, and workers are killed (SIGKILL) when the
job has come to the same steps. Steps and not moments: so short a training needs losses seconds apart, and by the clock
a system would be hit again in its recovery, which the imitations of others do not survive. Machines fail by the clock,
so slower systems get off lightly here. For each:

- total time: from step 20 until the last one, over that of plain DDP without failures. Before that workers may still be
  starting: torchft's first one begins alone;
- recomputed: updates that rank 0, which is never killed, made again;
- lost: samples whose gradients are in no update;
- final loss on a fixed set that nobody trains on, and whether the parameters are bit for bit those without failures.

``--simulated``: days of training, one failure in 1 to 48 hours, from measured stalls and given times of the job
(:mod:`benchmarks.simulated_training`).
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common import WORKERS, Row, arguments, at_least, at_most, begin, finish, has_torchft, say, scratch
from benchmarks.recovery import System, folder_of, hit, started
from benchmarks.recovery_traces import Traces, step_time, wait
from benchmarks.recovery_worker import BATCH
from benchmarks.simulate.checkpoints import young
from benchmarks.simulated_training import Training, total_time, worst_case

MTBFS_H = (1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 48.0)
DAYS = 30.0
#: Steps of a real run, by its size, and those before time is taken.
STEPS, WARM = (120, 120, 300), 20
#: Seconds that ranks get to end after the first of them has made the last step.
END_S = 10.0
YOUNG = -1
PLAIN = System("plain DDP, no failures", "torchrun", (0, 0, 0))
REROUTE = System("this, reroute", "shared", (1, 1, 2))
COMPARED = [
    System("this, replace", "swift", (1, 1, 2)),
    REROUTE,
    System("CheckFreq's way", "checkfreq", (0, 0, 2)),
    System("Elastic Horovod's way, a commit every 20 steps", "commit", (0, 1, 2), every=20),
    System("torchrun, checkpoints at Young's interval", "torchrun", (0, 1, 2), every=YOUNG),
    System("torchft, heartbeat time-out 1 s", "torchft", (0, 1, 2), heartbeat_ms=1000, timeout_s=5),
]


@dataclass(frozen=True)
class Run:
    """One training to its last step.

    Attributes:
        system: it ran under.
        seconds: from step ``WARM`` to the last one.
        losses: workers killed.
        step_s: median time of a step.
        recomputed: updates that rank 0 made again.
        lost: samples whose gradients are in no update, after step ``WARM``.
        loss: on the evaluation set, at the end.
        digests: of the final parameters, of all ranks that reached the end.
        saved_s: duration of the last checkpoint, where rank 0 noted one.
    """

    system: System
    seconds: float
    losses: int
    step_s: float
    recomputed: int
    lost: int
    loss: float
    digests: frozenset[str]
    saved_s: float | None


def failures_of(steps: int, number: int, seed: int) -> list[float]:
    """When workers are killed, in steps and parts of one: one in each of ``number`` equal parts of the training after
    step ``WARM``, but not in its last 10 steps.
    """
    generator, part = random.Random(seed), (steps - WARM - 10) / number
    return [WARM + (each + generator.random()) * part for each in range(number)]


def train(system: System, steps: int, losses: Sequence[float], folder: Path) -> Run:
    """Run the job to its last step, and kill workers at these."""
    out = folder_of(system, folder)
    (out / "stop").write_text(str(steps))
    traces = Traces(out)
    killed = 0.0

    def reached(step: float) -> bool:
        return any(line.get("step", 0) >= step for lines in traces.lines for line in lines[-3:])

    def whole() -> bool:
        """Every rank has made a step since the last loss."""
        return all(any(x["kind"] == "step" and x["time"] > killed for x in lines[-3:]) for lines in traces.lines)

    with started(system, out) as (workers, store):
        for number, moment in enumerate(losses):
            wait(traces, workers, lambda moment=moment: reached(int(moment)) and whole())
            time.sleep(moment % 1 * step_time(traces))
            traces.refresh()
            killed = hit(WORKERS - 1 - number % (WORKERS - 1), workers, traces, store, number)
        wait(traces, workers, lambda: reached(steps))
        # Replacements that are not in yet do not count.
        deadline = time.monotonic() + END_S
        while not all(lines[-1]["kind"] == "end" for lines in traces.lines) and time.monotonic() < deadline:
            time.sleep(0.05)
            traces.refresh()
    return read(system, traces, steps, len(losses))


def read(system: System, traces: Traces, steps: int, losses: int) -> Run:
    """What the traces tell of a run."""
    made = [line for rank in traces.ranks for line in traces.steps(rank)]
    begin, last = (min(line["time"] for line in made if line["step"] >= step) for step in (WARM, steps))
    shares = {line["step"]: line["shares"] for line in made if "shares" in line and begin < line["time"] <= last}
    first = [line["step"] for line in traces.steps(0)]
    ends = [line for lines in traces.lines for line in lines if line["kind"] == "end" and line["step"] >= steps]
    saved = next((line["time"] for line in reversed(traces.lines[0]) if line["kind"] == "saved"), None)
    return Run(
        system,
        seconds=last - begin,
        losses=losses,
        step_s=step_time(traces),
        recomputed=len(first) - len(set(first)),
        # Where shares are not noted, an update without a rank's gradients cannot be made.
        lost=sum(WORKERS - each for each in shares.values()) * BATCH,
        loss=ends[0]["loss"],
        digests=frozenset(line["digest"] for line in ends),
        saved_s=None if saved is None else saved - traces.steps(0)[-1]["time"],
    )


def rows_of(run: Run, plain: Run, same: Run) -> list[Row]:
    """Rows of one system; ``same`` is the run without failures whose bits it should have."""
    name, ours = run.system.name, run.system.ours
    bits = float(run.digests == same.digests and len(same.digests) == 1)
    return [
        Row(name, "losses", run.losses, ""),
        Row(name, "total time", run.seconds, "s"),
        Row(name, "total time / without failures", run.seconds / plain.seconds, "ratio"),
        Row(name, "step time, median / without failures", run.step_s / plain.step_s, "ratio"),
        at_most(name, "steps recomputed", run.recomputed, "steps", 0 if ours else None),
        at_most(name, "samples lost", run.lost, "samples", 0 if ours else None),
        Row(name, "final loss", run.loss, ""),
        Row(name, "final loss - without failures", run.loss - same.loss, ""),
        at_least(name, f"same bits as {same.system.name}", bits, "", 1 if ours else None),
    ]


def real_rows(size: int, seed: int, only: str) -> list[Row]:
    """Every system under the same losses, after the runs without any."""
    steps = STEPS[size]
    torchft = has_torchft()
    rows = []
    with scratch() as folder:
        bare = replace(PLAIN, every=steps)  # writes its only checkpoint after the last step
        plain = train(bare, steps, (), folder)
        say(f"{PLAIN.name}: {plain.seconds:.1f} s, {1e3 * plain.step_s:.0f} ms a step")
        rows += [Row(PLAIN.name, "total time", plain.seconds, "s"), Row(PLAIN.name, "final loss", plain.loss, "")]
        for system in COMPARED:
            kills, same = system.kills[size], plain
            if not kills or only not in system.name or (system.system == "torchft" and not torchft):
                continue
            if system.every == YOUNG:
                assert plain.saved_s is not None
                every = max(1, round(young(plain.saved_s, plain.seconds / kills) / plain.step_s))
                say(f"a checkpoint takes {1e3 * plain.saved_s:.0f} ms: Young's interval is {every} steps")
                system = replace(system, every=every)
            if system is REROUTE:  # it sums in another order than gloo
                same = train(replace(system, name=f"{system.name}, no failures"), steps, (), folder)
                ratio = same.seconds / plain.seconds
                say(f"{same.system.name}: {same.seconds:.1f} s, {ratio:.3f}")
                rows.append(Row(same.system.name, "total time / without failures", ratio, "ratio"))
            run = train(system, steps, failures_of(steps, kills, seed), folder)
            rows += rows_of(run, plain, same)
            say(f"{system.name}: losses {run.losses}, {run.seconds:.1f} s, {run.seconds / plain.seconds:.3f}")
        again = train(replace(bare, name=f"{bare.name}, once more"), steps, (), folder)
        rows.append(Row(again.system.name, "total time / without failures", again.seconds / plain.seconds, "ratio"))
    return rows


def simulated_rows(seeds: int) -> list[Row]:
    """Every system at every mean time between failures; this one also without overhead and with its worst."""
    training = Training()
    none = replace(training, measured=replace(training.measured, overhead=1.0))
    rows = []
    for name, variant, compared in (
        ("", training, None),
        (", no overhead", none, ("replace", "reroute")),
        (", worst overhead", worst_case(training), ("replace", "reroute")),
    ):
        found = (
            total_time(variant, MTBFS_H, DAYS, seeds)
            if compared is None
            else total_time(variant, MTBFS_H, DAYS, seeds, compared)
        )
        rows += [Row(one.system + name, f"MTBF {one.mtbf_h:g} h", one.ratio, "ratio") for one in found]
    return sorted(rows, key=lambda row: row.case)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a target is missed."""
    parser = arguments("total_time", "Total time of a training under failures, over that without.")
    parser.add_argument("--simulated", action="store_true", help="days of training, simulated from measured stalls")
    parser.add_argument("--only", metavar="TEXT", default="", help="only real systems whose name contains this")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of real failures")
    options = begin(parser, argv)
    if not options.simulated:
        return finish(real_rows(options.size, options.seed, options.only), options.json)
    rows = simulated_rows((2, 4, 8)[options.size])
    print("system".ljust(36), *(f"{mtbf:g} h".rjust(7) for mtbf in MTBFS_H))
    for case in dict.fromkeys(row.case for row in rows):
        print(case.ljust(36), *(f"{row.value:7.4f}" for row in rows if row.case == case))
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
