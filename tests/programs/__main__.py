"""``python -m tests.programs --seed 1 --count 300``: random programs, each stock and with a failure; prints a table."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from .grammar import write
from .trial import HANG, OTHER, REFUSED, SAME, trials


def main() -> int:
    """Status 1 if a program ended otherwise than stock without an error, or not at all."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first program; the others have the next numbers")
    parser.add_argument("--count", type=int, default=20, help="how many programs")
    parser.add_argument("--registered", action="store_true", help="register all state: no plain variables")
    parser.add_argument("--restart", action="store_true", help="all start again from a checkpoint; nobody is replaced")
    parser.add_argument("--show", action="store_true", help="print the scripts in the place of running them")
    args = parser.parse_args()
    seeds, plain = range(args.seed, args.seed + args.count), not args.registered
    if args.show:
        for seed in seeds:
            print(write(seed, plain=plain).swift)
        return 0
    found: Counter[str] = Counter()
    with trials() as each:
        for seed in seeds:
            outcome = each.run(seed, plain=plain, restart=args.restart)
            found[outcome.verdict] += 1
            print(outcome.row(), flush=True)
    print(", ".join(f"{found[verdict]} {verdict}" for verdict in (SAME, REFUSED, OTHER, HANG)))
    options = "".join(f" --{each}" for each in ("registered", "restart") if getattr(args, each))
    again = f"python -m tests.programs{options} --count 1 --seed SEED"
    print(f"one again: {again}")
    return 1 if found[OTHER] or found[HANG] else 0


if __name__ == "__main__":
    sys.exit(main())
