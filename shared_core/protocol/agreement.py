"""What the ranks of a generation agree on, as one of them sends it to all the others: a plan, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from shared_core.errors import RecoveryFailed
from shared_core.protocol.codec import Count, damaged, decode
from shared_core.protocol.frontier import PerChannel, StepBoundary
from shared_core.protocol.members import wrong_members
from shared_core.protocol.plan import Plan, Transfer


@dataclass(frozen=True)
class Agreed:
    """What was decided for one generation: a plan, or ``failed``, why there is none."""

    plan: Plan | None
    failed: str = ""

    def plan_or_fail(self) -> Plan:
        """Raises RecoveryFailed if there is no plan."""
        if self.plan is None:
            raise RecoveryFailed(self.failed)
        return self.plan

    def to_json(self) -> str:
        plan = self.plan
        stored: _StoredPlan | None = None
        if plan is not None:
            stored = {
                "boundaries": [(rank, boundary) for rank, boundary in sorted(plan.boundaries.items())],
                "donors": sorted(plan.donors.items()),
                "transfers": [(each.source, each.destination, each.entries) for each in plan.transfers],
                "redo": {name: sorted(seqs) for name, seqs in plan.redo.items()},
                "received": plan.received,
                "leave": sorted(plan.leave),
                "copies": plan.copies,
                "newest": plan.newest,
                "oldest": plan.oldest,
                "logged": plan.logged,
            }
        return json.dumps({"failed": self.failed, "plan": stored}, separators=(",", ":"), default=vars)

    @classmethod
    def from_json(cls, raw: bytes | str, key: str, world_size: int) -> Agreed:
        """Inverse of :meth:`to_json`; raises DamagedRecord. ``key``: where it was in the store, for the message."""
        stored: _StoredAgreement = decode(raw, _StoredAgreement, key)
        found = stored["plan"]
        if (found is None) != bool(stored["failed"]):
            raise damaged(key, "it is not either a plan or why there is none")
        if found is None:
            return cls(None, stored["failed"])
        plan = Plan(
            boundaries=dict(found["boundaries"]),
            donors=dict(found["donors"]),
            transfers=tuple(Transfer(*each) for each in found["transfers"]),
            redo={name: set(seqs) for name, seqs in found["redo"].items()},
            received=found["received"],
            leave=frozenset(found["leave"]),
            copies=found["copies"],
            newest=found["newest"],
            oldest=found["oldest"],
            logged=found["logged"],
        )
        if wrong := _wrong_in(plan, world_size):
            raise damaged(key, wrong)
        return cls(plan)


class _StoredPlan(TypedDict):
    boundaries: list[tuple[Count, StepBoundary | None]]
    donors: list[tuple[Count, Count]]
    transfers: list[tuple[Count, Count, dict[str, list[Count]]]]
    redo: dict[str, list[Count]]
    received: dict[str, PerChannel]
    leave: list[Count]
    copies: bool
    newest: Count
    oldest: Count
    logged: bool


class _StoredAgreement(TypedDict):
    failed: str
    plan: _StoredPlan | None


def _wrong_in(plan: Plan, world_size: int) -> str:
    """What is wrong in a plan of the right shape; empty if nothing is."""
    if most := [rank for rank in _ranks(plan) if rank >= world_size]:
        return f"plan names rank {max(most)}, and there are {world_size}"
    for boundary in plan.boundaries.values():
        for name, ranks in boundary.members.items() if boundary is not None else ():
            if wrong := wrong_members(ranks, world_size):
                return f"the members of group {name!r} are {wrong}"
    return ""


def _ranks(plan: Plan) -> Iterator[int]:
    yield from (*plan.boundaries, *plan.donors, *plan.donors.values(), *plan.leave)
    for each in plan.transfers:
        yield from (each.source, each.destination)
