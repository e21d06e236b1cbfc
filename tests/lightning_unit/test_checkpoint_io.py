"""``SwiftCheckpointIO``: whatever interrupts a write, a whole file is left; a damaged one is not loaded."""

from __future__ import annotations

import os
import resource
import signal
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_swift import SwiftCheckpointIO
from shared_core.errors import CorruptFile, StorageFull
from shared_core.faults import ANY_STEP, Fault, arm


def state(number: int, numbers: int = 5000) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((numbers,), float(number))}, "global_step": number}


def step(path: Path) -> int:
    """Of the file, all of which is of one state."""
    loaded = SwiftCheckpointIO().load_checkpoint(path, weights_only=True)
    assert torch.equal(loaded["state_dict"]["weight"], torch.full((5000,), float(loaded["global_step"])))
    return int(loaded["global_step"])


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 10,000 bytes: the system says so as it does for a full device."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_and_die(path: Path, nth: int, asynchronous: bool) -> int:
    """Write a file in another process that is killed before its n-th file operation; its exit status."""
    pid = os.fork()
    if not pid:
        try:
            arm([Fault(0, ANY_STEP, "checkpoint.file", "SIGKILL", nth)], rank=0)
            files = SwiftCheckpointIO(asynchronous)
            files.save_checkpoint(state(2), path)
            files.teardown()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_between_any_two_file_operations(tmp_path: Path, asynchronous: bool) -> None:
    found = []
    for nth in range(1, 100):
        path = tmp_path / str(nth) / "model.ckpt"
        SwiftCheckpointIO().save_checkpoint(state(1), path)
        code = save_and_die(path, nth, asynchronous)
        found.append(step(path))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        SwiftCheckpointIO().save_checkpoint(state(3), path)  # also removes what was begun
        assert step(path) == 3 and os.listdir(path.parent) == ["model.ckpt"]
    assert found == sorted(found) and set(found) == {1, 2} and len(found) >= 5, found


def test_files_are_those_that_torch_writes(tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours.ckpt", tmp_path / "stock.ckpt"
    SwiftCheckpointIO().save_checkpoint(state(1), ours)
    TorchCheckpointIO().save_checkpoint(state(1), stock)
    assert torch.load(ours, weights_only=True)["global_step"] == 1
    assert TorchCheckpointIO().load_checkpoint(ours)["global_step"] == 1
    assert SwiftCheckpointIO().load_checkpoint(stock, weights_only=True)["global_step"] == 1
    assert zipfile.ZipFile(ours).testzip() is None
    assert ours.stat().st_mode == stock.stat().st_mode
    SwiftCheckpointIO().remove_checkpoint(ours)
    assert not ours.exists()


class Odd:
    """No tensor and no plain data."""


def test_weights_only_refuses_objects(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    SwiftCheckpointIO().save_checkpoint({"odd": Odd()}, path)
    with pytest.raises(Exception, match="Weights only load failed"):
        SwiftCheckpointIO().load_checkpoint(path, weights_only=True)
    assert isinstance(SwiftCheckpointIO().load_checkpoint(path, weights_only=False)["odd"], Odd)


def test_a_full_device_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    files = SwiftCheckpointIO()
    files.save_checkpoint(state(1), path)
    with small_files(), pytest.raises(StorageFull, match="make room; what was there is as it was"):
        files.save_checkpoint(state(2), path)
    assert step(path) == 1 and os.listdir(tmp_path) == ["model.ckpt"]


def test_an_error_in_the_background_is_told_once_and_nothing_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    files = SwiftCheckpointIO(asynchronous=True)
    files.save_checkpoint(state(1), old)
    files.teardown()
    with small_files():
        files.save_checkpoint(state(2), new)
        files.remove_checkpoint(old)  # as ModelCheckpoint does when it has a newer one
        with pytest.raises(StorageFull):
            files.teardown()
    files.teardown()
    assert step(old) == 1 and os.listdir(tmp_path) == ["old.ckpt"]
    files.save_checkpoint(state(3), new)
    files.remove_checkpoint(old)
    files.teardown()
    assert step(new) == 3 and os.listdir(tmp_path) == ["new.ckpt"]


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, plugins: list[Any], **options: Any) -> pl.Trainer:
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=4,
        plugins=plugins,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pl.seed_everything(1, verbose=False)
    trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2), **options)
    return trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_under_a_trainer(tmp_path: Path, asynchronous: bool) -> None:
    fit(tmp_path / "stock", [])
    files = SwiftCheckpointIO(asynchronous)
    fit(tmp_path / "ours", [files])
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "stock")) == ["step=4.ckpt"]
    ours = files.load_checkpoint(tmp_path / "ours" / "step=4.ckpt", weights_only=True)
    stock = torch.load(tmp_path / "stock" / "step=4.ckpt", weights_only=True)
    assert torch.equal(ours["state_dict"]["net.weight"], stock["state_dict"]["net.weight"])
    path = tmp_path / "ours" / "step=4.ckpt"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CorruptFile):
        fit(tmp_path / "again", [SwiftCheckpointIO()], ckpt_path=path)
