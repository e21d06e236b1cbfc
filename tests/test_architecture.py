"""The rules by which the house is built, checked on the source: who may import whom."""

from __future__ import annotations

import ast
import re

import import_graph
import pytest
from import_graph import Graph, Import, Module, circles, imports, inside, offered, taken_later

CORE, LIGHTNING, ACCELERATE = PACKAGES = ("shared_core", "lightning_swift", "accelerate_swift")
#: What is in a clone only.
CLONE = ("tests", "benchmarks", "examples", "docs")

#: Modules of the core that adapters may import besides packages with ``__all__``.
PLAIN_FACES = ("shared_core.errors", "shared_core.events", "shared_core.devices", "shared_core.versions")

#: Which modules may import a package.
ONLY_IN = {
    "deepspeed": ("shared_core.pipeline", LIGHTNING, ACCELERATE),
    "ortools": ("shared_core.schedule.optimal",),
    "lightning": (LIGHTNING,),
    "pytorch_lightning": (LIGHTNING,),
    "accelerate": (ACCELERATE,),
    "transformers": (ACCELERATE,),
}

#: The layers of the core, from the top. A module imports from layers below its own, and from its own folder.
LAYERS = (
    ("cli",),
    ("watch",),
    ("report",),
    ("pipeline", "trackers"),
    ("",),  # the package itself
    ("adapters",),
    ("checkpointer",),
    ("loop",),
    ("untrained",),
    ("sharing", "prepared"),
    ("reroute",),
    ("job",),
    ("worker", "launcher"),
    ("handover",),
    ("protocol",),
    ("schedule",),
    ("checkpoint",),
    ("encoding",),
    ("loaders",),
    ("config",),
    ("transport",),
    ("system",),
    ("faults",),
    ("waiting",),
    ("versions",),
    ("events",),
    ("devices",),
    ("resources",),
    ("kinds",),
    ("codec",),
    ("plain_json",),
    ("errors",),
    ("lazy",),
)
#: What ``protocol/`` is free of.
IMPURE = ("torch", "threading", "socket", "selectors", "subprocess", "multiprocessing")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph.read(*PACKAGES)


def is_adapter(module: str) -> bool:
    return inside(module, LIGHTNING, ACCELERATE)


def is_face(graph: Graph, module: str) -> bool:
    return module in PLAIN_FACES or (graph[module].is_package and offered(graph[module]) is not None)


def test_adapters_import_only_public_faces(graph: Graph) -> None:
    wrong = [str(i) for i in imports(graph, is_adapter) if inside(i.imported, CORE) and not allowed(graph, i)]
    wrong += [
        f"{adapter.name}:{line} takes {name} of {module}"
        for adapter in graph.values()
        if is_adapter(adapter.name)
        for module, name, line in taken_later(adapter)
        if inside(module, CORE) and name not in names_of(graph[module])
    ]
    assert not wrong, (
        "adapters import names in __all__ of packages of the core, its errors and its events, nothing else"
    )


def allowed(graph: Graph, each: Import) -> bool:
    return is_face(graph, each.imported) and set(each.names) <= names_of(graph[each.imported])


