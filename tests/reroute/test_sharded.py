"""Pipelines in bf16 and with ZeRO-1 go on without a lost worker: its shard of the optimizer is stepped by its peers."""

from __future__ import annotations

import pytest
from harness import Jobs, most
from rerouted import ORDERED, SCRIPT

from shared_core.testing.runner import compare

pytest.importorskip("deepspeed")

#: Which of DeepSpeed's optimizers, and the type in which gradients are added up.
MODES = {
    "bf16": ("--bf16",),
    "zero": ("--zero", "1"),
    "both": ("--bf16", "--zero", "1"),
    "both_adding_in_fp32": ("--bf16", "--zero", "1", "--accumulate", "fp32"),
}
MODELS = {
    "plain": (),
    "clipped": ("--clip", "0.05", "--decay", "0.1"),
    "tied": ("--tied", "two", "--clip", "0.1"),
    "several": ("--several", "--clip", "0.05", "--micro-batches", "3"),
}


@pytest.mark.parametrize("model", most(MODELS, "clipped", "tied"))
@pytest.mark.parametrize("mode", MODES)
def test_without_a_loss_it_is_deepspeed(jobs: Jobs, mode: str, model: str) -> None:
    args = ("--dropout", "0", *MODES[mode], *MODELS[model])
    theirs = jobs.reference(SCRIPT, nproc=4, args=args)
    compare(jobs.run(SCRIPT, nproc=4, args=args, env=ORDERED), theirs)
