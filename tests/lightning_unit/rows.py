"""Small jobs for rows of the support table: ``rows.py ROW``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.support.digest import digest, training_digest
from tests.support.jobs.common import Counting, strategy_and_callbacks
from tests.support.report import Report, generators_digest

warnings.filterwarnings("ignore")
Item = tuple[torch.Tensor, torch.Tensor]


class Data(Dataset[Item]):
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(size, 8, generator=generator), torch.arange(size) % 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Item:
        return self.x[index] + 0.1 * torch.randn(8), self.y[index]


def loader(size: int = 48, shuffle: bool = True) -> DataLoader[Item]:
    return DataLoader(Data(size), batch_size=4, shuffle=shuffle)


class Stateful:
    """A loader of the user's own with ``state_dict``, split over ranks by itself."""

    def __init__(self) -> None:
        self.data, self.at, self.epoch = Data(48), 0, 0

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        order = torch.randperm(48, generator=torch.Generator().manual_seed(self.epoch))[rank::world]
        while self.at < len(order):
            items = [self.data[int(i)] for i in order[self.at : self.at + 4]]
            self.at += 4
            yield [torch.stack(column) for column in zip(*items, strict=True)]
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Averaged(Net):
    """An exponential average of the weights in buffers, as the refusal of averaging callbacks advises."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in list(self.net.named_parameters()):
            self.register_buffer(f"average_{name.replace('.', '_')}", parameter.detach().clone())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.net.named_parameters():
            getattr(self, f"average_{name.replace('.', '_')}").lerp_(parameter.detach(), 0.1)


def main() -> None:
    row = sys.argv[1]
    report = Report()
    pl.seed_everything(7, verbose=False)
    strategy, callbacks = strategy_and_callbacks(
        "strategy", {"find_unused_parameters": True} if row == "unused" else {}
    )
    options: dict[str, Any] = {"max_time": {"hours": 1}} if row == "max_time" else {}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, Counting(report)],
        **options,
    )
    module: Any = Averaged() if row == "average" else Net()
    if row == "compile":
        module.net.compile(backend="aot_eager")
    trainer.fit(torch.compile(module, backend="aot_eager") if row == "compile_whole" else module, _train(row))
    digests = state(trainer, module)
    if row in ("test", "predict"):
        result = (
            trainer.test(module, loader(24, False), verbose=False)
            if row == "test"
            else trainer.predict(module, loader(24, False))
        )
        digests["result"] = repr(result)
        digests |= {f"after {name}": value for name, value in state(trainer, module).items()}
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, _train(row))
        digests |= {f"last {name}": value for name, value in state(trainer, module).items()}
    report.finish(digests)


def _train(row: str) -> Any:
    return Stateful() if row == "stateful" else loader()


def state(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, str]:
    metrics = {k: v for k, v in trainer.callback_metrics.items() if not k.startswith("swift")}
    parts = training_digest(module, trainer.optimizers, [], metrics)
    steps = digest([trainer.global_step, trainer.current_epoch])
    return parts | {"steps": steps, "generators": generators_digest()}


if __name__ == "__main__":
    main()
