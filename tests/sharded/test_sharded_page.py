"""The script of ``docs/sharded.md`` runs as it stands there, and loses workers."""

from __future__ import annotations

import re
from pathlib import Path

from harness import Jobs

from shared_core.faults import Fault
from shared_core.testing.runner import ROOT, unconfirmed

PAGE = (ROOT / "docs" / "sharded.md").read_text(encoding="utf-8")


def test_the_script_of_the_page(jobs: Jobs, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script = tmp_path / "train_sharded.py"
    script.write_text(code)
    faults = [Fault(1, 20, "update.during", "SIGKILL", nth=5), Fault(0, 40, "forward", "SIGKILL")]
    lost, plain = jobs.run(str(script), faults=faults), jobs.reference(str(script))
    assert lost.status == plain.status == 0 and not unconfirmed(lost), lost.tail()
    losses = [sorted(re.findall(r"rank \d: mean loss [\d.]+", each.stdout)) for each in (lost, plain)]
    assert losses[0] == losses[1] and len(losses[0]) == 2, lost.tail()
