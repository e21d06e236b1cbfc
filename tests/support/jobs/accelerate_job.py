"""The soak's job under Accelerate: BatchNorm, dropout, augmentation, clipping, and an evaluation in each epoch.

Fourteen steps in two epochs on four ranks, several gradient buckets.
"""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shared_core.faults import inject
from tests.support.digest import training_digest
from tests.support.jobs.clusters import Clusters
from tests.support.report import Report, generators_digest

BATCH = 8
BATCHES = 7
EPOCHS = 2


def main() -> None:
    warnings.filterwarnings("ignore")
    world = int(os.environ["WORLD_SIZE"])
    report = Report()
    handlers: list[Any] = [DistributedDataParallelKwargs(bucket_cap_mb=0.004)]
    epochs: Any = iter(range(EPOCHS))
    seen = SimpleNamespace(loss=0.0, right=0)
    if not os.environ.get("SWIFT_BASELINE"):
        from accelerate_swift import SwiftPlugin

        plugin = SwiftPlugin()
        handlers.append(plugin)
        epochs = plugin.epochs(EPOCHS)
        seen = plugin.register(loss=0.0, right=0)
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    set_seed(11)
    net = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    train = DataLoader(Clusters(BATCH * BATCHES * world, 1, augment=True), batch_size=BATCH, shuffle=True)
    held_out = DataLoader(Clusters(BATCH * world, 2), batch_size=BATCH)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    cycle = torch.optim.lr_scheduler.OneCycleLR(adam, max_lr=2e-2, total_steps=EPOCHS * BATCHES * world)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(net, adam, train, held_out, cycle)
    set_seed(11, device_specific=True)
    for epoch in epochs:
        model.train()
        for x, y in train:
            report.count(f"epoch {epoch} batch {x.sum().item():.6f}")
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            inject.point("clip")
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen.loss += accelerator.reduce(loss.detach(), "mean").item()
        model.eval()
        inject.point("validation")
        for x, y in held_out:
            with torch.no_grad():
                guess = model(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            seen.right += int((guess == y).sum())
    digests = training_digest(accelerator.unwrap_model(model), [adam], [cycle], vars(seen))
    report.finish(digests | {"generators": generators_digest()}, steps=EPOCHS * BATCHES)
    accelerator.end_training()


if __name__ == "__main__":
    main()
