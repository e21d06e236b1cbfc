"""Some ranks do not come to a monitored barrier before it has ended in the others."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import shared_core
from tests.support.report import OUT, Report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("missing", type=int, nargs="*", help="ranks")
    parser.add_argument("--all", action="store_true", help="name all of them")
    args = parser.parse_args()
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), ""
    over = {each: Path(os.environ[OUT], f"over{each}") for each in args.missing}
    for pipe in over.values() if rank == 0 else [over[rank]] if rank in over else []:
        with suppress(FileExistsError):
            os.mkfifo(pipe)
    if rank in over:
        over[rank].read_bytes()
    else:
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=args.all)
        except RuntimeError as error:
            said = str(error)
    for pipe in over.values() if rank == 0 else []:
        pipe.write_bytes(b"")
    report.finish({}, said=said)


if __name__ == "__main__":
    main()
