"""A GPT-2 as a DeepSpeed pipeline in Accelerate's usual loop, on workers that may be killed.

    swiftrun --nproc-per-node 4 examples/accelerate_gpt2_pipeline.py

Two pipelines of two stages. Kill a worker while it runs (process numbers are printed): the fingerprints at the end do
not change.
"""

from __future__ import annotations

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from accelerate_swift import SwiftDeepSpeedPipelinePlugin, SwiftPlugin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, help="of a pipeline; the workers are a multiple of it")
    parser.add_argument("--steps", type=int, default=60, help="of an epoch, of which there are two")
    parser.add_argument("--blocks", type=int, default=4, help="transformer blocks")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step; each has four windows")
    options = parser.parse_args()

    # num_processes: workers to start where this is run as `python accelerate_gpt2_pipeline.py`.
    swift = SwiftPlugin(num_processes=2 * options.stages)
    plugin = SwiftDeepSpeedPipelinePlugin(options.stages, options.micro_batches, swift=swift, gradient_clipping=1.0)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    print(f"rank {accelerator.process_index} is process {os.getpid()}", flush=True)

    from gpt2_layers import fingerprint, gpt2_layers, loss, windows

    set_seed(7)
    rows = 4 * options.micro_batches  # a batch is one step of one pipeline
    count = options.steps * rows * plugin.pipelines
    train = DataLoader(windows(count), batch_size=rows, shuffle=True)
    held_out = DataLoader(windows(4 * rows * plugin.pipelines, skip=count + 1), batch_size=rows)
    net = plugin.pipeline_module(gpt2_layers(options.blocks), loss)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=2 * len(train))
    model, optimizer, train, held_out, scheduler = accelerator.prepare(net, optimizer, train, held_out, scheduler)
    set_seed(7, device_specific=True)  # each worker draws its own dropout

    seen = plugin.register(steps=0)
    for epoch in plugin.epochs(2):
        model.train()
        for batch in train:
            value = model(batch)  # all micro-batches, forward and backward, and the step of the optimizer
            accelerator.backward(value)  # nothing is left to do here, nor for the optimizer
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen.steps += 1
            if seen.steps % 20 == 0:
                accelerator.print(f"step {seen.steps}: loss {value.item():.4f}")
        model.eval()
        with torch.no_grad():
            values = [model(batch).item() for batch in held_out]
        accelerator.print(f"epoch {epoch}: held out {sum(values) / len(values):.4f}")
    accelerator.wait_for_everyone()
    print(f"rank {accelerator.process_index}: {fingerprint(accelerator.unwrap_model(model))[:16]}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
