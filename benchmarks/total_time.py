"""Total time of a training under failures, over that without: this system and what others use.

``--simulated``: days of training, one loss in 1 to 48 hours, from measured stalls and given times of the job
(``shared_core.simulate.total_time``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.common import Row, arguments, finish
from shared_core.simulate.total_time import Training, total_time, worst_case

MTBFS_H = (1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 48.0)
DAYS = 30.0


def simulated_rows(seeds: int) -> list[Row]:
    """Every system at every mean time between losses; this one also without overhead and with its worst."""
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
    """Run the benchmark."""
    parser = arguments("total_time", "Total time of a training under failures, over that without.")
    parser.add_argument("--simulated", action="store_true", help="days of training, simulated from measured stalls")
    options = parser.parse_args(argv)
    if not options.simulated:
        parser.error("only --simulated is there so far")
    rows = simulated_rows(2 if options.quick else 8)
    print("system".ljust(36), *(f"{mtbf:g} h".rjust(7) for mtbf in MTBFS_H))
    for case in dict.fromkeys(row.case for row in rows):
        print(case.ljust(36), *(f"{row.value:7.4f}" for row in rows if row.case == case))
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
