"""A training loop of Accelerate in the shape of its own examples, on data that needs no download."""

from __future__ import annotations

import argparse
import os
import random

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from standstill import noted, stand_still
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shared_core.faults import inject
from tests.support.digest import training_digest
from tests.support.report import Report, generators_digest


class Noisy(TensorDataset):
    """Digits with random noise, drawn when an item is read."""

    def __getitem__(self, index: int):  # type: ignore[no-untyped-def]
        image, label = super().__getitem__(index)
        return image + 0.05 * torch.randn(64) + 0.01 * random.random() + 0.01 * float(np.random.rand()), label


#: What :class:`Drawing` draws from; the data set does not hold it.
DRAWS = random.Random(3)


class Drawing(Noisy):
    """The same, with noise of the script's own generator."""

    def __getitem__(self, index: int):  # type: ignore[no-untyped-def]
        image, label = super().__getitem__(index)
        return image + 0.05 * DRAWS.random(), label


def vision() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=150)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--split-batches", action="store_true")
    parser.add_argument("--dispatch", action="store_true")
    parser.add_argument("--seedable", action="store_true")
    parser.add_argument("--no-epochs", action="store_true")
    parser.add_argument("--average", action="store_true", help="of the weights, with which it evaluates")
    parser.add_argument("--prepare-inside", action="store_true", help="new loaders in each epoch")
    parser.add_argument("--small-buckets", action="store_true", help="and no clipping")
    parser.add_argument("--local", action="store_true", help="each worker trains by itself, as under LocalSGD")
    parser.add_argument(
        "--numbered", action="store_true", help="what a batch does depends on its number and the script's generator"
    )
    parser.add_argument("--look", action="store_true", help="at a batch, before the loop and before each pass")
    parser.add_argument("--compile", default="no", help="a backend of torch.compile")
    parser.add_argument("--static", action="store_true", help="static_graph")
    parser.add_argument("--checkpoints")
    parser.add_argument("--every", type=int, default=0)
    args = parser.parse_args()
    report = Report()
    baseline = bool(os.environ.get("SWIFT_BASELINE"))
    handlers = []
    if not baseline:
        from accelerate_swift import SwiftPlugin

        options = {"checkpoint.dir": args.checkpoints, "checkpoint.resume": "always"}
        options |= {"checkpoint.every_steps": args.every} if args.every else {"checkpoint.price": 1e-3}
        plugin = SwiftPlugin(**options if args.checkpoints else {})
        handlers.append(plugin)
    from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs

    if args.static:
        handlers.append(DistributedDataParallelKwargs(static_graph=True, bucket_cap_mb=0.002))
    if args.small_buckets:
        handlers.append(DistributedDataParallelKwargs(bucket_cap_mb=0.002))

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.accumulate,
        dynamo_backend=args.compile,
        kwargs_handlers=handlers,
        dataloader_config=DataLoaderConfiguration(
            split_batches=args.split_batches, use_seedable_sampler=args.seedable, dispatch_batches=args.dispatch
        ),
    )
    set_seed(7)
    digits = load_digits()
    images = torch.tensor(digits.data[: args.samples], dtype=torch.float32) / 16
    labels = torch.tensor(digits.target[: args.samples])
    train = DataLoader(
        (Drawing if args.numbered else Noisy)(images, labels), batch_size=8, shuffle=True, num_workers=args.workers
    )
    evaluate = DataLoader(TensorDataset(images[:50], labels[:50]), batch_size=16)
    net = vision()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=4 * args.epochs * len(train))
    model, optimizer, train, evaluate, scheduler = accelerator.prepare(net, optimizer, train, evaluate, scheduler)
    set_seed(7, device_specific=True)
    counters = {"loss": 0.0, "right": 0, "seen": 0}
    if baseline:
        epochs = iter(range(args.epochs))

        class Counters:
            pass

        state = Counters()
        vars(state).update(counters)
    else:
        epochs = iter(range(args.epochs)) if args.no_epochs else plugin.epochs(args.epochs)
        state = plugin.register(**counters)
    average = torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)
    if args.average:
        accelerator.register_for_checkpointing(average)
    early = 0
    if args.look:
        state.loss += next(iter(train))[0].sum().item()
    for epoch in epochs:
        if args.prepare_inside:
            noisy = Noisy(images[epoch:], labels[epoch:])
            train = accelerator.prepare(DataLoader(noisy, batch_size=8, shuffle=True))
            evaluate = accelerator.prepare(DataLoader(TensorDataset(images[:50], labels[:50]), batch_size=16))
        model.train()
        if args.look:
            state.loss += next(iter(train))[0].sum().item()
        numbered = enumerate if baseline or not args.numbered else plugin.steps
        for number, (x, y) in numbered(train):
            stand_still(epoch * len(train) + number)
            report.count(f"epoch {epoch} batch {x.sum().item():.6f}")
            with accelerator.no_sync(model) if args.local else accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                before = [p.detach().clone() for p in net.parameters()] if args.small_buckets else []
                accelerator.backward(loss)
                early += any(not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=False))
                if accelerator.sync_gradients and not args.small_buckets:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                inject.point("clip")
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if args.average and accelerator.sync_gradients:
                average.update_parameters(net)
            state.loss += accelerator.gather(loss.detach()).sum().item()
            if args.numbered and number % 4 == 2:
                with torch.no_grad():
                    state.loss += number * sum(place * net(x).mean().item() for place, (x, _) in numbered(evaluate))
        model.eval()
        average.eval()
        inject.point("validation")
        for x, y in evaluate:
            with torch.no_grad():
                guess = (average if args.average else model)(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            state.right += int((guess == y).sum())
            state.seen += len(y)
        accelerator.wait_for_everyone()
    inner = accelerator.unwrap_model(model)
    digests = training_digest([inner, average], [optimizer.optimizer], [scheduler.scheduler], vars(state))
    extra = {} if baseline else {"noted": noted(plugin.loop.job), "last": loss.item()}
    report.finish(digests | {"generators": generators_digest()}, **extra, early=early, **vars(state))
    accelerator.end_training()


if __name__ == "__main__":
    main()
