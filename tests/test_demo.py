"""What ``make demo`` runs, made short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_demo_changes_no_bit_and_says_where_its_report_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", "--steps", "24", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["identical"] and report["workers_lost"] == 7
    lost = 7 + sum(each["workers_lost"] for each in report["pipelines"])
    assert done.stdout.endswith(f"identical: {lost} lost workers changed no bit on any rank\n")
    for name in ("report.json", "report.html", "losses.svg"):
        assert f": {tmp_path / name}" in done.stdout and (tmp_path / name).stat().st_size > 1000, name
