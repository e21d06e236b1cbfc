"""The features of Lightning that a failure must not disturb, as small jobs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from lit_parts import OUT, DigestOf, Digits, Net, checkpoints, loader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, default_collate

from tests.support.digest import digest
from tests.support.jobs.common import strategy_and_callbacks


def _fit(trainer: pl.Trainer, module: pl.LightningModule, data: Any, digests: DigestOf, extra: dict[str, Any]) -> Any:
    trainer.fit(module, **data)
    return digests(trainer, module)


@dataclass(frozen=True)
class Feature:
    """One job: factories of its parts, and what is done with them."""

    module: Callable[[], pl.LightningModule] = Net
    data: Callable[[], dict[str, Any]] = lambda: {"train_dataloaders": loader()}
    trainer: Callable[[], dict[str, Any]] = lambda: {"max_epochs": 2}
    callbacks: Callable[[], list[pl.Callback]] = list
    strategy: dict[str, Any] = field(default_factory=dict)
    run: Callable[..., dict[str, str]] = _fit


def _with_validation(**train: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "train_dataloaders": loader(**train),
        "val_dataloaders": loader(48, shuffle=False, first=1000),
    }


class Early(Net):
    """With the update overlapped with communication, parameters are new when backward has ended."""

    def __init__(self) -> None:
        super().__init__(norm=True, dropout=0.1, scheduler="step")
        self.early = 0

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.before = [p.detach().clone() for p in self.parameters()]

    def on_after_backward(self) -> None:
        self.early += any(not torch.equal(p, b) for p, b in zip(self.parameters(), self.before, strict=True))

    def on_train_end(self) -> None:
        overlapped = not os.environ.get("SWIFT_BASELINE")
        assert bool(self.early) == overlapped, f"{self.early} updates were made early"


class Sums(Net):
    """Everything that can be logged: per step and epoch, sums, torchmetrics, synchronised or not."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        out = self(x)
        loss = F.cross_entropy(out, y)
        self.accuracy(out, y)
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("synced", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", out.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self(x)
        self.val_accuracy.update(out, y)
        self.log("val_loss", F.cross_entropy(out, y), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, on_epoch=True)


class Prepared(pl.LightningDataModule):
    """Lightning makes a process group for ``prepare_data``, in each call."""

    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(48, shuffle=False, first=1000)

    test_dataloader = val_dataloader


class Follower(pl.Callback):
    """Holds an average of the weights, made when training starts, and a metric."""

    def __init__(self) -> None:
        self.average: Any = None
        self.metrics = {"loss": torchmetrics.MeanMetric()}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.average = copy.deepcopy(module).requires_grad_(False)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.metrics["loss"].update(outputs["loss"])
        for mine, theirs in zip(self.average.parameters(), module.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        average = None if self.average is None else self.average.state_dict()
        return {"average": average, "loss": self.metrics["loss"].compute()}


def _counting() -> pl.Callback:
    """What it counts is in a closure, and changes the learning rate."""
    seen = [0]

    def count(trainer: pl.Trainer, *_: Any) -> None:
        seen[0] += 1
        trainer.optimizers[0].param_groups[0]["lr"] = 1e-2 / seen[0]

    return LambdaCallback(on_train_batch_end=count)


def _saving_its_configuration() -> pl.Callback:
    """As ``LightningCLI`` adds it."""
    parser = LightningArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    return SaveConfigCallback(parser, parser.parse_args([]))


class Holding(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that holds another, which its ``state_dict()`` does not give as plain data."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return self.inner.get_last_lr()

    def step(self, epoch: int | None = None) -> None:
        self.inner.step()
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}


class Warm(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": Holding(optimizer), "interval": "step"}}


class InMemory(Logger):
    """A logger of the script's, which only remembers."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, SimpleNamespace(**metrics)))


class Enough(Exception):
    pass


class Raising(Net):
    """Ends its first call with an exception."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.batches = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        if self.batches == 5:
            raise Enough


class Saving(Net):
    """Saves in the middle of an accumulation window."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 1:
            self.trainer.save_checkpoint(f"{OUT}/{self.current_epoch}-{batch_idx}.ckpt")


class Buffered(Net):
    """Has a part that is never trained, and a buffer that no checkpoint holds."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(norm=True, dropout=0.1, scheduler="epoch")
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        for part in self.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.eval()

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen += outputs["loss"]


class Gan(pl.LightningModule):
    """Two optimizers by hand; the second half of a batch uses a tensor from before the first optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
        self.critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, z: torch.Tensor, real: torch.Tensor | None = None) -> Any:
        made = self.generator(z)
        return made, self.critic(made), None if real is None else self.critic(real)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        optimizers: Any = self.optimizers()
        opt_g, opt_c = optimizers
        z = torch.randn(len(real), 8)
        made = self.generator(z)
        stale = made.detach().clone()  # of the generator before its step
        self.toggle_optimizer(opt_g)
        loss_g = F.softplus(-self.critic(made)).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_c)
        loss_c = F.softplus(self.critic(stale)).mean() + F.softplus(-self.critic(real)).mean()
        opt_c.zero_grad()
        self.manual_backward(loss_c)
        self.clip_gradients(opt_c, 0.5, "norm")
        opt_c.step()
        self.untoggle_optimizer(opt_c)
        self.log_dict({"loss_g": loss_g, "loss_c": loss_c}, on_epoch=True)
        if self.trainer.is_last_batch:
            schedulers: Any = self.lr_schedulers()
            for scheduler in schedulers:
                scheduler.step()

    def configure_optimizers(self) -> Any:
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        opt_c = torch.optim.RMSprop(self.critic.parameters(), lr=1e-3)
        return [opt_g, opt_c], [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (opt_g, opt_c)]


class Manual(Net):
    """One update by hand, whose loss is logged when it is made; and weights between backward and the update."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, optimizer = F.cross_entropy(self(batch[0]), batch[1]), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        weight = sum(p.detach().square().sum() for p in self.parameters())
        optimizer.step()
        self.log_dict({"loss": loss, "weight": weight}, on_epoch=True)


class ByHand(Net):
    """A target network and a codebook inside the module, weights clipped, layers frozen for a time."""

    def __init__(self) -> None:
        super().__init__(norm=True, dropout=0.1)
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.book = nn.Parameter(torch.zeros(4, 64), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.book.data[batch_idx % 4].lerp_(x.mean(0), 0.2)  # each rank's own
        return F.cross_entropy(self(x), y) + F.mse_loss(self(x), self.target(x)) + self.book.sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 3 != 1)
        for mine, theirs in zip(self.target.parameters(), self.net.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.1)
        with torch.no_grad():
            self.net[0].weight.mul_(0.999).clamp_(-0.1, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


class Unused(Net):
    """A branch that is used every other batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(64, 10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        out = self(x) + (self.side(x) if batch_idx % 2 else 0)
        loss = F.cross_entropy(out, y)
        self.log("loss", loss)
        return loss


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Every rank reads its own part of the digits."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        data = Digits(96, augment=True)
        for index in range(rank, len(data), world):
            yield data[index]


def _fit_test_fit(
    trainer: pl.Trainer, module: pl.LightningModule, data: Any, digests: DigestOf, extra: dict[str, Any]
) -> dict[str, str]:
    """Train, test, train on: the results of every entry count."""
    trainer.fit(module, **data)
    first = digests(trainer, module)
    tested = trainer.test(module, loader(48, shuffle=False, first=1200), verbose=False)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, **data)
    extra["first"] = first  # compared on survivors only: a replacement in a later entry passes by finished ones
    return digests(trainer, module) | {"tested": repr(tested)}


def _raised(
    trainer: pl.Trainer, module: pl.LightningModule, data: Any, digests: DigestOf, extra: dict[str, Any]
) -> dict[str, str]:
    with suppress(Enough):
        trainer.fit(module, **data)
    trainer.fit(module, **data)
    return digests(trainer, module)


#: What the ``collate_fn`` of a loader has seen.
DRAWN: list[float] = []


def _drawing(items: list[Any]) -> Any:
    DRAWN.append(float(items[0][0].sum()))
    return default_collate(items)


def _remembered(
    trainer: pl.Trainer, module: pl.LightningModule, data: Any, digests: DigestOf, extra: dict[str, Any]
) -> dict[str, str]:
    trainer.fit(module, **data)
    logger: Any = trainer.logger
    return digests(trainer, module) | {"rows": repr(logger.rows), "drawn": repr(DRAWN)}


def _calls(
    trainer: pl.Trainer, module: pl.LightningModule, data: Any, digests: DigestOf, extra: dict[str, Any]
) -> dict[str, str]:
    """Four calls; between them rank 0 tells the others something, and parameters are changed."""
    told: list[Any] = []

    def between(call: str) -> None:
        told.append(trainer.strategy.broadcast(f"{call}: {trainer.callback_metrics} of rank {trainer.global_rank}"))
        told.append((module.seen.item(), [part.training for part in module.modules()]))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9)

    told.append(trainer.validate(module, data["val_dataloaders"], verbose=False))
    between("validated")
    trainer.fit(module, **data)
    between("fitted")
    told.append(trainer.test(module, data["val_dataloaders"], verbose=False))
    between("tested")
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module, **data)
    return digests(trainer, module) | {"told": repr(told)}


def _fit_with_checkpoints(
    trainer: pl.Trainer, module: pl.LightningModule, data: Any, digests: DigestOf, extra: dict[str, Any]
) -> dict[str, str]:
    trainer.fit(module, **data)
    result = digests(trainer, module)
    trainer.strategy.barrier()
    extra["checkpoints"] = checkpoints()
    return result | {f"checkpoint {name}": value for name, value in extra["checkpoints"].items()}


def _resume(
    trainer: pl.Trainer, module: pl.LightningModule, data: Any, digests: DigestOf, extra: dict[str, Any]
) -> dict[str, str]:
    """Continue from a checkpoint file that the run itself wrote first."""
    trainer.fit(module, **data)
    path = f"{OUT}/resume.ckpt"
    trainer.save_checkpoint(path)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, **data, ckpt_path=path)
    return digests(trainer, module)


def _prepared(
    trainer: pl.Trainer, module: pl.LightningModule, data: Any, digests: DigestOf, extra: dict[str, Any]
) -> dict[str, str]:
    """Three calls with a data module; the last resumes from the newest checkpoint of the second and writes more."""
    tested = [trainer.test(module, **data, verbose=False)]
    trainer.fit(module, **data)
    tested.append(trainer.test(module, **data, verbose=False))
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = -1, 18
    trainer.fit(module, **data, ckpt_path="last", weights_only=False)
    return digests(trainer, module) | {"tested": repr(tested)}


def _with_two_trainers(
    trainer: pl.Trainer, module: pl.LightningModule, data: Any, digests: DigestOf, extra: dict[str, Any]
) -> dict[str, str]:
    """Two trainers, one after the other; the second must not write to the first one's log folder."""
    trainer.fit(module, **data)
    strategy, callbacks = strategy_and_callbacks("strategy", {})
    again = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        callbacks=callbacks,
        logger=CSVLogger(OUT, "csv"),
        max_epochs=2,
        log_every_n_steps=2,
        **dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False),
    )
    again.fit(module, **data)
    return digests(again, module)


def _averaged(
    trainer: pl.Trainer, module: pl.LightningModule, data: Any, digests: DigestOf, extra: dict[str, Any]
) -> dict[str, str]:
    """Train with an average of the weights, and validate with it."""
    trainer.fit(module, **data)
    result = digests(trainer, module)
    validated = trainer.validate(module, data["val_dataloaders"], verbose=False)
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    average = next(each._average_model for each in callbacks if hasattr(each, "_average_model"))
    return result | {"validated": repr(validated), "average": digest(list(average.state_dict().items()))}


def _loggers() -> dict[str, Any]:
    return {"max_epochs": 3, "logger": [CSVLogger(OUT, "csv"), TensorBoardLogger(OUT, "board")]}


FEATURES: dict[str, Feature] = {
    "epochs": Feature(trainer=lambda: {"max_epochs": 3}),
    "persistent_workers": Feature(
        data=lambda: {"train_dataloaders": loader(64, num_workers=1, augment=True, persistent_workers=True)}
    ),
    "uneven": Feature(data=lambda: {"train_dataloaders": loader(75)}),
    "accumulate": Feature(
        module=lambda: Net(norm=True, dropout=0.1),
        data=lambda: {"train_dataloaders": loader(112)},
        trainer=lambda: {"max_epochs": 2, "accumulate_grad_batches": 3},
    ),
    "small_buckets": Feature(
        module=Early,
        data=lambda: {"train_dataloaders": loader(112)},
        trainer=lambda: {"max_epochs": 2, "accumulate_grad_batches": 2},
        strategy={"bucket_cap_mb": 0.0005},
    ),
    "clip_norm": Feature(trainer=lambda: {"max_epochs": 2, "gradient_clip_val": 0.1}),
    "bf16": Feature(trainer=lambda: {"max_epochs": 2, "precision": "bf16-mixed"}),
    "scheduler_plateau": Feature(
        module=lambda: Net(scheduler="plateau"), data=_with_validation(), trainer=lambda: {"max_epochs": 3}
    ),
    "validation": Feature(
        module=Sums, data=_with_validation(), trainer=lambda: {"max_epochs": 2, "val_check_interval": 0.5}
    ),
    "checkpoint": Feature(
        data=_with_validation(),
        trainer=lambda: {"max_epochs": 3, "enable_checkpointing": True},
        callbacks=lambda: [
            ModelCheckpoint(f"{OUT}/best", monitor="val_loss", save_top_k=2, save_last=True),
            ModelCheckpoint(f"{OUT}/steps", every_n_train_steps=4, save_top_k=-1),
        ],
        run=_fit_with_checkpoints,
    ),
    "early_stopping": Feature(
        module=lambda: Net(lr=0.5, optimizer="SGD"),
        data=_with_validation(),
        trainer=lambda: {"max_epochs": 6},
        callbacks=lambda: [EarlyStopping("val_loss", patience=1, min_delta=0.3)],
    ),
    "batchnorm": Feature(module=lambda: Net(norm=True), data=_with_validation()),
    "metrics": Feature(module=Sums),
    "augment": Feature(data=lambda: {"train_dataloaders": loader(augment=True)}),
    "manual": Feature(module=Manual),
    "gan": Feature(module=Gan, strategy={"find_unused_parameters": True}),
    "fit_test_fit": Feature(
        module=lambda: Net(norm=True, dropout=0.1, scheduler="epoch"),
        data=_with_validation(),
        run=_fit_test_fit,
    ),
    "calls": Feature(
        module=Buffered,
        data=_with_validation(),
        run=_calls,
    ),
    "iterable": Feature(
        data=lambda: {"train_dataloaders": DataLoader(Stream(), batch_size=8)},
        trainer=lambda: {"max_epochs": 2},
    ),
    "loggers": Feature(
        module=Sums,
        data=_with_validation(),
        trainer=lambda: _loggers() | {"enable_checkpointing": True},
        callbacks=lambda: [LearningRateMonitor(), ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)],
        run=_fit_with_checkpoints,
    ),
    "two_trainers": Feature(trainer=lambda: {"max_epochs": 2, "logger": CSVLogger(OUT, "csv")}, run=_with_two_trainers),
    "all": Feature(
        module=lambda: Net(norm=True, dropout=0.1, scheduler="step"),
        data=_with_validation(size=75, augment=True),
        trainer=lambda: {"max_epochs": 2, "gradient_clip_val": 0.5},
    ),
    "no_sampler": Feature(
        data=lambda: {"train_dataloaders": loader(64)},
        trainer=lambda: {"max_epochs": 2, "use_distributed_sampler": False},
    ),
    "unused": Feature(module=Unused, strategy={"find_unused_parameters": True}),
    "static_graph": Feature(strategy={"static_graph": True}),
    "by_hand": Feature(module=ByHand, strategy={"find_unused_parameters": True}),
    "weight_averaging": Feature(
        module=lambda: Net(norm=True, dropout=0.1, scheduler="step"),
        data=_with_validation(augment=True),
        trainer=lambda: {"max_epochs": 2, "val_check_interval": 0.5},
        callbacks=lambda: [WeightAveraging()],
        run=_averaged,
    ),
    "ema": Feature(
        module=lambda: Net(norm=True, dropout=0.1),
        data=_with_validation(),
        trainer=lambda: {"max_epochs": 2, "accumulate_grad_batches": 2},
        callbacks=lambda: [EMAWeightAveraging(decay=0.9, update_starting_at_step=1)],
        run=_averaged,
    ),
    "swa": Feature(
        module=lambda: Net(norm=True, dropout=0.1, scheduler="epoch"),
        data=_with_validation(size=64),
        trainer=lambda: {"max_epochs": 4},
        callbacks=lambda: [StochasticWeightAveraging(5e-2, swa_epoch_start=2, annealing_epochs=2)],
        run=_averaged,
    ),
    "own_scheduler": Feature(module=Warm),
    "own_logger": Feature(
        module=Sums,
        data=lambda: {"train_dataloaders": loader(collate_fn=_drawing)},
        trainer=lambda: {"max_epochs": 2, "logger": InMemory()},
        run=_remembered,
    ),
    "raised": Feature(module=Raising, run=_raised),
    "saves_between_updates": Feature(
        module=Saving,
        data=lambda: {"train_dataloaders": loader(112)},
        trainer=lambda: {"max_epochs": 2, "accumulate_grad_batches": 3},
        run=_fit_with_checkpoints,
    ),
    "lambda": Feature(callbacks=lambda: [_counting()]),
    "command_line": Feature(
        data=_with_validation(),
        trainer=lambda: {"max_epochs": 2, "logger": CSVLogger(OUT, "csv")},
        callbacks=lambda: [_saving_its_configuration()],
        run=_fit_test_fit,
    ),
    "held": Feature(callbacks=lambda: [Follower()]),
    "prepared": Feature(
        module=lambda: Net(scheduler="epoch", dropout=0.1),
        data=lambda: {"datamodule": Prepared()},
        trainer=lambda: {"max_epochs": 2, "enable_checkpointing": True},
        callbacks=lambda: [ModelCheckpoint(OUT, every_n_train_steps=3, save_last=True, save_top_k=-1)],
        run=_prepared,
    ),
    "resume": Feature(module=lambda: Net(scheduler="epoch", dropout=0.1), run=_resume),
}
