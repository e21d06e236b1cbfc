"""A second Trainer takes the place of the first at a step boundary, without processes, and ends with the same bits."""

from __future__ import annotations

import csv
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from encoded import same
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lightning_swift.loggers
from lightning_swift import SwiftDDPStrategy
from shared_core.encoding.plain import dumps, loads
from shared_core.loaders import read_random, write_random
from shared_core.worker.state.local_state import BoundaryPosition
from shared_core.worker.variables.variables import Variables


class LocalJob:
    """Does in one process what the job does at step boundaries: publishes at one of them, or restores at its first."""

    def __init__(self, folder: Path, publish_at: int = -1, published: bytes | None = None) -> None:
        self.folder = folder
        self.parts: dict[str, Any] = {}
        self.publish_at, self.published = publish_at, published
        self.joining = published is not None
        self.position = BoundaryPosition()
        self.runtime = SimpleNamespace(unchecked=nullcontext, operates=True)
        #: None are asked for.
        self.options = SimpleNamespace(use_checkpoints=lambda options: None)
        self.entries = SimpleNamespace(begin=lambda: SimpleNamespace(skip=False), done=self._end)
        self.reporter = SimpleNamespace(listen=lambda listener: None)
        #: Those of objects alone: the frames are the test's.
        self.variables = Variables(0, lambda: "other")

    added = reroutes = False
    orders = None
    reading = nullcontext

    def evaluation_boundary(self) -> bool:
        return False

    def register(
        self, name: str, capture: Any, restore: Any, *, forward_mutated: bool = False, main: bool = False
    ) -> None:
        self.parts[name] = (capture, restore)

    def attach(self, modules: Any, optimizers: Any) -> None:
        self.module, self.optimizers = modules[0], optimizers
        self.variables.attach(modules, optimizers)

    def keep_images(self) -> None:
        """There is nobody to give them to."""

    def expect_steps(self, left: int) -> None:
        """Nobody watches."""

    def step_boundary(self, *, accumulating: bool = False, epoch: int | None = None) -> bool:
        if self.joining:
            assert self.published is not None
            self.joining = False
            state = loads(self.published)
            self.module.load_state_dict(state["module"])
            for optimizer, each in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(each)
            self.variables.put_back(state["variables"])
            for name, (_, restore) in self.parts.items():
                restore(state["parts"][name])
            write_random(state["random"])
            return True
        if self.position.boundaries == self.publish_at:
            assert not accumulating, "choose another boundary"
            self.published = dumps(
                {
                    "module": dict(self.module.state_dict()),
                    "optimizers": [o.state_dict() for o in self.optimizers],
                    "parts": {name: capture() for name, (capture, _) in self.parts.items()},
                    "variables": self.variables.capture(),
                    "random": read_random(),
                }
            )
            shutil.copytree(self.folder, self.folder.with_suffix(".then"))
        self.position.boundaries += 1
        return False

    def _end(self, result: Any) -> None:
        self.final = {name: loads(dumps(capture())) for name, (capture, _) in self.parts.items()}

    def peek(self, name: str) -> Any:
        return None


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    """A process group of one, without a port."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, size: int = 26) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator) + 0.1 * torch.randn(6) + 0.1 * random.random() + float(np.random.rand())
        return x, torch.tensor(index % 3)


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        data = Noisy()
        yield from (data[i] for i in torch.randperm(len(data)).tolist())


class Mood(Enum):
    CALM = 1
    TENSE = 2


class Diary:
    """An object of the user's own with plain state."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.mood = Mood.CALM


