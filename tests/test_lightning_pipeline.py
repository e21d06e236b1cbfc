"""A DeepSpeed pipeline under Lightning ends, on every rank, with the bits of the run without a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Jobs, few
from torch.utils.data import DataLoader

from lightning_swift.pipeline import (
    StageFiles,
    check_loader,
    check_module,
    engine_config,
    micro_batches_of,
    precision_config,
)
from shared_core.errors import ConfigError, Unsupported
from shared_core.faults import Fault
from tests.support.runner import compare

SCRIPT = "lit_pipe.py"

#: Two stages (tied, with dropout) of two replicas: ranks 0 and 1 are the first stage. Three steps an epoch, clipped, a
#: scheduler; validation, a checkpoint and a row of the log at the end of each epoch.
CASES: dict[str, tuple[list[str], list[Fault]]] = {
    "first_stage_reduces": ([], [Fault(1, 5, "pipe.reduce", "SIGKILL")]),
    "update_last_stage": ([], [Fault(3, 6, "update.during", "SIGKILL", nth=3)]),
    "validation": ([], [Fault(2, 3, "validation", "SIGKILL", nth=2)]),
    "checkpoint": ([], [Fault(0, 6, "checkpoint.write", "SIGKILL")]),
    "startup": ([], [Fault(1, 0, "startup", "SIGKILL")]),
    "sanity_check": ([], [Fault(3, 0, "pipe.forward", "SIGKILL")]),
    "validate_first": (["--test"], [Fault(2, 2, "pipe.backward", "SIGKILL")]),
    "test_after_fit": (["--test"], [Fault(0, 6, "validation", "SIGKILL", nth=4)]),
    "between_calls_2": (["--calls"], [Fault(0, 6, "entry", "SIGKILL")]),
    "resumed": (["--resume"], [Fault(0, 8, "pipe.forward", "SIGKILL")]),
    "accumulate": (["--accumulate", "3"], [Fault(3, 5, "step_boundary", "SIGKILL")]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_stage_fails(name: str, jobs: Jobs) -> None:
    args, faults = CASES[name]
    result = jobs.check(SCRIPT, nproc=4, args=args, faults=faults)
    reference = jobs.reference(SCRIPT, nproc=4, args=args)
    for rank in reference.reports.keys() - result.struck_ranks():
        assert result.reports[rank]["extra"] == reference.reports[rank]["extra"]


BF16, ZERO = ["--precision", "bf16-true"], ["--zero"]
#: Each rank has a part of its stage's optimizer to itself.
SHARDED: dict[str, tuple[list[str], list[Fault]]] = {
    "bf16": (BF16, [Fault(0, 2, "update.during", "SIGKILL", nth=20), Fault(3, 5, "pipe.backward", "SIGKILL")]),
    "mixed": (["--precision", "bf16-mixed"], [Fault(1, 3, "pipe.forward", "SIGKILL")]),
    "both": (
        [*BF16, *ZERO],
        [Fault(1, 2, "update.during", "SIGKILL", nth=60), Fault(3, 4, "step_boundary", "SIGKILL")],
    ),
    "checkpoint": ([*BF16, *ZERO], [Fault(3, 6, "checkpoint.write", "SIGKILL")]),
    "resumed": ([*BF16, *ZERO, "--resume"], [Fault(1, 8, "pipe.forward", "SIGKILL")]),
    "between_calls_3": ([*BF16, *ZERO, "--calls"], [Fault(3, 6, "entry", "SIGKILL", nth=2)]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHARDED)
def test_a_rank_fails_that_has_a_part_of_the_optimizer(name: str, jobs: Jobs) -> None:
    args, faults = SHARDED[name]
    result = jobs.check(SCRIPT, nproc=4, args=args, faults=faults)
    dtype = "torch.bfloat16" if "--precision" in args else "torch.float32"
    assert all(report["extra"]["dtypes"] == [dtype] for report in result.reports.values())


#: One pipeline of two stages without replicas: arguments, the fault, and batches from one checkpoint to the next.
ALONE: dict[str, tuple[list[str], Fault, int]] = {
    "forward": (["--no-validation"], Fault(1, 8, "pipe.forward", "SIGKILL", nth=2), 0),
    "checkpoint": ([], Fault(1, 11, "pipe.forward", "SIGKILL"), 4),
    "validation": ([], Fault(1, 6, "validation", "SIGKILL", nth=2), 4),
    "between_calls_3": (["--calls"], Fault(1, 12, "entry", "SIGKILL", nth=2), 4),
    "after_two_calls_checkpoint": (["--calls"], Fault(0, 16, "pipe.forward", "SIGKILL"), 4),
}


@pytest.mark.parametrize("name", few(ALONE, "forward"))
def test_a_stage_without_a_replica_fails(name: str, jobs: Jobs, tmp_path: Path) -> None:
    args, fault, every = ALONE[name]
    env = {
        "SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path / "saved"),
        "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": str(every),
    }
    result = jobs.run(SCRIPT, nproc=2, args=args, faults=[fault], env=env)
    compare(result, jobs.reference(SCRIPT, nproc=2, args=args))
    assert len(result.struck) == 1 and not result.kinds("restart"), result.tail()
    # The end of a call holds all that a stage has; elsewhere it is computed again.
    how = {event.fields["resolution"] for event in result.kinds("recovered")}
    assert how == {"replica" if name.startswith("between") else "replay"}, result.tail()


@pytest.mark.nightly
def test_the_reference_is_deepspeeds_own_engine(jobs: Jobs) -> None:
    """Losses, parameters and optimizer state of a loop over it, on the same data, are the same."""
    ours = jobs.reference(SCRIPT, nproc=4, args=["--no-validation"])
    by_hand = jobs.reference(SCRIPT, nproc=4, args=["--by-hand"])
    for rank in range(4):
        mine, theirs = (each.reports[rank]["extra"] for each in (ours, by_hand))
        assert {name: mine[name] for name in theirs} == theirs and {"losses", "same"} <= theirs.keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("training_step", "overrides training_step()"),
        pytest.param("outside", "extra.weight", marks=pytest.mark.nightly),
        pytest.param("value", "clips by the norm", marks=pytest.mark.nightly),
        pytest.param("clip", "leave one out", marks=pytest.mark.nightly),
        pytest.param("accumulate", "leave one out", marks=pytest.mark.nightly),
        pytest.param("precision", "got '16-true': fp16 has a loss scale", marks=pytest.mark.nightly),
        pytest.param("bf16", "say precision='bf16-true' for bf16", marks=pytest.mark.nightly),
        pytest.param("zero", "a pipeline can use stage 1", marks=pytest.mark.nightly),
        pytest.param("rows", "drop_last=True", marks=pytest.mark.nightly),
        pytest.param("stages", "stages=3 does not divide", marks=pytest.mark.nightly),
    ],
)
def test_refused_by_the_trainer(name: str, message: str, jobs: Jobs) -> None:
    result = jobs.run(SCRIPT, nproc=2, args=["--refuse", name], launcher="plain")
    assert result.status and message in result.stderr, result.tail()


class Layers(pl.LightningModule):
    def pipeline_layers(self) -> list[Any]:
        return []

    def loss(self, outputs: Any, targets: Any) -> Any: ...


def test_a_module_is_a_list_of_layers_and_a_loss() -> None:
    class Stepping(Layers):
        def training_step(self, *_: Any) -> None: ...

    class Clipping(Layers):
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None: ...

    class Lossless(Layers):
        loss = None  # type: ignore[assignment]

    check_module(Layers())
    for kind, message in (
        (Stepping, r"training_step\(\).*pipeline_layers"),
        (Clipping, "gradient_clip_val"),
        (Lossless, r"no loss\(\)"),
        (pl.LightningModule, r"no pipeline_layers\(\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_module(kind())
    manual = Layers()
    manual.automatic_optimization = False
    with pytest.raises(ConfigError, match="automatic_optimization"):
        check_module(manual)


@pytest.mark.parametrize("arguments", [(2, {"gradient_accumulation_steps": 3}, 1), (2, {}, 3), (0, {}, 1)])
def test_micro_batches_are_said_once(arguments: Any) -> None:
    with pytest.raises(ConfigError):
        micro_batches_of(*arguments)


def test_precision_is_said_once() -> None:
    on, off = {"bf16": {"enabled": True}}, {"bf16": {"enabled": False}}
    assert precision_config({}, "32-true") == {} and precision_config(off, "32-true") == off
    for given in ({}, on, {"bf16": {"enabled": "auto"}}, {"bf16": {}}):
        assert precision_config(given, "bf16-true") == on
    assert precision_config({"zero_optimization": {"stage": 1}}, "32-true") == {"zero_optimization": {"stage": 1}}
    for given, precision in ((off, "bf16-true"), (on, "32-true")):
        with pytest.raises(ConfigError, match="leave the section 'bf16' out"):
            precision_config(given, precision)
    fp16 = {"fp16": {"enabled": True}}
    for given, precision in ((fp16, "32-true"), ({}, "16-true"), ({}, "16-mixed"), ({}, "64-true")):
        with pytest.raises(Unsupported, match="trains in 32-bit or bf16"):
            precision_config(given, precision)
    with pytest.raises(Unsupported, match="stage 2"):
        precision_config({"zero_optimization": {"stage": 2}}, "32-true")


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_clip_val=1.0"):
        engine_config({"gradient_clipping": 0.5}, 4, 1.0, "norm")
    with pytest.raises(Unsupported, match="norm"):
        engine_config({}, 4, 1.0, "value")
    for section in ("optimizer", "scheduler"):
        with pytest.raises(ConfigError, match="configure_optimizers"):
            engine_config({section: {}}, 4, None, None)


def test_a_loader_that_cannot_be_split_is_refused_before_training() -> None:
    check_loader(DataLoader(range(10), batch_size=8, drop_last=True), 4)  # type: ignore[arg-type]
    check_loader(DataLoader(range(12), batch_size=8), 4)  # type: ignore[arg-type]
    for options in ({"batch_size": 8}, {"batch_size": 6, "drop_last": True}):
        with pytest.raises(ConfigError, match="micro_batches"):
            check_loader(DataLoader(range(10), **options), 4)  # type: ignore[arg-type]


def test_a_checkpoint_is_the_newest_complete_one(tmp_path: Path) -> None:
    from lightning.pytorch.plugins import TorchCheckpointIO

    folder = tmp_path / "last.ckpt"
    stages = [StageFiles(str(folder), TorchCheckpointIO(), stage, 2) for stage in (0, 1)]

    def content(step: int, stage: int) -> dict[str, Any]:
        return {"global_step": step, "state_dict": {"w": torch.tensor([step, stage])}, "epoch": step}

    def parts(step: int) -> None:
        for number, stage in enumerate(stages):
            stage.write_parts(content(step, number), None)

    with pytest.raises(ConfigError, match="is not a complete checkpoint"):
        parts(1)
        stages[0].read(None)
    stages[0].commit(content(1, 0), None)
    parts(2)  # and then the job ends
    assert [int(stage.read(None)["state_dict"]["w"][0]) for stage in stages] == [1, 1]
    stages[0].commit(content(2, 0), None)
    for stage in stages:
        stage.drop_older(2)
    found = stages[1].read(None)
    assert found["state_dict"]["w"].tolist() == [2, 1] and found["epoch"] == 2
    assert len(list(folder.iterdir())) == 3
    with pytest.raises(ConfigError, match="2 stages, and this one has 4"):
        StageFiles(str(folder), TorchCheckpointIO(), 0, 4).read(None)
