"""The options of a job that ``swiftrun`` starts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from shared_core.checkpoint.storage import absolute, check_place, open_storage
from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError
from shared_core.kinds import check_length, check_regular


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
    """Can the folders and files of the options be there?

    Raises:
        ConfigError: one cannot.
    """
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
