"""ZeRO on its page: its scripts run as they stand there with failures, and what it says is refused is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import Fault
from tests.support.runner import ROOT, unconfirmed

pytest.importorskip("deepspeed")

PAGE = (ROOT / "docs" / "sharded.md").read_text(encoding="utf-8")
#: For inference only, and compiled for half a minute.
WITHOUT_COMPILER = 'import deepspeed\n\ndeepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False\n'

SAYS = {
    "not_attached": "the DeepSpeed engine takes a step, and its batches are not known",
    "autocast_fp16_0": "fp16 with its loss scale cannot be recovered in this version",
    "autocast_fp16": "fp16 with its loss scale cannot be recovered in this version",
    "offload": "offload of optimizer or parameters cannot be recovered",
    "offload_parameters": "offload of optimizer or parameters cannot be recovered",
    "evaluates": "an engine without an optimizer cannot be recovered: only training is",
    "not_torchs": "cannot be recovered: use an optimizer of torch, or torch_adam in the DeepSpeed configuration",
    "plus_plus": "the parts of ZeRO++ cannot be recovered",
    "without_section": 'this DeepSpeed engine was made without recovery: add "swift_recovery": {}',
    "another_model": "a job with a DeepSpeed engine trains nothing else",
    "nothing": "not refused",
}


@pytest.mark.nightly
@pytest.mark.parametrize("number", [0, 1], ids=["deepspeed", "accelerate"])
def test_the_scripts_of_the_page(number: int, jobs: Jobs, tmp_path: Path) -> None:
    codes = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = [each for each in codes if "deepspeed" in each][number]
    script = tmp_path / "train_zero.py"
    script.write_text(WITHOUT_COMPILER + code)
    faults = [Fault(1, 20, "update.during", "SIGKILL", nth=5), Fault(0, 40, "forward", "SIGKILL")]
    failed, plain = jobs.run(str(script), faults=faults), jobs.reference(str(script))
    assert failed.status == plain.status == 0 and not unconfirmed(failed), failed.tail()
    losses = [sorted(re.findall(r"rank \d: mean loss [\d.]+", each.stdout)) for each in (failed, plain)]
    assert losses[0] == losses[1] and len(losses[0]) == 2, failed.tail()


def test_each_is_refused_with_a_line(jobs: Jobs) -> None:
    result = jobs.run("zero_refusals.py", nproc=1)
    assert result.status == 0, result.tail()
    refused = result.reports[0]["extra"]["refused"]
    assert refused.keys() == SAYS.keys()
    for name, words in SAYS.items():
        assert words in refused[name], (name, refused[name])


def test_the_page_quotes_the_lines() -> None:
    assert not [words for name, words in SAYS.items() if name != "nothing" and words not in PAGE]
