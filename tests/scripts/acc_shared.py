"""Accelerate with ``plugin.shared_steps``: any worker can compute any rank's share."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_swift import SwiftPlugin
from tests.support.digest import training_digest
from tests.support.report import Report, generators_digest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seedable", action="store_true")
    parser.add_argument("--split-batches", action="store_true")
    parser.add_argument("--dispatch", action="store_true")
    parser.add_argument("--own", action="store_true", help="Accelerate's usual loop")
    args = parser.parse_args()
    report = Report()
    plugin = SwiftPlugin()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.accumulate,
        mixed_precision="bf16" if args.bf16 else "no",
        kwargs_handlers=[plugin],
        dataloader_config=DataLoaderConfiguration(
            split_batches=args.split_batches, use_seedable_sampler=args.seedable, dispatch_batches=args.dispatch
        ),
    )
    set_seed(7)
    data = torch.randn(70, 16)
    train = DataLoader(TensorDataset(data, data[:, :4].sin()), batch_size=6, shuffle=True, num_workers=args.workers)
    evaluate = DataLoader(TensorDataset(data[:50]), batch_size=6)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
    model, optimizer, train, evaluate, scheduler = accelerator.prepare(net, optimizer, train, evaluate, scheduler)
    seen = plugin.register(loss=0.0, sizes=0.0)

    def check() -> None:
        model.eval()
        for (x,) in evaluate:
            with torch.no_grad():
                guess = accelerator.gather_for_metrics(model(x))
            seen.sizes += float(guess.square().sum())
        model.train()

    if args.own:
        for x, _ in train:
            accelerator.backward(model(x).sum())
    for step in plugin.shared_steps(model, train, args.epochs):
        report.count(f"step {step.number}")
        if step.first and step.number:
            step.wait_for_all()
            check()
        losses = step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        seen.loss += losses.mean().item()
    plugin.wait_for_all()
    check()
    inner = accelerator.unwrap_model(model)
    digests = training_digest(inner, [optimizer.optimizer], [scheduler.scheduler], vars(seen))
    report.finish(digests | {"generators": generators_digest()}, **vars(seen))
    accelerator.end_training()


if __name__ == "__main__":
    main()
