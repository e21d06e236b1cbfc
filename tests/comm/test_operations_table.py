"""``docs/design/operations.md`` lists exactly what the process group defines, and quotes its messages."""

from __future__ import annotations

import re
from pathlib import Path

from shared_core.worker.comm import group as group_module
from shared_core.worker.comm.group import SwiftProcessGroup
from tests.support.runner import ROOT

PAGE = (ROOT / "docs" / "design" / "operations.md").read_text(encoding="utf-8")
#: Helpers by which the operations are written, no part of the interface.
HELPERS = {"_run", "check", "reduce_again", "_inputs_checksum", "_exclusive", "_in_place", "_pooled", "_sparse"}


def rows(section: str) -> list[list[str]]:
    """Cells of the table in a section, without its head."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def methods(section: str) -> list[str]:
    return [name for row in rows(section) for name in re.findall(r"`(\w+)`", row[1])]


def test_the_tables_list_exactly_the_methods_of_the_group() -> None:
    sections = ("Operations with the same result at every member", "Operations whose result differs by rank")
    listed = [name for section in (*sections, "Point to point", "Not operations") for name in methods(section)]
    assert len(listed) == len(set(listed)), "each once"
    refused = {name for name in methods("Refused") if name not in listed}
    assert not refused
    defined = {name for name in vars(SwiftProcessGroup) if not name.startswith("__")} - HELPERS
    assert set(listed) | refused == defined


def test_each_section_holds_the_operations_of_its_class() -> None:
    """What is written as rank-specific goes through ``_exclusive``, and nothing else does."""
    source = Path(str(group_module.__file__)).read_text(encoding="utf-8")
    bodies = re.split(r"\n    def ", source.split("class SwiftProcessGroup")[1].split("\nclass ")[0])
    exclusive = {body.split("(")[0] for body in bodies if "return self._exclusive(" in body}
    listed = set(methods("Operations whose result differs by rank"))
    aliases = dict(re.findall(r"^    (\w+) = (\w+)$", source, re.M))
    composed = {"reduce_scatter_single_coalesced"}  # of several single ones
    assert {aliases.get(name, name) for name in listed} - composed == exclusive


def test_the_messages_are_those_of_the_code() -> None:
    quoted = [row[2].strip("`").removesuffix(" ...") for row in rows("Refused")]
    sources = [*(ROOT / "shared_core" / "worker" / "comm").glob("*.py"), ROOT / "shared_core" / "devices.py"]
    code = "".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in sources)
    for message in quoted:
        # Parts that are filled in differ; what lies between does not.
        pieces = re.split(r"cuda:0|(?:all_)?reduce(?= of a)|got 2", message)
        assert all(piece in code for piece in pieces), message
