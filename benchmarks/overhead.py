"""What fault tolerance costs while nothing fails: step time and memory of DDP, FSDP2 and DeepSpeed's ZeRO-3 on backend
swift against plain gloo.

The jobs of all systems are started once and take turns: while one runs a block of steps, the workers of the others are
blocked on a socket. Ratios are taken within one round of turns, so that whatever else the machine does hits all alike.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import turns
from benchmarks.common import (
    FULL,
    QUICK,
    WORKERS,
    Row,
    arguments,
    at_most,
    begin,
    finish,
    has_torchft,
    lighthouse,
    median_ratio,
    say,
)
from benchmarks.overhead_parts import PARTS
from benchmarks.overhead_worker import SHARDED
from benchmarks.turns import Side, Start
from shared_core.config import variable_of

SCRIPT = Path(__file__).with_name("overhead_worker.py")
#: Steps in a block, and rounds by size of the run; 0 leaves the case out, unless it is asked for.
CASES: dict[str, tuple[int, tuple[int, int, int]]] = {
    "gpt2": (4, (5, 8, 30)),
    "mlp": (30, (8, 10, 40)),
    "1M": (30, (0, 0, 20)),
    "10M": (4, (3, 8, 16)),
    "50M": (1, (0, 0, 12)),
    "fsdp2-10M": (2, (0, 4, 12)),
    "fsdp2-50M": (1, (0, 0, 10)),
    "zero3-10M": (2, (0, 4, 12)),
    "zero3-50M": (1, (0, 0, 10)),
}
NAMES = {
    "gpt2": "demo GPT-2, 1.2 M parameters",
    "mlp": "worst case: 6-layer MLP, width 512, batch 32",
    "1M": "MLP, 1 M parameters",
    "10M": "MLP, 10 M parameters",
    "50M": "MLP, 50 M parameters",
    "fsdp2-10M": "FSDP2, GPT-2, 10 M parameters",
    "fsdp2-50M": "FSDP2, GPT-2, 50 M parameters",
    "zero3-10M": "ZeRO-3, GPT-2, 10 M parameters",
    "zero3-50M": "ZeRO-3, GPT-2, 50 M parameters",
}
TARGETS = {"gpt2": 1.02, "mlp": 1.04, "10M": 1.02, "50M": 1.02} | dict.fromkeys(SHARDED, 1.05)
#: Begins the name of swift with an option that it does not have by default.
ALSO = "swift, "
#: In gradients of the model, where one is larger than what interpreter and allocator vary by. Of a sharded model:
#: parameters and moments of a shard, and two of its gradients.
MEMORY_TARGETS = {"10M": 0.5, "50M": 0.5} | dict.fromkeys(SHARDED, (3 + 2) / WORKERS)


@contextlib.contextmanager
def sides(systems: Sequence[str]) -> Iterator[dict[str, Side]]:
    """Start one job for each system; yields them by name once all workers have called."""
    with contextlib.ExitStack() as stack:
        starts = {}
        for system in systems:
            env = {}
            if system == "torchft":
                env["TORCHFT_LIGHTHOUSE"] = stack.enter_context(lighthouse(WORKERS))
            if system.startswith(ALSO):
                option, _, value = system.removeprefix(ALSO).partition("=")
                env[variable_of(option)] = value
            launcher = "torchrun" if system == "gloo" else system.partition(",")[0]
            starts[system] = Start(launcher, ("--system", system), env)
        yield stack.enter_context(turns.sides(starts, SCRIPT))


def measure(case: str, ready: Mapping[str, Side], steps: int, rounds: int, alone: bool = True) -> list[Row]:
    """Rows of one case: ``rounds`` rounds of ``steps`` steps on each; memory is judged if the case is ``alone``."""
    name = NAMES[case]
    parameters = 0
    for side in ready.values():
        parameters = side.ask({"build": case})[0]["parameters"]
    for side in ready.values():
        side.step_time(max(3, steps))  # DDP settles its buckets, allocators warm up
    answers = turns.in_turns(ready, rounds, {"run": steps})
    times = {s: [max(a["seconds"] for a in block) / steps for block in each] for s, each in answers.items()}
    used = {s: [sum(a["processor"] for a in block) for block in each] for s, each in answers.items()}
    rows = [Row(name, f"step time on {system}", 1e3 * statistics.median(times[system]), "ms") for system in ready]
    for system in ready:
        if system == "gloo":
            continue
        target = TARGETS.get(case) if system == "swift" else None
        ratio = median_ratio(times[system], times["gloo"])
        rows.append(at_most(name, f"step time, {system} / gloo", ratio, "ratio", target))
        ratio = median_ratio(used[system], used["gloo"])
        rows.append(Row(name, f"processor time of all workers, {system} / gloo", ratio, "ratio"))
    gradient = 4.0 * parameters
    plain = ready["gloo"].peak()
    for system in ready:
        if system == "gloo":
            continue
        extra = (ready[system].peak() - plain) / gradient
        target = MEMORY_TARGETS.get(case) if system == "swift" and alone else None
        rows.append(at_most(name, f"peak memory of a worker, {system} - gloo", extra, "gradients", target))
    for system in [each for each in ready if each.startswith(ALSO)]:
        ratio = median_ratio(times[system], times["swift"])
        rows.append(Row(name, f"step time, {system} / swift", ratio, "ratio"))
    rows.append(Row(name, "published by a worker in shared memory", ready["swift"].published() / 1e6, "MB"))
    for row in rows:
        if row.unit == "ratio":
            say(f"{row.case}: {row.metric} {row.value:.3f}")
    return rows


def costs(case: str, side: Side, steps: int) -> list[Row]:
    """Rows of what each part of the product takes of a step in processor time, the median of the workers. Call it last:
    the workers keep the clocks.
    """
    answers = side.ask({"parts": steps})
    rows = []
    for name, _, within in PARTS:
        taken = [1e3 * answer[name] for answer in answers if name in answer]
        if taken:
            metric = f"{name} (part of: {within})" if within else name
            rows.append(Row(NAMES[case], metric, statistics.median(taken), "ms a step"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a target is missed."""
    parser = arguments("overhead", "Step time and memory of DDP, FSDP2 and ZeRO-3 on backend swift against plain gloo.")
    parser.add_argument("--only", choices=list(CASES), action="append", help="only this case; may be repeated")
    parser.add_argument("--parts", action="store_true", help="also what each part takes of a step")
    parser.add_argument(
        "--also", metavar="OPTION=VALUE", action="append", default=[], help="also swift with this option"
    )
    options = begin(parser, argv)
    systems = ["gloo", "swift"]
    if options.size == FULL and has_torchft():
        systems.append("torchft")
    systems += [f"{ALSO}{each}" for each in options.also]
    rounds = {
        case: by_size[options.size] or (by_size[FULL] if options.only else 0) for case, (_, by_size) in CASES.items()
    }
    chosen = [case for case in options.only or CASES if rounds[case]]
    rows: list[Row] = []
    # Together with --quick, because starting takes longest; apart otherwise, so that no case sees another's memory.
    for batch in [chosen] if options.size == QUICK else [[case] for case in chosen]:
        # The other two are for DistributedDataParallel.
        able = systems if batch[0] not in SHARDED else ["gloo", "swift"]
        say(f"starting {' and '.join(able)} for {', '.join(batch)}")
        with sides(able) as ready:
            for case in batch:
                say(f"{NAMES[case]}: {rounds[case]} rounds of {CASES[case][0]} steps on each")
                rows += measure(case, ready, CASES[case][0], rounds[case], alone=len(batch) == 1)
            if options.parts:
                rows += costs(batch[-1], ready["swift"], 10 * CASES[batch[-1]][0])
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
