"""``"swift_recovery"`` in a DeepSpeed configuration is all it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import Jobs

from shared_core.cli.job_options import find_section
from shared_core.errors import ConfigError
from shared_core.faults import Fault

CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    "steps_per_print": None,
}


@pytest.mark.nightly
def test_a_script_that_knows_nothing_of_it_survives(jobs: Jobs, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    section = {"checkpoint.dir": str(tmp_path / "checkpoints"), "checkpoint.every_steps": 2}
    path.write_text(json.dumps(CONFIG | {"swift_recovery": section}))
    faults = [Fault(1, 5, "pipe.forward", "SIGKILL", 2), Fault(0, 7, "update.during", "SIGKILL")]
    result = jobs.check("pipe_config.py", faults=faults, args=["--deepspeed_config", str(path)])
    assert {report["extra"]["engine"] for report in result.reports.values()} == {"SwiftPipelineEngine"}
    starts = [event.fields["boundary"] for event in result.events if event.kind == "replacement_ready"]
    assert starts == [4, 6], "the options of the section are in force"


def test_a_section_that_the_script_makes_at_run_time(jobs: Jobs, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    args = ["--deepspeed_config", str(path), "--add"]
    result = jobs.check("pipe_config.py", faults=[Fault(1, 5, "pipe.forward", "SIGKILL", 2)], args=args)
    assert {report["extra"]["engine"] for report in result.reports.values()} == {"SwiftPipelineEngine"}


def test_an_option_that_the_launcher_cannot_see_is_refused(jobs: Jobs, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    result = jobs.run("pipe_config.py", args=["--deepspeed_config", str(path), "--add", "7"])
    assert result.status == 1, result.tail()
    assert "seed=7 is set in the script alone" in result.stderr and "SWIFT_RECOVERY_SEED=7" in result.stderr


def test_where_the_section_is_looked_for(tmp_path: Path) -> None:
    script, config = tmp_path / "train.py", tmp_path / "ds.json"
    config.write_text('{"swift_recovery": {"seed": 3}}')
    script.write_text("import deepspeed\n")
    assert find_section(script, ["--epochs", "3"]) is None
    assert find_section(script, [f"--config={config}"]) == {"seed": 3}
    script.write_text("deepspeed.initialize(config='ds.json')\n")
    assert find_section(script, []) == {"seed": 3}
    script.write_text("config = {'train_batch_size': n, 'swift_recovery': {'seed': 5}}\n")
    assert find_section(script, []) == {"seed": 5}
    config.write_text('{"swift_recovery": true}')
    with pytest.raises(ConfigError, match="must hold options, not True"):
        find_section(None, [str(config)])
