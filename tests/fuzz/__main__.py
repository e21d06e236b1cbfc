"""``python -m tests.fuzz --minutes 10 --seed 1 [FORMAT ...]``: fuzz each format for so long; status 1 if any fails."""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
from pathlib import Path

from .formats import FORMATS, targets_of
from .harness import HARD_LIMIT_S, Fuzzer, fuzz, watched


def main() -> int:
    """Run, and print a line for each decoder."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("formats", metavar="FORMAT", nargs="*", help=f"{', '.join(FORMATS)}, or one of their decoders")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each format (default: 10)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="default: a new one")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="for failing inputs (default: %(default)s)")
    parser.add_argument("--input", type=Path, metavar="FILE", help="try this input of one decoder again")
    parser.add_argument("--number", type=int, metavar="N", help="try this input of that --seed again")
    options = parser.parse_args()
    failed = False
    for name in options.formats or FORMATS:
        targets = targets_of(name)
        if options.input is not None or options.number is not None:
            failed = _again(targets, options) or failed
            continue
        print(f"{name}: {len(targets)} decoders, {options.minutes:g} minutes, seed {options.seed}", flush=True)
        faulthandler.dump_traceback_later(60 * options.minutes + 10 * HARD_LIMIT_S, exit=True)
        for report in fuzz(targets, options.seed, seconds=60 * options.minutes, out=options.out):
            print(report, flush=True)
            failed = failed or bool(report.failures)
    return int(failed)


def _again(targets: list, options: argparse.Namespace) -> bool:
    failed = False
    for target in targets:
        fuzzer = Fuzzer(target, options.seed)
        data = fuzzer.input(options.number) if options.input is None else options.input.read_bytes()
        with watched():
            failure = fuzzer.try_one(data)
        print(f"{target.name}: {failure.place if failure else 'nothing is wrong'}")
        if failure is not None:
            print(failure.text)
        failed = failed or failure is not None
        fuzzer.close()
    return failed


if __name__ == "__main__":
    sys.exit(main())
