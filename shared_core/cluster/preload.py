"""What a zygote imports: what the job imports, found by looking at the words of the user's script, which is not run."""

from __future__ import annotations

import importlib.util
import io
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path

ALWAYS = (
    "torch",
    "torch.distributed",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch._dynamo",  # the first optimizer imports it, which takes about a second
    "shared_core",
    "shared_core.cluster.entry",
)
#: Module to import -> names whose mention in a script says that the job imports it.
HEAVY: dict[str, tuple[str, ...]] = {
    "lightning.pytorch": ("lightning", "lightning_swift"),
    "lightning.fabric": ("lightning", "lightning_swift"),
    "pytorch_lightning": ("pytorch_lightning",),
    "torchmetrics": ("torchmetrics", "lightning", "lightning_swift", "pytorch_lightning"),
    "lightning_swift": ("lightning_swift",),
    "accelerate": ("accelerate", "accelerate_swift"),
    "accelerate_swift": ("accelerate_swift",),
    "transformers": ("transformers",),
    "torchvision": ("torchvision",),
    "torchaudio": ("torchaudio",),
    "datasets": ("datasets",),
    "numpy": ("numpy", "lightning", "transformers"),
    "pandas": ("pandas",),
    "scipy": ("scipy",),
    "sklearn": ("sklearn",),
    "timm": ("timm",),
    "torch.utils.tensorboard": ("tensorboard", "TensorBoardLogger"),
}


def find_script(target: str, *, module: bool) -> Path | None:
    """The source file of a script or module, or None."""
    if not module:
        path = Path(target)
        return path / "__main__.py" if path.is_dir() else path
    try:
        spec = importlib.util.find_spec(target)
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def modules_for(script: Path | None, extra: Iterable[str] = ()) -> list[str]:
    """Modules that a zygote for ``script`` imports, in order and without repeats.

    Args:
        script: the user's source file, if there is one.
        extra: modules asked for with ``--preload``.
    """
    chosen = list(ALWAYS)
    if script is not None:
        words = _words_around(script)
        chosen += [module for module, names in HEAVY.items() if words.intersection(names)]
    chosen += extra
    return list(dict.fromkeys(chosen))


def _words_around(script: Path, limit: int = 30) -> set[str]:
    """Names in the script and in the modules beside it that it mentions."""
    words: set[str] = set()
    todo, seen = [script], {script}
    while todo and len(seen) <= limit:
        found = _words(todo.pop())
        words |= found
        for name in found:
            for near in (script.parent / f"{name}.py", script.parent / name / "__init__.py"):
                if near not in seen and near.is_file():
                    seen.add(near)
                    todo.append(near)
    return words


def _words(script: Path) -> set[str]:
    """Names in a source file; comments and strings do not count."""
    try:
        source = script.read_bytes()
        return {token.string for token in tokenize.tokenize(io.BytesIO(source).readline) if token.type == tokenize.NAME}
    except (OSError, SyntaxError, tokenize.TokenError, UnicodeDecodeError):
        return set()


def installed(modules: Sequence[str]) -> list[str]:
    """Those that can be found without importing more than their parent packages' specs."""
    found = []
    for name in modules:
        try:
            root = importlib.util.find_spec(name.partition(".")[0])
        except (ImportError, ValueError):
            root = None
        if root is not None:
            found.append(name)
    return found