def names_of(face: Module) -> set[str]:
    """What may be taken from a face; everything public where it has no ``__all__``."""
    listed = offered(face)
    if listed is not None:
        return set(listed)
    public = (node.name for node in face.tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return {name for name in public if not name.startswith("_")}


def test_what_a_package_offers_is_what_it_imports_on_first_use(graph: Graph) -> None:
    """``__getattr__`` of a package finds exactly what the type checker sees there."""
    found = 0
    for module in graph.values():
        homes = homes_of(module)
        if homes is None:
            continue
        found += 1
        typed = {(i.imported, name) for i in module.imports if i.kind == "typing" for name in i.names}
        assert homes == typed, module.name
        assert {name for _, name in homes} <= set(offered(module) or ()), module.name
        hidden = [name for _, name in homes if f"{module.name}.{name}" in graph]
        assert not hidden, f"{module.name}: a module of that name takes its place once it is imported"
    assert found > 3


def homes_of(module: Module) -> set[tuple[str, str]] | None:
    """(module, name) in the call of ``lazily``; None where there is none."""
    for node in ast.walk(module.tree) if module.is_package else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lazily":
            return {(home, name) for home, names in ast.literal_eval(node.args[1]).items() for name in names}
    return None


def test_the_product_imports_nothing_that_is_in_a_clone_only(graph: Graph) -> None:
    assert not [str(i) for i in imports(graph) if inside(i.imported, *CLONE)]


def test_the_core_does_not_import_the_adapters(graph: Graph) -> None:
    core = imports(graph, lambda m: inside(m, CORE))
    wrong = [str(i) for i in core if inside(i.imported, LIGHTNING, ACCELERATE)]
    wrong += [str(i) for i in imports(graph, lambda m: inside(m, LIGHTNING)) if inside(i.imported, ACCELERATE)]
    wrong += [str(i) for i in imports(graph, lambda m: inside(m, ACCELERATE)) if inside(i.imported, LIGHTNING)]
    assert not wrong


def layer_of(module: str) -> tuple[int, str]:
    """Number of its layer, from the top, and its folder or file in the core."""
    place = (module.split(".") + [""])[1]
    return next(number for number, names in enumerate(LAYERS) if place in names), place


def test_imports_go_down(graph: Graph) -> None:
    """Neither up nor to the side: ``worker`` and ``launcher`` know nothing of each other."""
    wrong = []
    for each in imports(graph, lambda m: inside(m, CORE)):
        if inside(each.imported, CORE):
            (mine, here), (other, there) = layer_of(each.importer), layer_of(each.imported)
            if here != there and other <= mine:
                wrong.append(str(each))
    assert not wrong


def test_the_protocol_is_pure(graph: Graph) -> None:
    users = imports(graph, lambda m: inside(m, "shared_core.protocol"))
    assert not [str(i) for i in users if inside(i.imported, *IMPURE)]


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_framework_is_imported_in_its_place_only(graph: Graph, package: str) -> None:
    users = [i for i in imports(graph) if inside(i.imported, package)]
    assert not [str(i) for i in users if not inside(i.importer, *ONLY_IN[package])]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_of_imports(graph: Graph, package: str) -> None:
    """Those for the type checker and those inside functions included: a circle is one module in several files."""
    assert not circles(graph, lambda module: inside(module, package))


def test_the_checker_sees_every_kind_of_import() -> None:
    """The graph itself: what it is made of, and that it finds a circle."""
    text = """
import a.b.c
from a.b import c, name
from . import beside
if TYPE_CHECKING:
    from a import x
def function():
    try:
        import later
    finally:
        pass
class Kind:
    from a.b.c import y
"""
    module = Module("a.one", import_graph.ROOT, ast.parse(text), 1, False)
    graph = {"a": module, "a.b": module, "a.b.c": module, "a.one": module, "a.beside": module}
    found = {(i.imported, i.names, i.kind) for i in import_graph.of_module(module, graph)}
    assert found == {
        ("a.b.c", (), "module"),
        ("a.b", ("name",), "module"),
        ("a.beside", (), "module"),
        ("a", ("x",), "typing"),
        ("later", (), "function"),
        ("a.b.c", ("y",), "module"),
    }
    one, two = (Module(name, import_graph.ROOT, module.tree, 1, False) for name in ("one", "two"))
    one.imports = [Import("one", "two", (), "module", 1)]
    two.imports = [Import("two", "one", (), "typing", 1)]
    assert circles({"one": one, "two": two}, lambda name: True) == [["one", "two"]]
    assert not circles({"one": one, "two": two}, lambda name: True, ["module", "function"])


#: Most objects of the project's own classes that a constructor is given: more belong in groups, or do several jobs.
MOST_COLLABORATORS = 8


def test_a_class_has_few_collaborators(graph: Graph) -> None:
    """The limit is what the worst class has now: it only goes down."""
    classes = [node for module in graph.values() for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    names = {each.name for each in classes}
    found = {each.name: collaborators(each, names) for each in classes}
    worst = max(found, key=lambda name: len(found[name]))
    assert len(found[worst]) == MOST_COLLABORATORS, (worst, found[worst])


def collaborators(cls: ast.ClassDef, names: set[str]) -> list[str]:
    """Parameters of the constructor whose types name one of these classes."""
    inits = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    given = [each for node in inits for each in (*node.args.args, *node.args.kwonlyargs) if each.annotation]
    return [each.arg for each in given if names & set(re.findall(r"\w+", ast.unparse(each.annotation or each)))]


def test_collaborators_are_counted() -> None:
    (cls,) = ast.parse("class A:\n def __init__(self, b: B, c: C | None, *, d: Callable[[], m.B], e: int): ...").body
    assert isinstance(cls, ast.ClassDef) and collaborators(cls, {"B", "C"}) == ["b", "c", "d"]


def test_each_class_has_a_name_of_its_own(graph: Graph) -> None:
    """A reader who looks for a class finds one."""
    places: dict[str, list[str]] = {}
    for module in graph.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{module.name}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
    assert len(places) > 500
