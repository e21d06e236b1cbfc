"""The scripts of ``docs/sharded.md`` run as they stand there, and lose workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import Fault
from tests.support.runner import ROOT, unconfirmed

PAGE = (ROOT / "docs" / "sharded.md").read_text(encoding="utf-8")
#: The first script of each of these sections.
CODES = {
    name: re.findall(r"```python\n(.*?)```", PAGE.partition(f"## {name}\n")[2], re.DOTALL)[0]
    for name in ("PyTorch", "Lightning", "Fabric")
}


@pytest.mark.nightly
@pytest.mark.parametrize("which", CODES)
def test_the_scripts_of_the_page(which: str, jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "train_sharded.py"
    script.write_text(CODES[which])
    faults = [Fault(1, 20, "update.during", "SIGKILL", nth=5), Fault(0, 40, "collective.before", "SIGKILL", nth=4)]
    failed, plain = jobs.run(str(script), faults=faults), jobs.reference(str(script))
    assert failed.status == plain.status == 0 and not unconfirmed(failed), failed.tail()
    losses = [sorted(re.findall(r"rank \d: mean loss [\d.]+", each.stdout)) for each in (failed, plain)]
    assert losses[0] == losses[1] and len(losses[0]) == 2, failed.tail()
