"""The pipeline of the demo: a GPT-2 as a DeepSpeed pipeline, in a loop that knows nothing of failures.

Run by ``python -m examples.demo``. With ``--strategy stock`` it is DeepSpeed alone, else ``swift`` with stages that
survive.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from examples.gpt2_layers import gpt2_layers, loss, windows
from shared_core.pipeline import import_deepspeed, initialize, install

MICRO_BATCHES = 4
ROWS = 2


def state_hash(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over every bit of parameters and optimizer state."""
    hasher = hashlib.sha256()
    for parameter in module.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter.detach(), *(state[key] for key in sorted(state))):
            hasher.update(torch.as_tensor(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def main() -> None:
    """Train, then write ``rank{r}.json`` and, on rank 0, ``metrics.csv``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=("stock", "swift"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed = import_deepspeed()
    if options.strategy == "swift":
        install()
    deepspeed.init_distributed(dist_backend="gloo")
    pipelines = dist.get_world_size() // options.stages
    torch.manual_seed(0)
    net = deepspeed.PipelineModule(gpt2_layers(), num_stages=options.stages, loss_fn=loss)
    config = {
        "train_batch_size": ROWS * MICRO_BATCHES * pipelines,
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "steps_per_print": None,
    }
    make: Any = initialize if options.strategy == "swift" else deepspeed.initialize
    engine, optimizer, _, _ = make(model=net, config=config)
    torch.manual_seed(dist.get_rank())
    mine = engine.grid.get_data_parallel_id()
    count = options.steps * MICRO_BATCHES * ROWS
    data = iter(DataLoader(windows(count, skip=mine * (count + 1)), batch_size=ROWS))
    rows = []
    for step in range(options.steps):
        rows.append((step, float(engine.train_batch(data))))
        if dist.get_rank() == 0:
            with (options.out / "metrics.csv").open("w", newline="") as file:
                csv.writer(file).writerows([("step", "train_loss"), *rows])
    report = {"rank": dist.get_rank(), "steps": engine.global_steps, "hash": state_hash(net, optimizer)}
    (options.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
