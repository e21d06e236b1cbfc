"""State of many kinds, registered nowhere, in scripts of all frameworks."""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import torch
from kinds_of_state import State
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.digest import digest, training_digest
from tests.support.report import OUT, Report, generators_digest

warnings.filterwarnings("ignore")
STOCK = bool(os.environ.get("SWIFT_BASELINE"))
RANK = int(os.environ["RANK"])
report = Report()


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def data() -> TensorDataset:
    return TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(5)))


def slowing(optimizer: Any) -> Any:
    """A scheduler that counts in a closure, which nobody else holds."""
    steps = [0]

    def factor(_: int) -> float:
        steps[0] += 1
        return 0.97 ** steps[0]

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def finish(model: nn.Module, optimizer: Any, *states: State, **more: Any) -> None:
    found = [[each.plain() for each in states], more]
    digests = training_digest(model, [optimizer], [], {"found": digest(found)})
    report.finish(digests | {"generators": generators_digest()}, found=[repr(each) for each in (*found[0], more)])


def lightning() -> None:
    import lightning.pytorch as pl
    import torchmetrics

    from tests.support.jobs.common import strategy_and_callbacks

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.state, self.mean = net(), State(RANK), torchmetrics.MeanMetric()
            self.count, self.history = 0, list[float]()

        def training_step(self, batch: Any, index: int) -> Any:
            report.count("batch")
            loss = self.net(batch[0]).square().mean() * self.state.factor() * watching.state.factor()
            self.state.step(loss.item())
            self.mean.update(loss.detach())
            self.count += 1
            self.history.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [{"scheduler": slowing(optimizer), "interval": "step"}]

    class Watching(pl.Callback):
        def __init__(self) -> None:
            self.state = State(RANK + 10)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.state.step(outputs["loss"].item())

    class Data(pl.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.state = State(RANK + 20)

        def train_dataloader(self) -> Any:
            return DataLoader(data(), batch_size=4, shuffle=True)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.state.step(float(batch[0].sum()))
            return [batch[0] * self.state.factor()]

    pl.seed_everything(7 + RANK, verbose=False)
    module, watching, source = Module(), Watching(), Data()
    strategy, callbacks = strategy_and_callbacks("strategy", {})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=3,
        callbacks=[watching, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.environ[OUT],
    )
    trainer.fit(module, source)
    mean = float(module.mean.compute())
    more = {"mean": mean, "count": module.count, "history": module.history}
    finish(module.net, trainer.optimizers[0], module.state, watching.state, source.state, **more)


def fabric() -> None:
    from lightning.fabric import Fabric

    import lightning_swift

    one: Any = Fabric(accelerator="cpu", devices=2, strategy="ddp" if STOCK else "swift_ddp")
    one.launch()
    one.seed_everything(3 + RANK, verbose=False)
    bare = net()
    model, optimizer = one.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))
    loader = one.setup_dataloaders(DataLoader(data(), batch_size=4, shuffle=True))
    job: Any = lightning_swift.attach(model, optimizer)
    state, count, losses = State(RANK), 0, []
    for _ in job.epochs(3):
        for _, (x,) in job.steps(loader):
            report.count("batch")
            loss = model(x).square().mean() * state.factor()
            one.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            state.step(loss.item())
            losses.append(loss.item())
            count += 1
    finish(bare, optimizer.optimizer, state, count=count, losses=losses)


def accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    plugin: Any = None
    if not STOCK:
        from accelerate_swift import SwiftPlugin

        plugin = SwiftPlugin()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin] if plugin else [])
    set_seed(3, device_specific=True)
    bare = net()
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    bound = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    model, optimizer, loader, scheduler = accelerator.prepare(bare, bound, loader, slowing(bound))
    state, count, losses = State(RANK), 0, []
    for _ in plugin.epochs(3) if plugin else range(3):
        for (x,) in loader:
            report.count("batch")
            accelerator.gradient_accumulation_steps = 2 if count == 7 else accelerator.gradient_accumulation_steps
            with accelerator.accumulate(model):
                loss = model(x).square().mean() * state.factor()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            state.step(loss.item())
            losses.append(loss.item())
            count += 1
            if count % 6 == 3 and RANK == 1:
                accelerator.set_trigger()  # for all ranks, three batches later
            if count % 6 == 0 and accelerator.check_trigger():
                losses.append(count)
    finish(bare, optimizer.optimizer, state, count=count, losses=losses)
    accelerator.end_training()


def transformers() -> None:
    import transformers as hf

    kind: Any = hf.Trainer
    if not STOCK:
        from accelerate_swift.trainer import SwiftTrainer

        kind = SwiftTrainer

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).square().mean()}

    class Own(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.own = State(RANK)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            report.count("batch")
            loss = super().compute_loss(model, inputs, *args, **kwargs) * self.own.factor() * watching.state.factor()
            self.own.step(loss.item())
            return loss

    class Watching(hf.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.state = State(RANK + 10)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.state.step(float(state.global_step))

    watching = Watching()
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
    rows = [{"x": x} for (x,) in data()]
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    both = optimizer, slowing(optimizer)
    trainer = Own(model, arguments, train_dataset=rows, callbacks=[watching], optimizers=both)
    trainer.train()
    finish(model, trainer.optimizer.optimizer, trainer.own, watching.state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=("lightning", "fabric", "accelerate", "transformers"))
    globals()[parser.parse_args().framework]()