class Model(pl.LightningModule):
    """BatchNorm, dropout, all kinds of logging, and state in ordinary attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.cat = torchmetrics.CatMetric()
        self.losses: list[torch.Tensor] = []
        self.counts = {"batches": 0}
        self.diary = Diary()
        self.own = torch.Generator().manual_seed(3)
        self.late: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch["a"] if isinstance(batch, dict) else batch
        out = self.net(x + 0.01 * torch.randn(x.shape, generator=self.own))
        loss = nn.functional.cross_entropy(out, y)
        self.accuracy(out, y)
        self.cat.update(loss.detach())
        self.losses.append(loss.detach())
        self.counts["batches"] += 1
        self.diary.lines.append(f"batch {batch_idx}")
        self.diary.mood = Mood.TENSE if batch_idx % 2 else Mood.CALM
        self.late = {"seen": batch_idx, "pair": (1, float(loss.detach()))}
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", out.max(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("cat", self.cat.compute().sum())
        self.cat.reset()
        self.log("sum", torch.stack(self.losses).sum())
        self.losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100), "interval": "step"}
        ]


class Reloading(Model):
    """Creates its loaders again in every epoch, in another order."""

    def train_dataloader(self) -> Any:
        order = torch.randperm(26).tolist()
        return DataLoader(torch.utils.data.Subset(Noisy(), order), batch_size=4)


def evenly() -> DataLoader[Any]:
    x = torch.linspace(-1, 1, 60).view(10, 6)
    return DataLoader(TensorDataset(x, torch.arange(10) % 3), batch_size=5)


def shuffled() -> Any:
    return DataLoader(Noisy(), batch_size=4, shuffle=True)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"trainer": {"accumulate_grad_batches": 3}, "boundaries": [0, 3, 7, 10, 20]},
    "iterable": {"loader": lambda: DataLoader(Stream(), batch_size=4), "trainer": {"val_check_interval": 1.0}},
    "several": {
        "loader": lambda: {"a": shuffled(), "b": DataLoader(Noisy(9), batch_size=4, shuffle=True)},
    },
    "several_streams": {
        "loader": lambda: CombinedLoader({"a": DataLoader(Stream(), batch_size=4), "b": shuffled()}, "max_size"),
        "trainer": {"val_check_interval": 1.0},
    },
    "reload": {"model": Reloading, "trainer": {"reload_dataloaders_every_n_epochs": 1}},
    "seeded": {"strategy": {"data": "seeded", "seed": 4}},
    "limited": {"trainer": {"limit_train_batches": 5}},
}


def run(folder: Path, job: LocalJob, case: dict[str, Any]) -> tuple[Model, pl.Trainer]:
    pl.seed_everything(5, verbose=False)
    strategy = SwiftDDPStrategy(**case.get("strategy", {}))
    strategy.job = job  # type: ignore[assignment]
    options: dict[str, Any] = {"val_check_interval": 0.5, **case.get("trainer", {})}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=3,
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=[CSVLogger(folder, "csv", version=0), TensorBoardLogger(folder, "board", version=0)],
        callbacks=[
            EarlyStopping("val_loss", patience=50),
            ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=2, save_last=True),
            LearningRateMonitor(),
        ],
        **options,
    )
    model: Model = case.get("model", Model)()
    loader: Callable[[], Any] = case.get("loader", shuffled)
    train = None if isinstance(model, Reloading) else loader()
    trainer.fit(model, train, evenly())
    return model, trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_continues_identically(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    for number, boundary in enumerate(case.get("boundaries", [0, 3, 7, 14])):
        if number and name != "plain" and number % 2:
            continue
        folder = tmp_path / str(boundary)
        first = LocalJob(folder, publish_at=boundary)
        model, trainer = run(folder, first, case)
        rows = list(csv.DictReader(open(folder / "csv/version_0/metrics.csv", newline="")))
        names = sorted(path.name for path in (folder / "best").iterdir())
        scalars = events(folder)
        back_to_the_loss(folder)
        second = LocalJob(folder, published=first.published)
        monkeypatch.setattr(lightning_swift.loggers, "_joining", lambda second=second: second.joining)
        again, other = run(folder, second, case)
        monkeypatch.setattr(lightning_swift.loggers, "_joining", lambda: False)
        for (key, one), two in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
            assert torch.equal(one, two), (name, boundary, key)
        for final in (first.final, second.final):  # what hooks saw is described in terms of each process's objects
            for requested in final["lightning.data"]["requested"].values():
                requested.pop("variables")
        for part in first.final:
            if part not in ("lightning.loggers", "lightning.progress", "lightning.callbacks"):
                assert same(first.final[part], second.final[part]), (
                    name,
                    boundary,
                    part,
                    difference(first.final[part], second.final[part]),
                )
        for one, two in zip(trainer.callbacks, other.callbacks, strict=True):  # type: ignore[attr-defined]
            assert str(one.state_dict()) == str(two.state_dict())
        assert first.final["lightning.progress"]["counters"] == second.final["lightning.progress"]["counters"]
        assert again.diary.lines == model.diary.lines and again.diary.mood is model.diary.mood
        assert again.late == model.late and again.counts == model.counts
        assert same(dict(trainer.callback_metrics), dict(other.callback_metrics))
        after = list(csv.DictReader(open(folder / "csv/version_0/metrics.csv", newline="")))
        assert without_ours(after) == without_ours(rows), (name, boundary)
        assert sorted(path.name for path in (folder / "best").iterdir()) == names
        assert events(folder) == scalars
        assert len(list((folder / "board/version_0").glob("events*"))) == 1


def back_to_the_loss(folder: Path) -> None:
    """The files as they were when the first run was at its step boundary, and a little further:
    what a failure leaves.
    """
    then = folder.with_suffix(".then")
    shutil.rmtree(folder)
    then.rename(folder)
    metrics = folder / "csv/version_0/metrics.csv"
    if metrics.exists():
        rows = list(csv.DictReader(open(metrics, newline="")))
        with open(metrics, "w", newline="") as file:  # a row more, in a file with one more column, and one torn off
            writer = csv.DictWriter(file, ["another", *rows[0]])
            writer.writeheader()
            writer.writerows([*rows, rows[-1]])
            file.write("1,2")
    for path in (folder / "board/version_0").glob("events*"):
        with open(path, "ab") as binary:
            binary.write(b"\x10\0\0torn")


def without_ours(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    kept = [{k: v for k, v in row.items() if v and not k.startswith("swift")} for row in rows]
    return [row for row in kept if row.keys() - {"step"}]


def events(folder: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found = []
    for path in sorted((folder / "board/version_0").glob("events*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if not value.tag.startswith(("swift", "hp_metric", "_hparams")):
                    found.append((value.tag, event.step, make_ndarray(value.tensor).item()))
    return found


def difference(one: Any, two: Any) -> Any:
    """The innermost places where two encoded values differ."""
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return {key: difference(one[key], two[key]) for key in one if not same(one[key], two[key])}
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)) and len(one) == len(two):
        return [difference(a, b) for a, b in zip(one, two, strict=True) if not same(a, b)]
    return one, two
