"""What it costs, while nothing fails, that workers could continue without each other: ``shared_steps`` against plain
DDP.

``shared_steps`` sums gradients when backward is done, over point-to-point messages; DDP overlaps its all-reduce with
backward. The jobs take turns, as in *overhead*. With ``--only rejoin``: how long the others stop when a replacement is
admitted (:mod:`benchmarks.rejoin`).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import rejoin, turns
from benchmarks.common import QUICK, Row, arguments, begin, finish, median_ratio, say
from benchmarks.overhead import NAMES
from benchmarks.turns import Side, Start

SCRIPT = Path(__file__).with_name("reroute_ddp_worker.py")
#: Steps in a block, and rounds by size of the run.
CASES = {"mlp": (20, (5, 12, 20)), "gpt2": (4, (4, 8, 16)), "10M": (4, (3, 8, 12))}
_REJOIN = "rejoin"
SYSTEMS = {
    "gloo": Start("torchrun", ("--loop", "ddp")),
    "replace": Start("swift", ("--loop", "ddp", "--system", "replace")),
    "sum": Start("swift", ("--loop", "shared", "--system", "sum"), {"SWIFT_RECOVERY_ON_FAILURE": "reroute"}),
    "ordered": Start(
        "swift",
        ("--loop", "shared", "--system", "ordered"),
        {"SWIFT_RECOVERY_ON_FAILURE": "reroute", "SWIFT_RECOVERY_REROUTE_REDUCTION": "ordered"},
    ),
}


def measure(case: str, ready: Mapping[str, Side], steps: int, rounds: int) -> list[Row]:
    """Rows of one case: ``rounds`` rounds of ``steps`` steps on each."""
    for side in ready.values():
        side.step_time(max(3, steps))
    answers = turns.in_turns(ready, rounds, {"run": steps})
    times = {s: [max(a["seconds"] for a in block) / steps for block in each] for s, each in answers.items()}
    name = NAMES[case]
    rows = [Row(name, f"step time, {system}", 1e3 * statistics.median(times[system]), "ms") for system in ready]
    for system in ready:
        if system != "gloo":
            ratio = median_ratio(times[system], times["gloo"])
            rows.append(Row(name, f"step time, {system} / gloo", ratio, "ratio"))
            say(f"{name}: {rows[-1].metric} {ratio:.3f}")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 0."""
    parser = arguments("reroute_ddp", "Step time of shared_steps, whose workers may continue alone, against plain DDP.")
    parser.add_argument("--only", choices=[*CASES, _REJOIN], action="append", help="only this case; may be repeated")
    options = begin(parser, argv)
    rows: list[Row] = []
    for case in options.only or ("mlp",) if options.size == QUICK else (*CASES, _REJOIN):
        if case == _REJOIN:
            rows += rejoin.rows(options.size)
            continue
        steps, rounds = CASES[case]
        say(f"starting {', '.join(SYSTEMS)} for {case}")
        starts = {
            system: Start(start.launcher, (*start.args, "--case", case), start.env) for system, start in SYSTEMS.items()
        }
        with turns.sides(starts, SCRIPT) as ready:
            rows += measure(case, ready, steps, rounds[options.size])
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
