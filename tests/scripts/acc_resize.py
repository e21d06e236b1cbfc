"""An Accelerate loop while the number of workers changes; see ``resize.py``."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from resize import FIRST, Net, Numbered
from torch.utils.data import DataLoader

from accelerate_swift import SwiftPlugin
from tests.support.digest import training_digest
from tests.support.report import Report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--until", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--dispatch", action="store_true")
    args = parser.parse_args()
    report = Report()
    plugin = SwiftPlugin()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin], gradient_accumulation_steps=args.accumulate)
    if args.dispatch:
        accelerator.dataloader_config.dispatch_batches = True
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.SGD([{"params": net.net.parameters()}, {"params": [net.uses], "lr": 1.0}], 0.02)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, loader, scheduler = accelerator.prepare(
        net, optimizer, DataLoader(Numbered(), batch_size=4, shuffle=True), scheduler
    )
    seen = plugin.register(losses=[], exact=[], worlds=[], total=0.0, batches=0)
    number = plugin.register(batches=0)
    world = accelerator.num_processes
    for epoch in plugin.epochs(200):
        model.train()
        for indices, x in loader:
            FIRST.batch(number.batches, net)
            number.batches += 1
            with accelerator.accumulate(model):
                guess, uses = model(indices, x)
                loss = (guess - x.sin().sum(1)).square().mean()
                # accelerate divides by the number of batches that are accumulated
                accelerator.backward(loss - args.accumulate * world * uses.sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.total += accelerator.gather(loss.detach()).mean().item()
            seen.batches += 1
        seen.losses.append(seen.total / seen.batches)
        seen.exact.append(bool((net.uses.detach() == epoch + 1).all()))
        seen.worlds.append(world)
        seen.total, seen.batches = 0.0, 0
        if epoch + 1 >= args.epochs and (not args.until or world == args.until):
            break
    report.finish(training_digest(net, [optimizer.optimizer], [], {}), **vars(seen), first=FIRST.parameters)
    accelerator.end_training()


if __name__ == "__main__":
    main()
