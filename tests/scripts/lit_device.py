"""A Lightning job on any device: dropout, AdamW, a scheduler, metrics of the epoch, a validation that all take part in.

With ``SWIFT_BASELINE`` it uses the stock strategy; otherwise ``--how`` says how the product gets in.
"""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from beginning import backend
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from on_device import finish
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.device import device
from tests.support.jobs.common import Counting, final_digests, strategy_and_callbacks
from tests.support.report import Report

warnings.filterwarnings("ignore")
OUT = os.environ["SWIFT_TEST_OUT"]


class OneGpu(CUDAAccelerator):
    """All ranks on the first GPU; Lightning itself gives each rank another one."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0] * int(devices)


class Simulated(Accelerator):
    """The simulated device; each process has one."""

    def setup_device(self, device: torch.device) -> None:
        torch.get_device_module(device).set_device(device)

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def teardown(self) -> None:
        """Nothing is kept."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [device()] * int(devices)

    @staticmethod
    def auto_device_count() -> int:
        return int(torch.accelerator.device_count())

    @staticmethod
    def is_available() -> bool:
        return device().type == "sim"

    @staticmethod
    def name() -> str:
        return "sim"


class Net(pl.LightningModule):
    """A perceptron on noise; what its dropout draws comes from the device's generator."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 32), nn.Linear(32, 4)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.net(x) - x[:, :4].sin()).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        self.log("val_loss", (self.net(x) - x[:, :4].sin()).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1, help="0: what is trained does not depend on the device")
    parser.add_argument("--how", default="strategy", choices=["strategy", "callback"])
    args = parser.parse_args()
    report = Report()
    kinds: dict[str, type[Accelerator]] = {"cpu": CPUAccelerator, "cuda": OneGpu, "sim": Simulated}
    accelerator = kinds[device().type]()
    pl.seed_everything(7, verbose=False)
    options = {"process_group_backend": backend()} if device().type == "cuda" else {}
    strategy, callbacks = strategy_and_callbacks(args.how, options)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, Counting(report)],
        default_root_dir=OUT,
    )
    data = TensorDataset(torch.randn(96, 16, generator=torch.Generator().manual_seed(5)))
    module = Net(args.dropout)
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16))
    finish(report, final_digests(trainer, module))


if __name__ == "__main__":
    main()
