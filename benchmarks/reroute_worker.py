"""Worker of the re-routing benchmark: a plain loop over ``train_batch`` that notes when each step has returned."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks import pipeline_model as model
from benchmarks.recovery_worker import Trace


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compute", choices=list(model.COMPUTE), required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--straggler", type=int, default=-1, help="rank that takes twice as long once told to")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    trace = Trace(options.out, rank)
    model.start(True)
    engine, _, data = model.engine(options.compute, options.stages, swift=True, micro_batches=options.micro_batches)
    step, stop, slow = 0, options.out / "stop", options.out / "slow"
    stages = [module for module in engine.module.modules() if isinstance(module, model.Emulated)]
    seconds = model.COMPUTE[options.compute].slot_s
    trace.note("loop")
    while not (stop.exists() and step >= int(stop.read_text() or 1 << 60)):
        if rank == options.straggler and slow.exists():
            for stage in stages:
                stage.seconds = 2 * seconds
        engine.train_batch(data)
        step += 1
        trace.note("step", step=step)


if __name__ == "__main__":
    main()
