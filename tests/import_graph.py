"""Who imports whom, from the source alone: nothing is imported to find out.

An import of ``a.b.c`` is one of that module, not of the packages ``a`` and ``a.b``. ``from a.b import c`` is one of the
module ``a.b.c`` if there is one, and else of ``a.b``, of which it takes the name ``c``.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, get_args

ROOT = Path(__file__).parent.parent
#: At the top of a module, for the type checker only, or inside a function.
Kind = Literal["module", "typing", "function"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Import:
    """One import of one name.

    Attributes:
        importer: the module that it stands in.
        imported: the module that is imported.
        names: those that are taken from the imported module; empty where it is imported as a whole.
        kind: when it is carried out.
        line: where it stands.
    """

    importer: str
    imported: str
    names: tuple[str, ...]
    kind: Kind
    line: int

    def __str__(self) -> str:
        names = f" ({', '.join(self.names)})" if self.names else ""
        return f"{self.importer}:{self.line} imports {self.imported}{names} [{self.kind}]"


@dataclass
class Module:
    """One source file: where it is, its syntax tree, and its imports."""

    name: str
    path: Path
    tree: ast.Module
    lines: int
    is_package: bool
    imports: list[Import] = field(default_factory=list)


Graph = dict[str, Module]


@cache
def read(*packages: str) -> Graph:
    """The modules of these packages of the repository, by name, with all imports in them, also of other packages."""
    collects = gc.isenabled()
    gc.disable()  # it would look through all syntax trees again and again, which takes most of the time
    try:
        graph = {module.name: module for package in packages for module in _modules(package)}
        for module in graph.values():
            module.imports = list(of_module(module, graph))
        return graph
    finally:
        if collects:
            gc.enable()


def _modules(package: str) -> Iterator[Module]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        text = path.read_text(encoding="utf-8")
        name = ".".join(parts[:-1] if is_package else parts)
        yield Module(name, path, ast.parse(text), text.count("\n"), is_package)


def imports(graph: Graph, of: Callable[[str], bool] = lambda module: True) -> Iterator[Import]:
    """All imports in the modules that ``of`` chooses."""
    for module in graph.values():
        if of(module.name):
            yield from module.imports


def circles(graph: Graph, within: Callable[[str], bool], kinds: Iterable[Kind] = KINDS) -> list[list[str]]:
    """Groups of modules of which each imports each other one, through the others or not.

    Args:
        graph: of :func:`read`.
        within: chooses modules; others are left out.
        kinds: of imports that count.
    """
    allowed = set(kinds)
    edges = {
        module.name: [i.imported for i in module.imports if i.kind in allowed and within(i.imported)]
        for module in graph.values()
        if within(module.name)
    }
    return [sorted(group) for group in _strongly_connected(edges) if len(group) > 1 or group[0] in edges[group[0]]]


def inside(name: str, *packages: str) -> bool:
    """Whether a module is one of these, or in one of them."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offered(module: Module) -> list[str] | None:
    """What a module lists in ``__all__``; None where it has none."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            found: list[str] = ast.literal_eval(node.value)
            return found
    return None


def taken_later(module: Module) -> Iterator[tuple[str, str, int]]:
    """(module, attribute, line) where an attribute is taken from a module that was imported as a whole."""
    known: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    wholes = {i.imported for i in module.imports if not i.names}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = known.get(node.value.id)
            if found in wholes:
                yield found, node.attr, node.lineno


def of_module(module: Module, graph: Graph) -> Iterator[Import]:
    """The imports in a module; the graph says which names are modules."""
    for node, kind in _statements(module.tree, "module"):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module.name, alias.name, (), kind, node.lineno)
            continue
        base = node.module or ""
        if node.level:
            parts = module.name.split(".")
            parts = parts[: len(parts) - node.level + module.is_package]
            base = ".".join([*parts, base] if base else parts)
        names = [alias.name for alias in node.names if f"{base}.{alias.name}" not in graph]
        for alias in node.names:
            if alias.name not in names:
                yield Import(module.name, f"{base}.{alias.name}", (), kind, node.lineno)
        if names:
            yield Import(module.name, base, tuple(names), kind, node.lineno)


def _statements(node: ast.AST, kind: Kind) -> Iterator[tuple[ast.Import | ast.ImportFrom, Kind]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, kind
        elif isinstance(child, ast.If) and _is_typing(child.test):
            for each in child.body:
                yield from _statements(ast.Module([each], []), "typing")
            for each in child.orelse:
                yield from _statements(ast.Module([each], []), kind)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _statements(child, "function")
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _statements(child, kind)


def _is_typing(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _strongly_connected(edges: dict[str, list[str]]) -> list[list[str]]:
    """Tarjan's algorithm, without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []
    for root in edges:
        if root in index:
            continue
        work: list[tuple[str, Iterator[str]]] = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, following = work[-1]
            for each in following:
                if each not in edges:
                    continue
                if each not in index:
                    index[each] = low[each] = len(index)
                    stack.append(each)
                    on_stack.add(each)
                    work.append((each, iter(edges[each])))
                    break
                if each in on_stack:
                    low[node] = min(low[node], index[each])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    group = []
                    while True:
                        group.append(each := stack.pop())
                        on_stack.discard(each)
                        if each == node:
                            break
                    found.append(group)
    return found
