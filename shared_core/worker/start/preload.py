"""What a zygote imports: what the job imports, found by the names in the user's script, which is not run."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import io
import os
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shared_core.kinds import open_regular

#: Every worker needs these. ``shared_core`` imports its parts only when they are asked for.
ALWAYS = (
    "torch",
    "torch.distributed",
    "torch.distributed.elastic.multiprocessing.errors",
    "shared_core",
    "shared_core.job",
    "shared_core.loop",
    "shared_core.sharing",
)
_LIGHTNING = ("lightning", "lightning_swift")
#: This product, which is imported already when the program begins.
_OURS = frozenset({"shared_core", "lightning_swift", "accelerate_swift"})
#: Module to import -> names whose mention in a script says that the job will import it.
HEAVY: dict[str, tuple[str, ...]] = {
    # the first optimizer imports it, which takes about a second
    "torch._dynamo": ("torch", "lightning", "pytorch_lightning", "transformers", "accelerate", "deepspeed"),
    "torch.distributed.algorithms.ddp_comm_hooks": (
        *_LIGHTNING,
        "pytorch_lightning",
        "accelerate",
        "DistributedDataParallel",
    ),
    "lightning.pytorch": _LIGHTNING,
    "fsspec.implementations.chained": (*_LIGHTNING, "pytorch_lightning"),
    "pytorch_lightning": ("pytorch_lightning",),
    "torchmetrics": ("torchmetrics", *_LIGHTNING, "pytorch_lightning"),
    "lightning_swift": ("lightning_swift",),
    "accelerate": ("accelerate", "accelerate_swift"),
    "accelerate_swift": ("accelerate_swift",),
    "shared_core.pipeline.warm": ("deepspeed", "import_deepspeed"),
    "torch.utils.tensorboard": ("tensorboard", "TensorBoardLogger"),
    "wandb": ("wandb", "WandbLogger"),
    "mlflow": ("mlflow", "MLFlowLogger"),
}
#: Packages of which a zygote imports exactly what the script names; others may do at import what only a worker should.
KNOWN = frozenset(
    "torch torchvision torchaudio torchmetrics numpy scipy pandas sklearn timm datasets tokenizers transformers "
    "diffusers peft lightning pytorch_lightning accelerate".split()
)


@dataclass
class _Mentions:
    words: set[str] = field(default_factory=set)
    imports: dict[str, None] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)


def find_script(target: str, *, module: bool) -> Path | None:
    """The source file of a script or module; None for a module that cannot be found."""
    if not module:
        path = Path(target)
        return path / "__main__.py" if path.is_dir() else path
    try:
        spec = importlib.util.find_spec(target)
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def modules_for(script: Path | None, extra: Iterable[str] = ()) -> list[str]:
    """What a zygote for ``script`` imports, in order: ``module`` or ``module:attribute``; ``extra`` are added."""
    chosen = list(ALWAYS)
    if script is not None:
        found = _look_around(script)
        theirs = beside(script.parent)
        wanted = [module for module, names in HEAVY.items() if found.words.intersection(names)]
        chosen += [name for name in (*wanted, *found.imports) if _package(name) not in theirs]
    chosen += extra
    return list(dict.fromkeys(chosen))


def trains_nothing(script: Path | None) -> bool:
    """Whether a script imports the standard library and this product alone, and nothing by a name that it makes."""
    if script is None:
        return False
    try:
        with open_regular(script) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0] if not node.level else "")
        elif isinstance(node, ast.Name):
            found.update({node.id} & {"__import__", "exec", "eval"})
    return found <= (sys.stdlib_module_names | _OURS) - {"importlib", "runpy"}


def beside(folder: Path) -> set[str]:
    """Names of the modules and packages in a folder; empty if it cannot be read."""
    found = set()
    with suppress(OSError):
        for path in folder.iterdir():
            if path.suffix in (".py", ".so"):
                found.add(path.name.partition(".")[0])
            elif path.is_dir() and (path / "__init__.py").exists():
                found.add(path.name)
    return found


def make_way(folder: Path) -> None:
    """Forget imported modules that a module in ``folder`` hides: the program will import its own. Built-in modules
    stay, as they would without us; so does this product.
    """
    inside = os.path.realpath(folder) + os.sep
    for name in beside(folder) - _OURS - {"__main__", "encodings"}:
        if name not in sys.modules:  # asked one by one: to go through all would copy memory shared with the zygote
            continue
        spec = getattr(sys.modules[name], "__spec__", None)
        origin = getattr(spec, "origin", None)
        if origin in ("built-in", "frozen") or os.path.realpath(origin or "").startswith(inside):
            continue
        for other in [one for one in sys.modules if _package(one) == name]:
            del sys.modules[other]


def _package(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def installed(modules: Sequence[str]) -> list[str]:
    """Those whose outermost package can be found; nothing is imported."""
    found = []
    for name in modules:
        try:
            if importlib.util.find_spec(_package(name)) is not None:
                found.append(name)
        except (ImportError, ValueError):
            continue
    return found


def is_there(module: str) -> bool:
    """Whether ``python -m`` can find a module's outermost package; nothing is imported."""
    outermost = module.partition(".")[0]
    with suppress(ImportError, ValueError):
        here = importlib.machinery.PathFinder.find_spec(outermost, [os.getcwd()])
        return here is not None or importlib.util.find_spec(outermost) is not None
    return False


def load(name: str) -> None:
    """Import ``module``, or ``module:attribute``, which lazy packages import then. Raises what the import raises."""
    module, _, attribute = name.partition(":")
    loaded = importlib.import_module(module)
    if attribute and not hasattr(loaded, attribute):
        importlib.import_module(f"{module}.{attribute}")


def _look_around(script: Path, limit: int = 30) -> _Mentions:
    """Names in the script and in the modules beside it that it imports, up to ``limit`` files."""
    found = _Mentions()
    todo, seen = [script], {script}
    while todo and len(seen) <= limit:
        here = _mentions(todo.pop())
        found.words |= here.words
        found.imports |= here.imports
        for name in sorted(here.modules):
            for near in (script.parent / f"{name}.py", script.parent / name / "__init__.py"):
                if near not in seen and near.is_file():
                    seen.add(near)
                    todo.append(near)
    return found


def _mentions(script: Path) -> _Mentions:
    """Names in a source file (not in comments or strings), its imports of :data:`KNOWN`, and all modules that it may
    import. Empty for a file that cannot be read or parsed.
    """
    try:
        with open_regular(script) as file:
            source = file.read()
        tokens = tokenize.tokenize(io.BytesIO(source).readline)
        words = {token.string for token in tokens if token.type == tokenize.NAME}
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, tokenize.TokenError):
        return _Mentions()
    return _Mentions(words, dict.fromkeys(_imports(tree)), set(_modules(tree)))


def _modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            outer = node.module if isinstance(node, ast.ImportFrom) else None
            yield from (outer or "").split(".")
            for alias in node.names:
                yield from alias.name.split(".")


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in KNOWN)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.partition(".")[0] in KNOWN:
                yield from (node.module if alias.name == "*" else f"{node.module}:{alias.name}" for alias in node.names)
