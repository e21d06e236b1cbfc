"""The options of a job that ``swiftrun`` starts.

Those in the ``"swift_recovery"`` section of a DeepSpeed configuration are for the launcher too, and the backend is
chosen when the default process group is made, which is before DeepSpeed is given its configuration. So the launcher
looks where the section can be: in JSON files that are arguments of the program or named in the script, and in the
script itself.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared_core.checkpoint.storage import absolute, check_place, open_storage
from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError
from shared_core.kinds import check_length, check_regular, open_regular
from shared_core.plain_json import parse


def build_config(args: argparse.Namespace, section: Mapping[str, Any] | None = None) -> SwiftConfig:
    """Options of the command line over the environment over ``--swift-config`` over the section of a DeepSpeed
    configuration. Raises ConfigError for an unknown or bad option.
    """
    base = SwiftConfig.from_dict(section or {})
    if args.swift_config is not None:
        if not args.swift_config:
            raise ConfigError("--swift-config must name a YAML or JSON file of options")
        given_there = SwiftConfig.from_file(args.swift_config)
        base = given_there if section is None else SwiftConfig.from_dict(section).merged(given_there.changed)
    config = SwiftConfig.from_env(base=base)
    flags = {
        "on_failure": args.on_failure,
        "standby.prepared": args.prepared,
        "checkpoint.dir": args.checkpoint_dir,
        "checkpoint.resume": "always" if args.resume else None,
        "checkpoint.resume_from": args.resume_from,
        "watch.dashboard": args.dashboard,
        "watch.metrics_port": args.metrics_port,
        "watch.metrics_address": args.metrics_address,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if args.machines[0] < args.machines[1] and config.replaces and not config.resizes:
        given.setdefault("on_failure", "shrink")  # what --nnodes MIN:MAX means
    for name in ("checkpoint.dir", "checkpoint.resume_from"):
        if given.get(name):
            given[name] = absolute(given[name])
    return config.merged(given)


def check_folders(args: argparse.Namespace, config: SwiftConfig) -> None:
    """Raises ConfigError for an option whose folder or file cannot be there."""
    if config.checkpoint.history is not None:
        check_regular(f"checkpoint.history={config.checkpoint.history!r}", config.checkpoint.history)
    for option in ("checkpoint.dir", "checkpoint.resume_from"):
        if (where := config.get(option)) is not None:
            check_place(option, where)
            if "://" not in where:
                check_length(f"{option}={where!r}", where)
    if args.several or config.checkpoint.resume_from is None or config.checkpoint.dir is None:
        return
    # The next start continues with its own checkpoints; what it began with may be gone by then.
    try:
        there = any(open_storage(where).exists() for where in (config.checkpoint.resume_from, config.checkpoint.dir))
    except OSError as error:
        raise ConfigError(
            f"checkpoint.resume_from={config.checkpoint.resume_from!r} cannot be read: {error}"
        ) from error
    if not there:
        raise ConfigError(f"checkpoint.resume_from={config.checkpoint.resume_from!r}: there is no such folder")


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
