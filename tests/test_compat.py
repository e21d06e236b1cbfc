"""The private names of frameworks that the product uses are what they were in the version it was checked with."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import import_graph
import pytest
import torch
from harness import most

from shared_core.errors import Unsupported
from shared_core.pipeline.compat import choosing
from shared_core.versions import check_version, what_is_wrong
from shared_core.worker.comm.compat import TESTED

#: Where the names of each framework are listed, and used.
TABLES = {
    "lightning": ("lightning_swift.compat", ["lightning_swift.compat"]),
    "deepspeed": ("shared_core.pipeline.compat", ["shared_core.pipeline.compat"]),
    "torch": ("shared_core.worker.comm.compat", ["shared_core.worker.comm.compat"]),
    "fsdp": ("shared_core.worker.sharded.compat", ["shared_core.worker.sharded.compat"]),
    "accelerate": ("accelerate_swift.compat", ["accelerate_swift.compat"]),
}


def names(framework: str) -> list[tuple[str, str]]:
    table = importlib.import_module(TABLES[framework][0])
    found: list[tuple[str, str]] = list(table.NAMES)
    return found


def parts_of(framework: str) -> set[str]:
    """All names that its table has, and those of their modules and classes."""
    places = [each.partition("(")[0] for name, _ in names(framework) for each in name.split(" or ")]
    return {part for place in places for part in place.replace(":", ".").split(".")}


@pytest.mark.parametrize("framework", most(TABLES, "lightning"))
def test_private_names_are_what_they_were(framework: str) -> None:
    """All in one test: each takes microseconds, and a new version of a framework changes several."""
    if framework == "deepspeed":  # others are needed by most tests
        pytest.importorskip("deepspeed")
    checked_with = importlib.import_module(TABLES[framework][0]).TESTED
    wrong = [f"{what}; needed because: {why}" for name, why in names(framework) if (what := what_is_wrong(name))]
    assert not wrong, f"not as in {checked_with}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("version", "gone", "said"),
    [
        ("2.10.0", [], "torch 2.10.0 is too old: torch 2.11 to 2.15 were tested"),
        ("2.99.0", [("torch:_gone", "for a test")], "lacks what is needed of it: torch: has no _gone (needed because"),
        ("2.99.0", [], "torch 2.99.0 is newer than what was tested (torch 2.11 to 2.15); all is there"),
        ("2.15.1+cpu", [("torch:_gone", "is not looked up")], ""),
    ],
)
def test_another_version_is_refused_or_told(
    version: str,
    gone: list[tuple[str, str]],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    names = [*importlib.import_module(TABLES["torch"][0]).NAMES, *gone]
    if "too old" in said or "lacks" in said:
        with pytest.raises(Unsupported, match=re.escape(said)):
            check_version(TESTED, names)
        return
    check_version(TESTED, names)
    console = capsys.readouterr().err
    assert said in console if said else not console


@pytest.mark.parametrize("framework", TABLES)
def test_all_private_names_that_are_used_are_listed(framework: str) -> None:
    listed = parts_of(framework)
    for module in TABLES[framework][1]:
        used = private_names(import_graph.ROOT / Path(*module.split(".")).with_suffix(".py"))
        assert used <= listed, f"{module} uses names that the table does not list: {sorted(used - listed)}"


@pytest.mark.parametrize("package", ["lightning_swift", "accelerate_swift"])
def test_adapters_use_private_names_of_frameworks_in_one_place(package: str) -> None:
    """All others that they use are their own: they define them somewhere."""
    files = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (import_graph.ROOT / package).glob("*.py")}
    own = {name for tree in files.values() for name in defined_in(tree)} | {"_exit", "_swift_added"}
    torchs = parts_of("torch")
    wrong = {path.name: private_names(path) - own - torchs for path in files if path.name != "compat.py"}
    assert not {path: sorted(found) for path, found in wrong.items() if found}


def defined_in(tree: ast.Module) -> set[str]:
    """Names of functions and classes, and of what is assigned to ``self``, to a class, or to an object made here."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "made"):
                found.add(node.attr)
    return found


def private_names(path: Path) -> set[str]:
    """Names with an underscore that are imported, or taken of or set in an object."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return {name for name in found if name.startswith("_") and not name.startswith("__")} - {"_getframe"}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("shared_core.versions:parameters_of(function)", None),
        ("shared_core.versions:parameters_of(text)", "takes (function)"),
        ("shared_core.versions:nothing", "has no nothing"),
        ("no_such_module:name", "cannot be imported"),
        ("import_graph:Module.imports", None),
        ("fractions:Fraction._numerator", None),
        ("fractions:Fraction._of_another_name", "has no _of_another_name"),
        ("fractions:Fraction._of_another_name or fractions:Fraction._numerator", None),
        (
            "fractions:Fraction._of_another_name or shared_core.versions:nothing",
            "_of_another_name; shared_core.versions: has no nothing",
        ),
    ],
)
def test_a_name_that_has_changed_is_found(name: str, wrong: str | None) -> None:
    found = what_is_wrong(name)
    assert found is None if wrong is None else wrong in (found or "")


def test_the_name_of_deepspeeds_engine_stays_that_of_a_class() -> None:
    """With a section in the configuration, what ``deepspeed.PipelineEngine`` makes is chosen; it is a class still."""

    class Stock:
        def __init__(self, config: object = None) -> None:
            self.config = config

    class Ours(Stock):
        pass

    stand_in = choosing(Stock, lambda given: Ours if given.get("config") else Stock)

    class Theirs(stand_in):  # type: ignore[misc, valid-type]
        pass

    plain, chosen, theirs = stand_in(), stand_in(config=1), Theirs(config=1)
    assert (type(plain), type(chosen), type(theirs)) == (Stock, Ours, Theirs)
    assert chosen.config == theirs.config == 1
    assert all(isinstance(each, stand_in) for each in (plain, chosen, theirs))
    assert all(issubclass(each, stand_in) for each in (Stock, Ours, Theirs))
    assert not isinstance(3, stand_in) and not issubclass(int, stand_in)
    assert not isinstance(chosen, Theirs) and not issubclass(Ours, Theirs)
