"""Links between pages, and what the page about the papers names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


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
