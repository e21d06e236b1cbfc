"""A loop of Accelerate on any device: dropout, AdamW, clipping, accumulation, losses that are gathered."""

from __future__ import annotations

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from on_device import finish
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.device import device
from tests.support.digest import training_digest
from tests.support.report import Report

#: Lines of a run without the product.
BASELINE = bool(os.environ.get("SWIFT_BASELINE"))


class Counters:
    """What is counted, where there is no plugin to register it with."""

    loss, batches = 0.0, 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.1, help="0: what is trained does not depend on the device")
    args = parser.parse_args()
    report = Report()
    there = device()
    if there.type != "cpu":  # all ranks have the first one; Accelerate would give each its own
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(there)
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    gloo = InitProcessGroupKwargs(backend="gloo") if there.type == "cuda" else None
    if BASELINE:
        handlers = [gloo] if gloo else []
    else:
        from accelerate_swift import SwiftPlugin

        plugin = SwiftPlugin(init_process_group=gloo)
        handlers = [plugin]
    accelerator = Accelerator(
        cpu=there.type != "cuda",  # a device that Accelerate does not know is one of its CPU jobs
        gradient_accumulation_steps=args.accumulate,
        kwargs_handlers=handlers,
    )
    set_seed(7)
    data = torch.randn(160, 16)
    train = DataLoader(TensorDataset(data), batch_size=8, shuffle=True)
    net = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(32, 32), nn.Linear(32, 4)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=80)
    model, optimizer, train, scheduler = accelerator.prepare(net, optimizer, train, scheduler)
    torch.manual_seed(accelerator.process_index)
    seen = Counters() if BASELINE else plugin.register(loss=0.0, batches=0)
    for _ in range(args.epochs) if BASELINE else plugin.epochs(args.epochs):
        for (x,) in train:
            report.count(f"batch {seen.batches}")
            with accelerator.accumulate(model):
                loss = (model(x) - x[:, :4].sin()).pow(2).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.loss += accelerator.gather(loss.detach()).sum().item()
            seen.batches += 1
    accelerator.wait_for_everyone()
    counted = {"loss": seen.loss, "batches": seen.batches}
    inner = accelerator.unwrap_model(model)
    finish(report, training_digest(inner, [optimizer.optimizer], [scheduler.scheduler], counted), **counted)
    accelerator.end_training()


if __name__ == "__main__":
    main()
