"""``swiftctl lab plan-logging``: which machines of a pipeline restart together, so that messages between them need no
log."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from shared_core.cli.arguments import number, one_line
from shared_core.errors import ConfigError
from shared_core.kinds import open_regular
from shared_core.pipeline.grouping import Budget, ChainMachine, ChainProfile, GroupPlan, plan_groups, trade_off
from shared_core.report.text import columns, in_bytes, in_seconds


def add_command(commands: Any) -> None:
    """Add ``plan-logging`` to the commands of ``swiftctl lab``."""
    logging = commands.add_parser(
        "plan-logging",
        help="which machines of a pipeline restart together, so that messages between them need no log",
        description="Print the plan that keeps within a budget or, without one, the trade-off of storage and time.",
    )
    logging.add_argument(
        "file", metavar="PROFILE.json", type=Path, help="what was measured; see docs/design/plan_logging.md"
    )
    logging.add_argument(
        "--storage", metavar="BYTES", type=number(most=1e300), help="most that all logs together may take"
    )
    logging.add_argument(
        "--bandwidth", metavar="BYTES", type=number(most=1e300), help="most that they may grow by in a second"
    )
    logging.add_argument("--curve", action="store_true", help="print the trade-off too, with the plan marked by a star")
    logging.add_argument("--json", action="store_true", help="print JSON instead")
    logging.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        with open_regular(options.file) as file:
            profile = profile_of(json.loads(file.read()))
    except (OSError, ValueError, RecursionError) as error:
        print(
            f"swiftctl: cannot read {options.file}: {one_line(error)}; see docs/design/plan_logging.md", file=sys.stderr
        )
        return 1
    chosen = plan_groups(profile, Budget(options.storage, options.bandwidth))
    budgeted = options.storage is not None or options.bandwidth is not None
    plans = trade_off(profile) if options.curve or not budgeted else [chosen]
    if options.json:
        print(json.dumps([_plan_to_dict(one) for one in plans], indent=2), flush=True)
    else:
        print(format_plans(plans, chosen if budgeted else None), flush=True)
    return 0


def profile_of(values: Any) -> ChainProfile:
    """Build from plain data, as read from JSON. ConfigError for an unknown, missing or bad field."""
    data = dict(_known(ChainProfile, values, "profile"))
    for name in ("machines", "boundary_bytes", "steps_between_checkpoints"):
        if name not in data:
            raise ConfigError(f"a profile needs {name!r}")
    for name in ("machines", "boundary_bytes"):
        if not isinstance(data[name], list | tuple):
            raise ConfigError(f"{name} must be a list, got {data[name]!r}")
    machines = [_known(ChainMachine, one, "machine") for one in data["machines"]]
    if not all("compute_s" in one for one in machines):
        raise ConfigError("every machine needs 'compute_s'")
    data["machines"] = tuple(ChainMachine(**one) for one in machines)
    data["boundary_bytes"] = tuple(map(_integral, data["boundary_bytes"]))
    return ChainProfile(**data)


def _known(kind: type[ChainMachine] | type[ChainProfile], values: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"a {what} must be a mapping, got {values!r}")
    names = [field.name for field in fields(kind)]
    for name in values:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
            raise ConfigError(f"unknown field {name!r} of a {what}{hint}")
    return values


def _integral(value: Any) -> Any:
    """A whole number that JSON has as 8e8."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plan_to_dict(plan: GroupPlan) -> dict[str, object]:
    return asdict(plan) | {"logged": plan.logged}


def format_plans(plans: Sequence[GroupPlan], chosen: GroupPlan | None = None) -> str:
    """One row for each plan, ``chosen`` with a star. Replay is that of one step, expected over failures."""
    rows = [("logs kept", "logged a step", "replay of a step", "by the slowest group", "groups of machines")]
    for plan in plans:
        rows.append(
            (
                in_bytes(plan.storage_bytes),
                in_bytes(plan.bytes_a_step),
                in_seconds(plan.replay_s),
                in_seconds(plan.slowest_replay_s),
                format_groups(plan.groups) + (" *" if plan == chosen else ""),
            )
        )
    return columns(rows)


def format_groups(groups: Sequence[Sequence[int]]) -> str:
    """Groups of neighbours as text: ``0 1 2-4``."""
    return " ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)
