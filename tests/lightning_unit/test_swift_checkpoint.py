"""Options of ``SwiftCheckpoint``: how they get into the job, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_swift import SwiftCheckpoint, SwiftDDPStrategy
from lightning_swift.compat import callbacks_under_construction, trainer_under_construction
from shared_core.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path / "points")
    assert SwiftCheckpoint("points").options == {"checkpoint.dir": here, "checkpoint.resume": "always"}
    assert SwiftCheckpoint("s3://bucket/run", "young", keep=4, resume="auto").options == {
        "checkpoint.dir": "s3://bucket/run",
        "checkpoint.policy": "young",
        "checkpoint.keep": 4,
        "checkpoint.resume": "auto",
    }
    for options, words in (
        ({"policy": "value", "every_n_steps": 5}, "leave checkpoint.every_steps out"),
        ({"policy": "often"}, "checkpoint.policy must be one of .*, got 'often'"),
        ({"keep": 1}, "at least 2"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1"),
        ({"policy": "fixed"}, "needs checkpoint.every_steps"),
    ):
        with pytest.raises(ConfigError, match=words):
            SwiftCheckpoint("points", **options)  # type: ignore[arg-type]


def test_what_contradicts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    callback = SwiftCheckpoint("points", every_n_steps=5)
    here = {"checkpoint.dir": str(tmp_path / "points")}
    assert callback.merged({"checkpoint.dir": "points", "seed": 3}, here)["seed"] == 3
    assert callback.merged({"checkpoint.resume": "never"}, {})["checkpoint.resume"] == "never"
    with pytest.raises(ConfigError, match="the strategy checkpoint.dir='other': leave one of the two out"):
        callback.merged({"checkpoint.dir": "other"}, {})
    with pytest.raises(ConfigError, match="swiftrun or the environment checkpoint.every_steps=7"):
        callback.merged({}, here | {"checkpoint.every_steps": 7})
    with pytest.raises(ConfigError, match="finds the interval"):
        callback.merged({"checkpoint.policy": "value"}, {})


def test_without_a_strategy_of_ours(tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callback = SwiftCheckpoint(tmp_path)
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[callback], **quiet)
    with pytest.raises(ConfigError, match=r"no checkpoints with SingleDeviceStrategy: choose .*ddp"):
        callback.setup(trainer, pl.LightningModule(), "fit")


def test_workers_of_another_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    strategy = SwiftDDPStrategy()
    callback = SwiftCheckpoint(tmp_path)
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, callbacks=[callback], logger=False)
    with pytest.raises(ConfigError, match="not started by swiftrun"):
        callback.setup(trainer, pl.LightningModule(), "fit")


def test_the_trainer_under_construction() -> None:
    seen: list[Any] = []

    class Looking(SwiftDDPStrategy):
        def find_checkpoints(self) -> None:
            seen.append((trainer_under_construction(), callbacks_under_construction()))

    keep = ModelCheckpoint()
    pl.Trainer(accelerator="cpu", devices=1, strategy=Looking(), callbacks=keep, logger=False)
    pl.Trainer(accelerator="cpu", devices=1, strategy=Looking(), callbacks=[keep], logger=False)
    assert seen == [(None, [keep])] * 2
    assert trainer_under_construction() is None and callbacks_under_construction() == []


SCRIPT = """
import contextlib, os, sys, warnings
warnings.filterwarnings("ignore")
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning_swift import SwiftCheckpoint
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        if self.global_step == int(os.environ.get("STOP_AT", "-1")):
            with contextlib.suppress(FileExistsError):
                os.mkfifo("never")
            open("never").read()
        return self.net(batch[0] + torch.randn(4)).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)
    def on_train_end(self):
        if self.trainer.is_global_zero:
            print("weights", self.net.weight.tolist(), flush=True)
if __name__ == "__main__":
    pl.seed_everything(3, verbose=False)
    ours = sys.argv[1] == "swift_ddp"
    callbacks = [SwiftCheckpoint("points", every_n_steps=7)] if ours else []
    pl.Trainer(accelerator="cpu", devices=int(sys.argv[2]), strategy=sys.argv[1], max_epochs=2, logger=False,
               callbacks=callbacks, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
               ).fit(Model(), DataLoader(TensorDataset(torch.ones(48, 4)), batch_size=2))
"""
