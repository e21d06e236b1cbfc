"""``swiftctl lab plan-logging``, and the benchmark that puts exact plans beside published ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import logging_tradeoff
from shared_core.cli import swiftctl

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "design" / "plan_logging.md").read_text()


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """The example of the documentation."""
    path = tmp_path / "profile.json"
    path.write_text(re.findall(r"```json\n(.*?)```", DOCS, re.S)[0])
    return path


def test_the_example_of_the_documentation(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert swiftctl.main(["lab", "plan-logging", str(profile), "--storage", "1.3e11", "--curve"]) == 0
    assert capsys.readouterr().out == re.findall(r"```text\n(.*?)```", DOCS, re.S)[0]


def test_the_program_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    exec(re.findall(r"```python\n(.*?)```", DOCS, re.S)[0], {})
    assert capsys.readouterr().out.startswith("((0, 1), (2,)) (1,) ")


def test_what_is_printed(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(*options: str) -> list[str]:
        assert swiftctl.main(["lab", "plan-logging", str(profile), *options]) == 0
        return capsys.readouterr().out.splitlines()[2:]

    curve = lines()
    assert len(curve) == 4 and not any("*" in line for line in curve)
    assert lines("--storage", "0") == [curve[0].replace("0-3", "0-3 *")]
    (within,) = lines("--bandwidth", "5e8")
    assert within.split()[:2] == ["120.0", "GB"] and within.endswith("0-1 2 3 *")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("{", "Expecting property name"), ("[]", "must be a mapping"), ("{}", "needs 'machines'")],
)
def test_a_profile_that_cannot_be_read(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    assert swiftctl.main(["lab", "plan-logging", str(path)]) == 1
    err = capsys.readouterr().err
    assert f"cannot read {path}" in err and message in err and "docs/design/plan_logging.md" in err


def test_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert logging_tradeoff.main(["--quick", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "ViT-128, 800 GB, Swift's cost: Swift ran the greedy's" in out
    assert "the compute times of its machines are not published" in out
    rows = {(row["case"], row["metric"]): row for row in json.loads(path.read_text())}
    case = "ViT-128, 600 GB, Swift's cost"
    exact = rows[case, "replay of a step, exact plan (target: greedy)"]
    assert exact["value"] == pytest.approx(4.02, abs=0.005) and exact["holds"] is True
    assert rows[case, "replay of a step, Swift's greedy"]["value"] == pytest.approx(5.02, abs=0.005)
    # With equal stages: 135/255 of 50 steps of 3.32 s where everything is logged.
    bound = rows["BERT-128, 500 GB, equal stages", "replay of 50 steps, exact plan"]["value"]
    assert bound == pytest.approx(135 / 255 * rows["BERT-128", "50 normal steps"]["value"])
    assert rows["BERT-128, 500 GB, equal stages", "recovery that Swift measured"]["value"] == 76.5
