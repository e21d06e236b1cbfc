"""What surviving stages cost while nothing fails: DeepSpeed's own pipeline engine on plain gloo against ours.

Jobs take turns step by step in blocks, see :mod:`benchmarks.turns`. With two replicas of each stage nothing is logged
to disk; with one, every message that crosses between two groups of stages is. A slow disk is emulated: the thread that
writes the log sleeps as long as such a disk would take.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import turns
from benchmarks.common import QUICK, WORKERS, Row, arguments, at_most, begin, finish, median_ratio, say
from benchmarks.pipeline_model import COMPUTE, ENV, MICRO_BATCHES
from benchmarks.turns import Side, Start

SCRIPT = Path(__file__).with_name("pipeline_overhead_worker.py")
PLAIN = "DeepSpeed"
TARGET, TARGET_LOGGED = 1.03, 1.05
SLOW_DISK_BYTES_PER_S = 10e6
#: Steps in a block; rounds by compute and size of the run.
STEPS, ROUNDS = 4, {"emulated": (0, 5, 6), "real": (3, 8, 15)}
_NEVER = (("SWIFT_RECOVERY_LOG_MESSAGES", "never"),)
_EACH = (("SWIFT_RECOVERY_LOG_GROUPS", "worker"),)
_GROUPS = (("SWIFT_RECOVERY_LOG_GROUPS", "0-1,2-3"),)


@dataclass(frozen=True)
class Variant:
    """A way to run our engine.

    Attributes:
        name: in the table.
        target: of its step time over DeepSpeed's.
        args: more of the worker's.
        env: more of its environment.
        quick: also in a quick run.
    """

    name: str
    target: float
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    quick: bool = False


REPLICAS = (Variant("ours, replicas", TARGET, quick=True),)
LOGGED = (
    Variant("ours, no logs", TARGET, env=_NEVER),
    Variant("ours, all boundaries logged", TARGET_LOGGED, env=_EACH, quick=True),
    Variant("ours, boundary of groups 0-1 and 2-3 logged", TARGET_LOGGED, env=_GROUPS),
    Variant(
        f"ours, all logged to a disk of {SLOW_DISK_BYTES_PER_S / 1e6:g} MB/s",
        TARGET_LOGGED,
        args=("--disk-bytes-per-s", str(SLOW_DISK_BYTES_PER_S)),
        env=_EACH,
    ),
)
#: Stages of a pipeline with four workers, and how our engine runs there.
TOPOLOGIES = {2: REPLICAS, 4: LOGGED}


def measure(case: str, ready: Mapping[str, Side], variants: Sequence[Variant], rounds: int, judged: bool) -> list[Row]:
    """Rows of one pipeline: ``rounds`` rounds of blocks on each job."""
    for side in ready.values():
        side.ask({"run": 3})  # shapes become known, allocators warm up
    done = turns.in_turns(ready, rounds, {"run": STEPS})
    steps = {name: [block[0]["steps"] for block in each] for name, each in done.items()}  # the first stage ends last
    logged = {name: sum(a["logged"] for block in each for a in block) for name, each in done.items()}
    cpu_s = {name: [sum(a["cpu_s"] for a in block) for block in each] for name, each in done.items()}
    medians = {name: statistics.median(step for block in blocks for step in block) for name, blocks in steps.items()}
    rows = [Row(case, f"step time, {name}", 1e3 * medians[name], "ms") for name in ready]
    plain = ready[PLAIN].ask({"memory": True})
    for variant in variants:
        name = variant.name
        pairs = zip(steps[name], steps[PLAIN], strict=True)
        ratios = sorted(statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs)
        value, metric = statistics.median(ratios), f"step time, {name} / {PLAIN}"
        rows.append(at_most(case, metric, value, "ratio", variant.target if judged else None))
        if len(ratios) >= 4:
            low, _, high = statistics.quantiles(ratios, n=4)
            rows.append(Row(case, f"half of the rounds within, {name}", (high - low) / 2, "+-"))
        say(f"{case}: {name} / {PLAIN} {value:.3f}")
        used = median_ratio(cpu_s[name], cpu_s[PLAIN])
        rows.append(Row(case, f"processor time of all workers, {name} / {PLAIN}", used, "ratio"))
        answers = ready[name].ask({"memory": True})
        rows.append(Row(case, f"logged in a step by all ranks, {name}", logged[name] / (rounds * STEPS) / 1e6, "MB"))
        blocked = max(answer["blocked_s"] for answer in answers)
        rows.append(Row(case, f"waited for the disk in all, {name}", blocked, "s"))
        more = [peak(ours) - peak(theirs) for ours, theirs in zip(answers, plain, strict=True)]
        rows.append(Row(case, f"peak memory of a worker, {name} - {PLAIN}", max(more) / 1e6, "MB"))
    parameters = max(answer["parameters"] for answer in plain)
    rows.append(Row(case, "parameters of a stage", 4e-6 * parameters, "MB"))
    return rows


def peak(answer: Mapping[str, Mapping[str, float]]) -> float:
    """Most bytes that a worker had over what it had before the model was built, mapped files apart."""
    before, after = answer["before"], answer["after"]
    return after["VmHWM"] - after["RssFile"] - before["RssAnon"] - before["RssShmem"]


def run(compute: str, stages: int, variants: Sequence[Variant], rounds: int, judged: bool = True) -> list[Row]:
    """Start DeepSpeed's own job and ours, and measure."""
    case = f"{stages} stages x {WORKERS // stages}, {compute}"
    args = ("--compute", compute, "--stages", str(stages))
    starts = {PLAIN: Start("torchrun", ("--system", PLAIN, *args), ENV)}
    for variant in variants:
        own = ("--system", variant.name, "--ours", *args, *variant.args)
        starts[variant.name] = Start("swift", own, ENV | dict(variant.env))
    say(f"{case}: starting {', '.join(starts)}")
    with turns.sides(starts, SCRIPT, standbys=0) as ready:
        say(f"{case}: {rounds} rounds of {STEPS} steps of {MICRO_BATCHES} micro-batches on each")
        return measure(case, ready, variants, rounds, judged)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a target is missed."""
    parser = arguments("pipeline_overhead", "Step time, logs and memory of our pipeline engine against DeepSpeed's.")
    parser.add_argument("--only", choices=list(COMPUTE), help="only with this compute")
    parser.add_argument("--stages", type=int, choices=list(TOPOLOGIES), help="only with so many stages")
    options = begin(parser, argv)
    rows: list[Row] = []
    for stages, variants in TOPOLOGIES.items():
        if options.stages not in (None, stages):
            continue
        for compute in COMPUTE:
            rounds = ROUNDS[compute][options.size]
            if options.only in (None, compute) and rounds:
                chosen = [variant for variant in variants if variant.quick or options.size > QUICK]
                rows += run(compute, stages, chosen, rounds)
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
