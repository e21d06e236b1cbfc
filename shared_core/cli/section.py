"""The ``"swift_recovery"`` section of a DeepSpeed configuration, found before the program runs.

Options are for the launcher too, and the backend is chosen when the default process group is made, which is before
DeepSpeed is given its configuration. So the launcher looks where the section can be: in JSON files that are arguments
of the program or named in the script, and in the script itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared_core.errors import ConfigError
from shared_core.kinds import open_regular
from shared_core.plain_json import parse

SECTION = "swift_recovery"


def find_section(script: Path | None, args: Sequence[str]) -> dict[str, Any] | None:
    """The options of the section, or None if there is none. ``args``: its arguments, as ``--deepspeed_config ds.json``
    or ``--config=ds.json``. Raises ConfigError if a section holds something else than options.
    """
    tree = None
    if script is not None:
        with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested deeply
            with open_regular(script) as file:
                tree = ast.parse(file.read())
    words = [word for arg in args for word in (arg, arg.partition("=")[2])]
    nodes = list(ast.walk(tree)) if tree is not None else []
    words += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    folders = [Path(), *([script.parent] if script is not None else [])]
    for found in (*_in_files(words, folders), *_in_source(nodes)):
        if not isinstance(found, dict):
            raise ConfigError(f"{SECTION!r} in a DeepSpeed configuration must hold options, not {found!r}")
        return found
    return None


def _in_files(words: Iterable[str], folders: Sequence[Path]) -> Iterator[Any]:
    for word in words:
        if not word.endswith(".json"):
            continue
        for folder in folders:
            with suppress(OSError, ValueError):
                with open_regular(folder / word) as file:
                    content = parse(file.read().decode())
                if isinstance(content, dict) and SECTION in content:
                    yield content[SECTION]


def _in_source(nodes: Iterable[ast.AST]) -> Iterator[Any]:
    for node in nodes:
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == SECTION:
                with suppress(ValueError, TypeError, RecursionError, MemoryError):  # made at run time, or odd
                    yield ast.literal_eval(value)
