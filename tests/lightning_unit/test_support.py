"""What cannot be recovered is refused, with a message that says what to do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torchmetrics import MeanMetric, MetricTracker

from lightning_swift import SwiftDDPStrategy, SwiftFSDPStrategy
from lightning_swift.averages import Averages
from lightning_swift.loops import SwiftEvaluationLoop, SwiftFitLoop, SwiftTrainingEpochLoop, adopt_loops
from lightning_swift.support import check_trainer
from shared_core.errors import ConfigError, Unsupported


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"ddp_comm_state": powersgd.PowerSGDState(None), "ddp_comm_hook": powersgd.powerSGD_hook},
            ["powerSGD_hook", "Remove ddp_comm_hook"],
        ),
        ({"model_averaging_period": 4}, ["post-local SGD", "Remove"]),
        ({"start_method": "spawn"}, ["strategy='ddp', 'swift_ddp' or 'swift_fsdp'", "spawned workers"]),
    ],
)
def test_options_of_ddp(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Unsupported) as caught:
        SwiftDDPStrategy(**options)
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(Unsupported):
        SwiftDDPStrategy.adopt(DDPStrategy(**options))


def test_options_of_ours() -> None:
    assert SwiftDDPStrategy(data="seeded", seed=3).config.data == "seeded"
    assert SwiftDDPStrategy(options={"detection.wait_timeout_s": 5}).config.detection.wait_timeout_s == 5
    with pytest.raises(ConfigError, match="did you mean 'detection.wait_timeout_s'"):
        SwiftDDPStrategy(options={"wait_timeout": 5})
    with pytest.raises(ConfigError, match="'restore', 'refetch', 'seeded'"):
        SwiftDDPStrategy(data="fast")  # type: ignore[arg-type]


def test_options_in_the_environment_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_RECOVERY_SEED", "11")
    assert SwiftDDPStrategy(seed=3).config.seed == 11


@pytest.mark.parametrize(
    ("callback", "word"),
    [
        (StochasticWeightAveraging(1e-2), "on_failure='replace'"),
        (EMAWeightAveraging(), "on_failure='replace'"),
        (BackboneFinetuning(), "several fits"),
        (LearningRateFinder(), "run of its own"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks(callback: pl.Callback, word: str) -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[callback], logger=False)
    with pytest.raises(Unsupported, match=type(callback).__name__) as caught:
        check_trainer(trainer, averages=False)
    assert word in str(caught.value)


def test_modules_that_are_made_while_training_runs(capfd: pytest.CaptureFixture[str]) -> None:
    module = pl.LightningModule()
    module.tracker = MetricTracker(MeanMetric(), maximize=False)
    callback = pl.Callback()
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[callback], logger=False)
    trainer.strategy._lightning_module = module
    with pytest.raises(Unsupported, match=r"MetricTracker \(tracker\).*in a list"):
        check_trainer(trainer)
    averages = Averages(trainer, held=True)
    callback.metric = MeanMetric()  # type: ignore[attr-defined]
    assert averages.made(begun=False) and not averages.made(begun=True)
    callback.metric, callback.module = MeanMetric(), module  # type: ignore[attr-defined]
    assert averages.made(begun=True)
    callback.best = {"first": torch.nn.Linear(1, 1)}  # type: ignore[attr-defined]
    assert not averages.made(begun=True) and not averages.models
    assert re.search(r"\(\d+.Callback.best.first\).*setup\(\)", capfd.readouterr().err)
    with pytest.raises(Unsupported, match="lacks the model gone"):
        averages.require({"gone": {}})


def test_other_strategies() -> None:
    for kind in (SwiftDDPStrategy, SwiftFSDPStrategy):
        with pytest.raises(Unsupported, match="not with FSDPStrategy: it shards with .*FSDP1.* strategy='swift_fsdp'"):
            kind.adopt(FSDPStrategy(accelerator=None))
    with pytest.raises(Unsupported, match="'swift_ddp' or 'swift_fsdp', not with ModelParallelStrategy"):
        SwiftDDPStrategy.adopt(ModelParallelStrategy())

    class Own(DDPStrategy):
        pass

    with pytest.raises(Unsupported, match="Own"):
        SwiftDDPStrategy.adopt(Own())


def test_shards_of_tensors() -> None:
    """``auto`` is Lightning's default: all devices of a machine."""
    for options in ({}, {"tensor_parallel_size": 2}):
        with pytest.raises(Unsupported, match="tensor parallelism cannot: use strategy='swift_fsdp'"):
            SwiftFSDPStrategy.adopt(ModelParallelStrategy(**options))
    adopted = SwiftFSDPStrategy.adopt(ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
    assert type(adopted) is SwiftFSDPStrategy and SwiftFSDPStrategy.adopt(adopted) is adopted
    assert SwiftFSDPStrategy(data="seeded", seed=3).config.seed == 3


def test_own_loops() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False)
    adopt_loops(trainer)
    adopt_loops(trainer)  # a second entry call
    assert type(trainer.fit_loop) is SwiftFitLoop and type(trainer.fit_loop.epoch_loop) is SwiftTrainingEpochLoop
    assert type(trainer.test_loop) is SwiftEvaluationLoop

    class Own(_TrainingEpochLoop):
        pass

    trainer.fit_loop.epoch_loop = Own(trainer)
    with pytest.raises(Unsupported, match="Own"):
        adopt_loops(trainer)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "first",
    [
        "import lightning_swift\nimport pytorch_lightning as pl",
        pytest.param("import pytorch_lightning as pl\nimport lightning_swift", marks=pytest.mark.nightly),
    ],
)
def test_the_separate_package(first: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{first}\npl.Trainer(strategy='swift_ddp', accelerator='cpu', devices=2)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "Unsupported" in done.stderr and "Change the import to lightning.pytorch" in done.stderr, done.stderr
