"""DeepSpeed pipelines in a loop of Accelerate's lose workers and end with the bits of DeepSpeed's own engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Jobs

from accelerate_swift import SwiftDeepSpeedPipelinePlugin
from shared_core.errors import ConfigError
from shared_core.faults import Fault
from tests.support.digest import digest
from tests.support.runner import compare

ALL = ["--tied", "--clip", "0.5", "--evaluate"]
#: Data that is neither shuffled nor noisy.
PLAIN = ["--tied", "--plain-data", "--save"]
STATE = ("parameters", "buffers", "optimizers", "schedulers")
#: Faults of a run. Ranks 0 and 1 are the first stage of two pipelines, 2 and 3 the last; an epoch has three batches,
#: after which there is an evaluation in four.
CASES: dict[str, list[Fault]] = {
    "compute": [
        Fault(1, 2, "pipe.forward", "SIGKILL", nth=2),
        Fault(0, 3, "pipe.forward", "SIGKILL", nth=7),  # in the evaluation
        Fault(2, 5, "pipe.backward", "SIGKILL", nth=3),
    ],
    "exchange": [
        Fault(3, 2, "pipe.send_grad", "SIGKILL"),
        Fault(0, 4, "pipe.reduce", "SIGKILL"),
        Fault(2, 6, "update.during", "SIGKILL", nth=2),
    ],
    "a_whole_pipeline": [Fault(0, 4, "pipe.load", "SIGKILL", nth=2), Fault(2, 4, "pipe.load", "SIGKILL", nth=3)],
    "replacement": [Fault(3, 5, "pipe.recv_activation", "SIGKILL"), Fault(3, 5, "pipe.step", "SIGKILL", incarnation=1)],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_failure_changes_no_bit(name: str, jobs: Jobs) -> None:
    jobs.check("acc_pipe.py", nproc=4, faults=CASES[name], args=ALL)


BF16, ZERO = ["--precision", "bf16"], ["--zero"]
#: Each rank has a part of its stage's optimizer to itself.
SHARDED: dict[str, tuple[list[str], list[Fault]]] = {
    "bf16": ([*BF16, "--tied"], [Fault(0, 2, "update.during", "SIGKILL", 20), Fault(3, 5, "pipe.backward", "SIGKILL")]),
    "zero": ([*ZERO, *ALL], [Fault(2, 2, "update.after", "SIGKILL"), Fault(1, 5, "pipe.reduce", "SIGKILL")]),
    "both": (
        [*BF16, *ZERO, *ALL],
        [Fault(1, 2, "update.during", "SIGKILL", nth=60), Fault(3, 5, "update.after", "SIGKILL")],
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHARDED)
def test_a_rank_fails_that_has_a_part_of_the_optimizer(name: str, jobs: Jobs) -> None:
    args, faults = SHARDED[name]
    result = jobs.check("acc_pipe.py", nproc=4, faults=faults, args=args)
    dtype = "torch.bfloat16" if "--precision" in args else "torch.float32"
    assert all(report["extra"]["dtypes"] == [dtype] for report in result.reports.values())


@pytest.mark.nightly
def test_a_shard_is_resumed_from_a_checkpoint(jobs: Jobs) -> None:
    args = [*PLAIN, *BF16, *ZERO]
    whole = jobs.reference("acc_pipe.py", nproc=4, args=args)
    resume = ["--resume", str(whole.out / "epoch0")]
    result = jobs.run("acc_pipe.py", nproc=4, faults=[Fault(3, 2, "pipe.forward", "SIGKILL")], args=[*args, *resume])
    compare(result, whole, [*STATE, "trained", "generators"])
    assert len(result.struck) == 1, result.tail()


#: One pipeline of two stages without replicas: arguments, the fault, and batches from one checkpoint to the next.
ALONE: dict[str, tuple[list[str], Fault, int]] = {
    "checkpoint": (ALL, Fault(1, 9, "pipe.forward", "SIGKILL"), 4),
    "evaluation": (ALL, Fault(0, 6, "pipe.forward", "SIGKILL", nth=7), 4),
    "update": ([*BF16, *ZERO, "--tied"], Fault(0, 9, "update.during", "SIGKILL", nth=20), 4),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALONE)
def test_a_stage_without_a_replica_fails(name: str, jobs: Jobs, tmp_path: Path) -> None:
    args, fault, every = ALONE[name]
    env = {
        "SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path / "saved"),
        "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": str(every),
    }
    result = jobs.run("acc_pipe.py", nproc=2, args=args, faults=[fault], env=env)
    compare(result, jobs.reference("acc_pipe.py", nproc=2, args=args))
    assert len(result.struck) == 1 and not result.kinds("restart"), result.tail()
    assert {event.fields["resolution"] for event in result.kinds("recovered")} == {"replay"}, result.tail()


@pytest.mark.nightly
def test_the_result_is_that_of_deepspeeds_engine_driven_by_hand(jobs: Jobs) -> None:
    result = jobs.check("acc_pipe.py", nproc=4, faults=[Fault(1, 5, "pipe.backward", "SIGKILL")], args=PLAIN)
    compare(result, jobs.reference("acc_pipe.py", nproc=4, args=[*PLAIN, "--by-hand"]), [*STATE, "losses"])


@pytest.mark.nightly
def test_resumed_from_a_checkpoint(jobs: Jobs) -> None:
    whole = jobs.reference("acc_pipe.py", nproc=4, args=PLAIN)
    resume = ["--resume", str(whole.out / "epoch0")]
    result = jobs.run("acc_pipe.py", nproc=4, faults=[Fault(3, 2, "pipe.forward", "SIGKILL")], args=[*PLAIN, *resume])
    compare(result, whole, [*STATE, "generators"])
    assert len(result.struck) == 1, result.tail()


@pytest.mark.nightly
def test_failed_while_a_checkpoint_is_written(jobs: Jobs) -> None:
    result = jobs.check("acc_pipe.py", nproc=4, faults=[Fault(0, 3, "collective.before", "SIGKILL", nth=9)], args=PLAIN)
    saved, expected = (run.out / "epoch0" for run in (result, jobs.reference("acc_pipe.py", nproc=4, args=PLAIN)))
    files = sorted(path.relative_to(expected) for path in expected.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(saved) for path in saved.rglob("*") if path.is_file())
    for file in (each for each in files if each.name.endswith("model_states.pt")):
        got, want = (torch.load(folder / file, weights_only=False) for folder in (saved, expected))
        assert digest(_tensors(got)) == digest(_tensors(want)), file


def _tensors(state: dict[str, Any]) -> Any:
    """Layers of a checkpoint, or the state of its optimizer and the count of steps."""
    return [state["optimizer"], state["global_steps"]] if "optimizer" in state else state


def test_stages_of_a_single_pipeline_shuffle_alike(jobs: Jobs) -> None:
    result = jobs.reference("acc_pipe.py", nproc=2, args=["--tied"])
    seen = [set(result.reports[rank]["counts"]) for rank in (0, 1)]
    assert seen[0] == seen[1] and len(seen[0]) == 2 * 6, seen


REFUSED = {
    "stages": "1 workers cannot hold pipelines of 2 stages",
    "zero": "ZeRO stage 2 shards more",
    "precision": "got fp16: fp16 and fp8 have scales",
    "bf16": "the DeepSpeed configuration has bf16 off",
    "bf16 saved": "Give the plugin zero_stage=1",
    "precision of the configuration": "got fp16 in the DeepSpeed configuration",
    "accumulation": "gradient_accumulation_steps=2 of the Accelerator conflicts",
    "dispatch": "dispatch_batches=True gives each worker rows of its own",
    "model": "must be a deepspeed.pipe.PipelineModule, got a Linear",
    "batch size": "a loader's batch of 3 cannot be cut into 2 micro-batches",
    "rows": "a batch of 3 rows cannot be cut into 2 micro-batches",
    "a tensor": "model((inputs, targets)), got a Tensor",
    "no rows": "tensors with rows, got a float",
    "clipping": "give the plugin gradient_clipping=0.5",
    "too early": "no Accelerator has taken this plugin",
}


@pytest.mark.nightly
def test_mistakes_are_explained(jobs: Jobs) -> None:
    result = jobs.run("acc_pipe_refusals.py", nproc=1, launcher="plain")
    assert result.status == 0, result.tail()
    told = result.reports[0]["extra"]["told"]
    assert {name for name, text in told.items() if text} == set(REFUSED), told
    for name, words in REFUSED.items():
        assert words in told[name], (name, told[name])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_stages": 0, "micro_batches": 2}, "num_stages must be a whole number of at least 1, got 0"),
        ({"num_stages": 2, "micro_batches": 2.0}, "micro_batches must be a whole number"),
        ({"num_stages": 2, "micro_batches": 4, "gradient_accumulation_steps": 2}, "two names of one thing"),
        (
            {"num_stages": 2, "micro_batches": 4, "hf_ds_config": {"gradient_accumulation_steps": 2}},
            "two names of one thing",
        ),
        ({"num_stages": 2, "micro_batches": 2}, "started as a single process: use swiftrun --nproc-per-node 2"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SwiftDeepSpeedPipelinePlugin(**arguments)
