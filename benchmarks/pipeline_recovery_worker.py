"""Worker of the pipeline recovery benchmark: a plain loop over ``train_batch`` that notes what it does.

Under torchrun it saves DeepSpeed's own checkpoint every ``--every`` steps and starts from the newest.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

BEGIN = time.time()

from benchmarks import pipeline_model as model  # noqa: E402
from benchmarks.recovery_worker import Trace  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compute", choices=list(model.COMPUTE), required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--every", type=int, default=0, help="steps between two checkpoints of DeepSpeed's own")
    options = parser.parse_args()
    trace = Trace(options.out, int(os.environ["RANK"]))
    begin = time.time()
    model.start(options.ours)
    engine, net, data = model.engine(options.compute, options.stages, swift=options.ours)
    step, checkpoints = 0, options.out / "checkpoints"
    if options.every and (checkpoints / "latest").exists():
        engine.load_checkpoint(str(checkpoints))
        step = engine.global_steps
        for _ in range(step * model.MICRO_BATCHES if engine.is_first_stage() or engine.is_last_stage() else 0):
            next(data)
    trace.note("loop", user_s=time.time() - begin, import_s=begin - BEGIN)
    net.register_forward_pre_hook(lambda *_: trace.note("forward", step=step + 1))
    stop = options.out / "stop"
    while not (stop.exists() and step >= int(stop.read_text() or 1 << 60)):
        engine.train_batch(data)
        step += 1
        trace.note("step", step=step)
        if options.every and step % options.every == 0:
            engine.save_checkpoint(str(checkpoints))
    trace.note("end", step=step)
    import torch.distributed as dist

    dist.barrier()
    if not options.ours:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
