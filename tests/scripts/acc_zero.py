"""A loop of Accelerate with DeepSpeed's ZeRO, as ``DeepSpeedPlugin`` says."""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from acc_sharded import Noisy, net
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from zero import whole

from tests.support.digest import digest, training_digest
from tests.support.report import Report, generators_digest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--save", action="store_true", help="the state, in the middle of each epoch")
    args = parser.parse_args()
    report = Report()
    epochs: Any = iter(range(2))
    seen = SimpleNamespace(loss=0.0, right=0.0, batches=0)
    if os.environ.get("SWIFT_BASELINE"):
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        handlers: list[Any] = [InitProcessGroupKwargs(backend="gloo")]
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for half a minute, and not used
    else:
        from accelerate_swift import SwiftPlugin

        plugin = SwiftPlugin()
        handlers, epochs, seen = [plugin], plugin.epochs(2), plugin.register(loss=0.0, right=0.0, batches=0)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(
            zero_stage=args.stage, gradient_accumulation_steps=args.accumulate, gradient_clipping=1.0
        ),
        gradient_accumulation_steps=args.accumulate,
        mixed_precision="bf16" if args.bf16 else "no",
        kwargs_handlers=handlers,
    )
    model = net()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cycle = torch.optim.lr_scheduler.StepLR(adam, 5 * accelerator.num_processes, 0.5)
    points = torch.randn(12 * accelerator.num_processes, 8, generator=torch.Generator().manual_seed(5))
    train = DataLoader(Noisy(points), batch_size=2, shuffle=True)
    held_out = DataLoader(TensorDataset(points[:7]), batch_size=2)
    engine, optimizer, train, held_out, scheduler = accelerator.prepare(model, adam, train, held_out, cycle)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    set_seed(7, device_specific=True)
    for epoch in epochs:
        engine.train()
        for (x,) in train:
            report.count(f"epoch {epoch} batch {x.sum().item():.6f}")
            with accelerator.accumulate(engine):
                loss = (engine(x.to(dtype)) - x[:, :3].sin().to(dtype)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(engine.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.loss += accelerator.gather(loss.detach()).sum().item()
            seen.batches += 1
            if args.save and seen.batches % 4 == 0:
                accelerator.save_state(f"saved{seen.batches}")
        engine.eval()
        for (x,) in held_out:
            with torch.no_grad():
                seen.right += accelerator.gather_for_metrics(engine(x.to(dtype))).sum().item()
    engine.empty_partition_cache()
    inner = optimizer.optimizer
    own = getattr(inner, "optimizer", inner)  # stage 0 has no wrapper of its own
    digests = training_digest(engine.module, [own], [cycle], vars(seen))
    digests |= whole(engine) | {"norm": digest([engine.get_global_grad_norm()]), "generators": generators_digest()}
    report.finish(digests, engine=type(engine).__name__)
    accelerator.end_training()


if __name__ == "__main__":
    main()
