"""The groups that the program has made, as state of a step boundary.

A group is named by how many were made before it, and a replacement has made those of the start-up only. At its step
boundary it makes the others that are still there, under their names, and counts on from where the failed worker was.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from shared_core.worker.comm import compat
from shared_core.worker.comm.group import SwiftProcessGroup
from shared_core.worker.comm.runtime import Runtime


class MadeGroups:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def capture(self) -> dict[str, Any]:
        """Plain data: the number of the next group, how often each name was given, and the groups that are there."""
        runtime = self._runtime
        groups = [
            [name, list(group.ranks), group.timeout.total_seconds(), desc]
            for name, group, desc in _there()
            if group is not runtime.world
        ]
        with runtime.lock:
            return {"next": compat.groups_made(), "given": dict(runtime.groups.given), "groups": groups}

    def restore(self, captured: dict[str, Any], *, missing: bool) -> None:
        """Make the groups of ``captured`` that are missing and have this rank, and count on from there. With
        ``missing`` False it makes none, for another number of ranks.
        """
        runtime, given = self._runtime, captured["given"]
        there = {name for name, _, _ in _there()}
        wanted = [each for each in captured["groups"] if each[0] not in there and runtime.rank in each[1]]
        with runtime.generations.in_the_background():
            for name, ranks, timeout_s, desc in wanted if missing else ():
                with runtime.lock:
                    runtime.groups.given[name] = given[name] - 1
                compat.make_group(name, ranks, timedelta(seconds=timeout_s), desc)
        with runtime.lock:
            dict.update(runtime.groups.given, given)  # a Counter's own would add
        compat.name_groups_from(captured["next"])


def _there() -> list[tuple[str, Any, str]]:
    """torch's name of each group, its state, and its description."""
    return [
        (compat.group_name(group), group._state, group.group_desc)
        for group in compat.groups_there()
        if isinstance(group, SwiftProcessGroup)
    ]
