"""A callback changes the data set or the sampler that a framework reads, while it trains."""

from __future__ import annotations

import argparse
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from tests.support.digest import training_digest
from tests.support.report import OUT, Report, generators_digest

warnings.filterwarnings("ignore")
STOCK = bool(os.environ.get("SWIFT_BASELINE"))
RANK = int(os.environ["RANK"])
report = Report()


#: Read by the data set; those of loader workers stay as they were when these were started.
STAGE = [1.0]
#: Called by the data set.
MODELS: list[nn.Module] = []


class Rows(Dataset[Any]):
    """Its rows are weighed by what a script sets, and kept once they were read."""

    def __init__(self) -> None:
        self.x = torch.randn(48, 8, generator=torch.Generator().manual_seed(5))
        self.weights, self.level = [1.0] * 48, 0
        self.read = dict[int, Any]()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.read[index] = self.x[index] * self.weights[index] * (1.0 + 0.1 * self.level) * STAGE[0]
        with torch.no_grad():
            return {"x": sum((model(self.x[index]) for model in MODELS), self.read[index])}


class Order(Sampler[int]):
    """In the order that it holds."""

    def __init__(self) -> None:
        self.order = list(range(RANK, 48, 2))

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        yield from list(self.order)


class Drawn(Sampler[int]):
    """Draws by weights, which the script changes while it trains."""

    def __init__(self) -> None:
        self.weights = torch.ones(48)

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        yield from torch.multinomial(self.weights, 24).tolist()


def change(what: str, loader: Any, epoch: int) -> None:
    """After each epoch."""
    if what == "weights":
        loader.dataset.weights[epoch::3] = [2.0] * 16
    elif what == "level":
        loader.dataset.level += 1
    elif what == "order":
        loader.batch_sampler.sampler.order.reverse()


def seed() -> None:
    """After imports, some of which draw random numbers."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def lightning(what: str) -> tuple[nn.Module, Any]:
    import lightning.pytorch as pl

    from tests.support.jobs.common import strategy_and_callbacks

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            report.count("batch")
            STAGE[0] += 0.1 * (what == "stage")
            return self.net(batch["x"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    class Changing(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            change(what, trainer.train_dataloader, trainer.current_epoch)

    strategy, callbacks = strategy_and_callbacks("strategy", {})
    seed()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=3,
        callbacks=[Changing(), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=os.environ[OUT],
    )
    module = Module()
    MODELS.extend([module.net] if what == "model" else [])
    workers = int(what in ("stage", "model"))
    trainer.fit(module, DataLoader(Rows(), batch_size=4, sampler=Order(), num_workers=workers))
    return module.net, trainer.optimizers[0]


def transformers(what: str) -> tuple[nn.Module, Any]:
    import transformers as hf

    kind: Any = hf.Trainer
    if not STOCK:
        from accelerate_swift.trainer import SwiftTrainer

        kind = SwiftTrainer
    seed()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            report.count("batch")
            return {"loss": self.net(x).square().mean()}

    class Changing(hf.TrainerCallback):  # type: ignore[misc]
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            change(what, kwargs["train_dataloader"], int(state.epoch) - 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if what == "drawn":
                trainer.drawn.weights[state.global_step] += 9.0

    class Holding(kind):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=4, sampler=self.drawn)

    arguments = hf.TrainingArguments(
        output_dir=os.environ[OUT],
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=5,
    )
    model = Model()
    kind = Holding if what == "drawn" else kind
    trainer: Any = kind(model, arguments, train_dataset=Rows(), callbacks=[Changing()])
    trainer.drawn = Drawn()
    trainer.train()
    return model, trainer.optimizer.optimizer


def plain(what: str) -> tuple[nn.Module, Any]:
    """What its sampler has drawn already stays as it was, and what it draws in this pass, too."""
    import torch.distributed as dist

    import shared_core

    if not STOCK:
        shared_core.install()
    dist.init_process_group("gloo")
    seed()
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1))
    net = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1e-2)
    MODELS.extend({"model": [model], "frozen": [model[0]]}.get(what, []))
    sampler = Order()
    started = what == "stage"
    workers = int(started or bool(MODELS))
    loader = DataLoader(Rows(), batch_size=4, sampler=sampler, num_workers=workers, persistent_workers=started)
    job = shared_core.attach(net, optimizer)
    for _ in job.epochs(3):
        for _, batch in job.steps(loader):
            report.count("batch")
            if started:
                STAGE[0] += 0.1
                loader.dataset.weights[0] += 1.0
            net(batch["x"]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if what == "tail":
                sampler.order[-2], sampler.order[-1] = sampler.order[-1], sampler.order[-2]
    return net.module, optimizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=("lightning", "transformers", "plain"))
    parser.add_argument(
        "what", choices=("weights", "level", "order", "drawn", "tail", "stage", "model", "frozen", "nothing")
    )
    parser.add_argument("--late", action="store_true", help="loader workers see what there is when they are started")
    args = parser.parse_args()
    if args.late:
        from contextlib import nullcontext

        from shared_core.worker.variables.variables import Variables

        Variables.as_then = lambda *_: nullcontext()  # type: ignore[method-assign]
        Variables.tensors = lambda *_: {}  # type: ignore[method-assign]
    net, optimizer = globals()[args.framework](args.what)
    report.finish(training_digest(net, [optimizer], [], {}) | {"generators": generators_digest()})
