"""The decoders of each format, one module a format; each has a list ``TARGETS``."""

from __future__ import annotations

from importlib import import_module

from ..harness import Target

FORMATS = (
    "plain", "image", "checkpoints", "spool", "segments", "publisher", "wire", "neighbour", "requests", "events",
    "plans", "lightning", "store",
)  # fmt: skip


def targets_of(name: str) -> list[Target]:
    """The decoders of a format, or the one decoder of that name.

    Raises:
        SystemExit: there is none.
    """
    module, _, rest = name.partition(".")
    if module not in FORMATS:
        raise SystemExit(f"there is no format {module!r}; there are {', '.join(FORMATS)}")
    targets: list[Target] = import_module(f".{module}", __package__).TARGETS
    chosen = [each for each in targets if not rest or each.name == name]
    if not chosen:
        raise SystemExit(f"there is no decoder {name!r}; there are {', '.join(each.name for each in targets)}")
    return chosen
