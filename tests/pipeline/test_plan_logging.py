"""``swiftctl lab plan-logging``, and the benchmark that puts exact plans beside published ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
