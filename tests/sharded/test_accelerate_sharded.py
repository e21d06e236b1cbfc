"""Sharded models under Accelerate lose workers and end, on every rank, with the bits of the run in
which nobody failed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import Fault
from tests.support.runner import ROOT, unconfirmed

PAGE = " ".join((ROOT / "docs" / "sharded.md").read_text(encoding="utf-8").split())

#: Four groups of parameters, five with the plugin, which has the last norm apart: gathered in forward, all but the root
#: gathered in backward, reduced; a sum of norms. Six batches an epoch, in epochs of two ranks.
CASES: dict[str, tuple[int, list[str], list[Fault]]] = {
    "the_update_of_rank_0": (2, [], [Fault(0, 9, "update.during", "SIGKILL", nth=15)]),
    "as_the_plugin_says": (
        2,
        ["--plugin"],
        [Fault(1, 3, "collective.after", "SIGKILL", nth=6), Fault(0, 10, "forward", "SIGKILL")],
    ),
    "accumulate_unreduced": (
        2,
        ["--accumulate", "3", "--unreduced"],
        [Fault(1, 5, "forward", "SIGKILL"), Fault(0, 9, "collective.after", "SIGKILL", nth=9)],
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_failure_changes_no_bit(name: str, jobs: Jobs) -> None:
    nproc, args, faults = CASES[name]
    jobs.check("acc_sharded.py", nproc=nproc, args=args, faults=faults)


@pytest.mark.nightly
def test_accelerate_ignores_its_plugin_on_a_cpu_and_a_line_says_so(jobs: Jobs) -> None:
    faults = [Fault(1, 4, "bucket", "SIGKILL")]
    result = jobs.check("acc_sharded.py", args=["--ignored"], faults=faults)
    words = "on a CPU it ignores fsdp_plugin, and uses DistributedDataParallel"
    assert len(result.told(words)) == 1 and words in PAGE, result.tail()


def test_what_leaves_a_worker_without_a_replacement_is_refused(jobs: Jobs) -> None:
    result = jobs.run("acc_sharded.py", nproc=1, args=["--refused"])
    assert result.status == 0, result.tail()
    said = result.reports[0]["extra"]["refused"]
    way = "prepare it with accelerator.prepare_model(model, evaluation_mode=True)"
    for name, words in {
        "wrapped": "on a CPU Accelerate puts DistributedDataParallel around a sharded model, too",
        "not prepared": "nobody can be replaced in the training of a sharded model that was not prepared",
    }.items():
        assert words in said[name] and way in said[name] and words in PAGE, (name, said[name])


@pytest.mark.nightly
def test_the_script_of_the_page(jobs: Jobs, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "sharded.md").read_text(encoding="utf-8").partition("## Accelerate\n")[2]
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    script = tmp_path / "train_accelerate_sharded.py"
    script.write_text(code)
    faults = [Fault(1, 20, "update.during", "SIGKILL", nth=5), Fault(0, 40, "forward", "SIGKILL")]
    failed, plain = jobs.run(str(script), faults=faults), jobs.reference(str(script))
    assert failed.status == plain.status == 0 and not unconfirmed(failed), failed.tail()
    losses = [sorted(re.findall(r"rank \d: mean loss [\d.]+", each.stdout)) for each in (failed, plain)]
    assert losses[0] == losses[1] and len(losses[0]) == 2, failed.tail()
