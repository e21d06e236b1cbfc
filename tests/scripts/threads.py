"""What users asked for: to resume in the middle of an epoch. Each case is the example of a thread in a tracker; without
``--checkpoints`` it is the stock script.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from standstill import stand_still
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.digest import digest

#: Batches between two checkpoints.
EVERY = 5


class Numbered(pl.LightningModule):
    """Learns from numbers, and notes which it has seen."""

    def __init__(self, one_cycle: bool) -> None:
        super().__init__()
        self.layer, self.one_cycle = nn.Linear(1, 4), one_cycle
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        stand_still(len(self.seen))
        numbers = batch[0] if isinstance(batch, list) else torch.tensor([batch])
        self.seen.append(int(numbers.sum()))
        return self.layer(numbers.float().view(-1, 1)).square().mean() + torch.rand(())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if not self.one_cycle:
            return optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Stateful:
    """A loader of the user's own that says where it is."""

    def __init__(self) -> None:
        self.index, self.first = 0, 0

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        for index in range(first, len(self)):
            self.index = index
            yield index

    def __len__(self) -> int:
        return 8

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["index"] + 1


def with_lightning(loader: Any, one_cycle: bool, devices: int, checkpoints: str | None) -> dict[str, Any]:
    callbacks: list[pl.Callback] = []
    if checkpoints:
        from lightning_swift import SwiftCheckpoint

        callbacks = [SwiftCheckpoint(checkpoints, every_n_steps=EVERY)]
    module = Numbered(one_cycle)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp",
        callbacks=callbacks,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    optimizers = [each.state_dict() for each in trainer.optimizers]
    return {"seen": module.seen, "state": digest([module.layer.state_dict(), optimizers]), "rank": trainer.global_rank}


def lightning_19764(checkpoints: str | None) -> dict[str, Any]:
    """Shuffled data, resumed in the middle of an epoch; two workers."""
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=4, shuffle=True)
    return with_lightning(loader, False, 2, checkpoints)


def lightning_20550(checkpoints: str | None) -> dict[str, Any]:
    """A stateful loader, with a scheduler that asks for ``estimated_stepping_batches``; one process."""
    return with_lightning(Stateful(), True, 1, checkpoints)


def with_accelerate(checkpoints: str | None, **config: Any) -> dict[str, Any]:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    handlers: list[Any] = []
    if checkpoints:
        from accelerate_swift import SwiftPlugin

        plugin = SwiftPlugin(checkpoint={"dir": checkpoints, "resume": "always", "every_steps": EVERY})
        handlers = [plugin]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, dataloader_config=DataLoaderConfiguration(**config))
    set_seed(1234)
    model = nn.Linear(1, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen: list[int] = []
    for epoch in plugin.epochs(2) if checkpoints else range(2):
        loader.set_epoch(epoch)
        for (numbers,) in loader:
            stand_still(len(seen))
            seen.append(int(numbers.sum()))
            accelerator.backward(model(numbers.float().view(-1, 1)).square().mean() + torch.rand(()))
            optimizer.step()
            optimizer.zero_grad()
    state = digest([accelerator.unwrap_model(model).state_dict(), optimizer.state_dict()])
    found = {"seen": seen, "state": state, "rank": accelerator.process_index}
    accelerator.end_training()
    return found


def accelerate_2823(checkpoints: str | None) -> dict[str, Any]:
    """Another order in each epoch."""
    return with_accelerate(checkpoints, use_seedable_sampler=True)


def alone(checkpoints: str | None) -> dict[str, Any]:
    """One process of ``python``."""
    return with_accelerate(checkpoints)


def accelerate_4195(checkpoints: str | None) -> dict[str, Any]:
    """The order that a generator draws. ``use_stateful_dataloader`` is refused by name: nobody needs it here."""
    return with_accelerate(checkpoints)


class Squares(nn.Module):
    """A model for ``transformers.Trainer``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)

    def forward(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(numbers.float().view(-1, 1)).square().mean() + torch.rand(())}


def transformers(checkpoints: str | None) -> dict[str, Any]:
    """``transformers.Trainer``, whose own files are of ends of epochs."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    kind: Any = Trainer
    if checkpoints:
        from accelerate_swift import SwiftPlugin
        from accelerate_swift.trainer import SwiftTrainer

        plugin = SwiftPlugin(checkpoint={"dir": checkpoints, "resume": "always", "every_steps": EVERY})
        kind = partial(SwiftTrainer, swift=plugin)
    seen: list[int] = []

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stand_still(state.global_step)

    def collate(items: list[int]) -> dict[str, torch.Tensor]:
        seen.append(sum(items))
        return {"numbers": torch.tensor(items)}

    arguments = TrainingArguments(
        output_dir="files",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        remove_unused_columns=False,
        logging_steps=3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = Squares()
    trainer = kind(model, arguments, train_dataset=list(range(64)), data_collator=collate, callbacks=[Stop()])
    trainer.train()
    history = [entry.get("loss") for entry in trainer.state.log_history]
    state = digest([model.state_dict(), trainer.optimizer.state_dict(), history])
    return {"state": state, "seen": seen, "rank": arguments.process_index}


CASES: dict[str, Callable[[str | None], dict[str, Any]]] = {
    each.__name__: each
    for each in (lightning_19764, lightning_20550, accelerate_2823, accelerate_4195, transformers, alone)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("out", type=Path, help="folder for what each rank ended with")
    parser.add_argument("--checkpoints")
    args = parser.parse_args()
    torch.manual_seed(7)
    found = CASES[args.case](args.checkpoints)
    (args.out / f"rank{found.pop('rank')}.json").write_text(json.dumps(found))
