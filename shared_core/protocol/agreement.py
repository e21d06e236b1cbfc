"""What the ranks of a generation agree on, as one of them sends it to all the others: a plan, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared_core.errors import RecoveryFailed
from shared_core.protocol.codec import Record, damaged, decode
from shared_core.protocol.members import wrong_members
from shared_core.protocol.plan import Plan


@dataclass(frozen=True)
class Agreed(Record):
    """What was decided for one generation: a plan, or ``failed``, why there is none."""

    plan: Plan | None
    failed: str = ""

    def plan_or_fail(self) -> Plan:
        """Raises RecoveryFailed if there is no plan."""
        if self.plan is None:
            raise RecoveryFailed(self.failed)
        return self.plan

    @classmethod
    def from_json(cls, raw: bytes | str, key: str, world_size: int) -> Agreed:
        """Inverse of :meth:`to_json`; raises DamagedRecord. ``key``: where it was in the store, for the message."""
        found: Agreed = decode(raw, cls, key)
        if (found.plan is None) != bool(found.failed):
            raise damaged(key, "it is not either a plan or why there is none")
        if found.plan is not None and (wrong := _wrong_in(found.plan, world_size)):
            raise damaged(key, wrong)
        return found


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
