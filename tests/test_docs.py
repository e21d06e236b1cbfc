"""Links between pages, what pages are made of, and the site that is built of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from docs.tools import benchmarks, errors, figures, words
from shared_core.errors import Unsupported

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/design").glob("*.md")),
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {errors.anchor(title) for title in titles}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in LINK.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)):
            if "://" in link or link.startswith("mailto:"):
                continue
            where, _, anchor = link.partition("#")
            target = page.parent / where if where else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                broken.append((page.name, link))
    assert not broken


def test_the_page_on_papers_names_what_is_there() -> None:
    missing = []
    for row in (ROOT / "docs/design/papers.md").read_text().splitlines():
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
        """An error that the page does not list."""

    error = Elsewhere("this cannot be done")
    assert str(error) == "this cannot be done"
    *_, last = traceback.format_exception(error)
    assert last == f"See {errors.PAGE}#unsupported\n"


@pytest.mark.parametrize("name", figures.FIGURES)
def test_drawings_are_made_of_the_code_as_it_is(name: str) -> None:
    drawn = (ROOT / "docs" / "images" / name).read_text()
    assert drawn == figures.FIGURES[name](), "run python -m docs.tools.figures"


def test_no_number_of_the_benchmarks_is_typed_by_hand() -> None:
    page, text = benchmarks.PAGE.read_text(), benchmarks.TEXT.read_text()
    runs = json.loads(benchmarks.NUMBERS.read_text())
    assert benchmarks.with_tables(page, text, runs) == page, "run make bench-docs"
    assert benchmarks.kept(text, runs) == runs
    typed = page.replace("| 0.6 s |", "| 0.5 s |")
    assert typed != page == benchmarks.with_tables(typed, text, runs), "the control"


def test_the_newest_number_stands_in_the_tables() -> None:
    text = "| stall | {recovery; swift; stall; .2f} s | {recovery; swift; stall; target} | {runs} |\n{all runs}"
    row = {"case": "swift", "metric": "stall", "unit": "s", "target": 0.6}
    old = {"commit": "1", "date": "2026-11-21", "machine": None, "load": None, "note": "quiet"}
    runs = [
        old | {"command": "recovery --full", "rows": [row | {"value": 0.181, "holds": True}]},
        old | {"command": "recovery --quick", "rows": [row | {"value": 0.5, "holds": True}]},
    ]
    assert benchmarks.tables(text, runs).startswith("| stall | 0.18 s | 0.6 s | a |\n| a | `recovery --full` |")
    machine = {"cores": 2}
    new = {"command": "recovery", "commit": "2", "date": "2026-11-28", "machine": machine, "load": [3.0, 5.0]}
    new |= {"seconds": 240}
    runs = benchmarks.kept(text, [*runs, new | {"rows": [row | {"value": 0.7, "holds": False}]}])
    assert [run["commit"] for run in runs] == ["2"]
    shown = benchmarks.tables(text, runs)
    assert shown.startswith("| stall | 0.70 s | 0.6 s: missed | a |")
    assert shown.endswith("| 2 cores, load 3.0: busy, took 240 s |")
    with pytest.raises(LookupError):
        benchmarks.tables(text.replace("swift", "another"), runs)


def test_each_page_has_a_line_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    outside = {page for page in pages if page.startswith("design/")}
    assert not pages - outside - listed, "give them a line under nav in mkdocs.yml"
    assert not outside & listed, "docs/design is not in the navigation"


@pytest.mark.parametrize(
    ("pages", "most"),
    [
        ([ROOT / "README.md"], words.README),
        (words.navigation(), words.NAVIGATION),
        (words.design(), words.DESIGN),
    ],
    ids=["README", "navigation", "design"],
)
def test_pages_are_short(pages: list[Path], most: int) -> None:
    assert sum(map(words.count, pages)) <= most, "python -m docs.tools.words prints how long each is"


def test_pages_have_the_words_of_the_field() -> None:
    old = {page.name: found for page in PAGES if (found := words.old(page))}
    assert not old, "CONTRIBUTING.md has the words"


def test_old_words_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text in words.OLD_TEXTS:
        page.write_text(text)
        assert words.old(page), text
        page.write_text(f"`{text}`\n\nThe training loss falls, and no row is lost.\n\n```text\n{text}\n```\n")
        assert not words.old(page), "code is quoted as it is"


def _build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


@pytest.mark.nightly
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = _build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    pages = {str(page.relative_to(tmp_path)): page.read_text() for page in tmp_path.rglob("*.html")}
    loads = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=.?(?:https?:)?//[^>]*>")
    assert not [found for page in pages.values() for found in loads.findall(page)]
    assert 'id="replaydivergence"' in pages["troubleshooting.html"]
    assert 'id="shared_core.attach"' in pages["api/shared_core.html"]
    assert '<svg class="drawn"' in pages["how_it_works.html"]
    assert 'href="examples/nanogpt_loop.py.html"' in pages["loops.html"]


@pytest.mark.nightly
def test_a_broken_anchor_fails_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        shutil.copy(ROOT / name, tmp_path)
    with (tmp_path / "docs" / "modes.md").open("a") as page:
        page.write("[x](start.md#nowhere)\n")
    built = _build(tmp_path, tmp_path / "site")
    assert built.returncode == 1
    assert "does not contain an anchor '#nowhere'" in built.stderr
