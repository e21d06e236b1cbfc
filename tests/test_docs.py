"""Links between pages, what pages are made of, and the site that is built of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from docs.tools import errors, figures
from shared_core.errors import Unsupported

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {errors.anchor(title) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)):
        if "://" in link or link.startswith("mailto:"):
            continue
        where, _, anchor = link.partition("#")
        target = page.parent / where if where else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_the_papers_page_names_what_is_there() -> None:
    missing = []
    for row in (ROOT / "docs" / "papers.md").read_text().splitlines():
        folder = ROOT / "shared_core"
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", row):
            found = [base / name for base in (ROOT, ROOT / "shared_core", folder) if (base / name).exists()]
            missing += [] if found else [name]
            folder = found[0].parent if found else folder  # the next of a row may be named without its folder
        missing += [
            name for name in re.findall(r"`benchmarks\.(\w+)", row) if not (ROOT / "benchmarks" / f"{name}.py").exists()
        ]
    assert not missing


def test_each_error_has_an_entry_and_each_entry_an_error() -> None:
    page = errors.PAGE.read_text()
    assert errors.with_entries(page) == page, "run python -m docs.tools.errors"
    titles = re.findall(r"^### (.+)$", page, re.MULTILINE)
    assert titles == [each.__name__ for each in errors.classes()]


def test_the_trace_of_an_error_ends_with_its_entry() -> None:
    class Elsewhere(Unsupported):
        """Without an entry of its own."""

    error = Elsewhere("this cannot be done")
    assert str(error) == "this cannot be done"
    *_, last = traceback.format_exception(error)
    assert last == f"See {errors.PAGE.relative_to(ROOT)}#unsupported\n"


@pytest.mark.parametrize("name", figures.FIGURES)
def test_drawings_are_made_of_the_code_as_it_is(name: str) -> None:
    drawn = (ROOT / "docs" / "images" / name).read_text()
    assert drawn == figures.FIGURES[name](), "run python -m docs.tools.figures"


def test_each_page_has_a_line_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert not pages - listed, "give them a line under nav in mkdocs.yml"


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Each broken link or anchor is an error of the build."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    start = (tmp_path / "start.html").read_text()
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=.?(?:https?:)?//[^>]*>", start)
    assert 'id="replaydivergence"' in (tmp_path / "troubleshooting.html").read_text()
    assert "shared_core.attach" in (tmp_path / "api" / "shared_core.html").read_text()
    assert '<svg class="drawn"' in (tmp_path / "how_it_works.html").read_text()
