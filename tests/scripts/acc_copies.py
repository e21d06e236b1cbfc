"""An ``Accelerator`` is copied and pickled between two passes, with the loader that it has prepared."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.digest import training_digest
from tests.support.report import Report

ELSEWHERE = """
import pickle, sys
found = pickle.load(open(sys.argv[1], "rb"))
assert type(found).__module__ == "accelerate.accelerator" and not hasattr(found, "_swift_plugin"), found
[loader] = found._dataloaders
assert len(loader) == 6 and type(loader.base_dataloader).__name__ == "DataLoader", loader
"""


def main() -> None:
    report = Report()
    baseline = bool(os.environ.get("SWIFT_BASELINE"))
    handlers = []
    if not baseline:
        from accelerate_swift import SwiftPlugin

        handlers.append(SwiftPlugin())
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    torch.manual_seed(3)
    net = nn.Linear(4, 1)
    data = DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
    copies = 0
    for epoch in range(2) if baseline else handlers[0].epochs(2):
        # Stock can pickle none with prepared models, and none in the middle of a pass.
        alone = copy.copy(accelerator)
        alone._models, alone._optimizers = [], []
        for made in (alone, pickle.loads(pickle.dumps(alone))):
            copies += 1
            assert made.state.__dict__ == accelerator.state.__dict__
            assert baseline or made._swift_plugin is handlers[0]
        if not baseline and epoch == 1 and accelerator.is_main_process:
            with tempfile.NamedTemporaryFile() as file:
                file.write(pickle.dumps(alone))
                file.flush()
                subprocess.run([sys.executable, "-c", ELSEWHERE, file.name], check=True)
        for (x,) in loader:
            report.count(f"batch {x.sum().item():.6f}")
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    report.finish(training_digest(net, [optimizer.optimizer], [], {}), copies=copies)
    accelerator.end_training()


if __name__ == "__main__":
    main()
