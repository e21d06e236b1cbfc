"""The commands of ``swiftctl lab``: plan, compare and simulate, without a job."""

from __future__ import annotations

from typing import Any

from benchmarks.lab import plan, plan_logging, policy, simulate


def add_commands(commands: Any) -> None:
    """Add them to the parsers of ``swiftctl lab``."""
    for command in (plan, plan_logging, simulate, policy):
        command.add_command(commands)
