"""Worker of the recovery benchmark: a plain DDP loop that notes when each optimizer step has returned.

The three systems differ only where a user of each would write something else.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

BEGIN = time.time()  # before the imports, which are not the user's own start-up code

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

WIDTH, LAYERS, BATCH = 512, 6, 32


class Trace:
    """One line of JSON for each thing that happened to a rank; read by the benchmark while the job runs."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.fd = os.open(folder / f"trace{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, kind: str, **fields: Any) -> None:
        """Append one line."""
        line = {"kind": kind, "time": time.time(), "pid": os.getpid()} | fields
        os.write(self.fd, (json.dumps(line) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["swift", "torchrun", "torchft"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=0, help="steps between two checkpoints")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    trace = Trace(options.out, rank)
    main_begin = time.time()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-3)
    counter = {"step": 0}
    job: Any = None
    manager: Any = None
    checkpoint = options.out / "checkpoint.pt"
    if options.system == "torchft":
        from benchmarks import torchft_side

        extra = (lambda: dict(counter), counter.update)
        manager, model, optimizer = torchft_side.wrap(net, optimizer, "recovery", min_replicas=1, extra=extra)
    else:
        if options.system == "swift":
            import shared_core

            job = shared_core.install()
        dist.init_process_group("gloo")
        if options.every and checkpoint.exists():
            saved = torch.load(checkpoint)
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            counter["step"] = saved["step"]
        model = nn.parallel.DistributedDataParallel(net)
        if job is not None:
            job.entry("fit")
            job.attach([model], [optimizer])
            job.register("counter", lambda: counter, counter.update)
    trace.note("loop", user_s=time.time() - main_begin, import_s=main_begin - BEGIN)

    stop = options.out / "stop"
    while not (stop.exists() and counter["step"] >= int(stop.read_text() or 1 << 60)):
        if job is not None:
            job.batch_top()
        step = counter["step"]
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step * 100 + rank))
        optimizer.zero_grad()
        (model(x) - x.sin()).pow(2).mean().backward()
        optimizer.step()
        if manager is not None:
            if manager.current_step() == step:
                trace.note("discarded", step=step + 1)
                continue
            counter["step"] = manager.current_step()
        else:
            counter["step"] = step + 1
        trace.note("step", step=counter["step"])
        if options.every and rank == 0 and counter["step"] % options.every == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": counter["step"]}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    trace.note("end", step=counter["step"])
    if manager is not None:
        manager.shutdown(wait=False)
        os._exit(0)  # its threads do not end by themselves
    if job is not None:
        job.entry_done(None)
    dist.barrier()  # gloo may hang when its last operation was DDP's own, and the group goes with the model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
