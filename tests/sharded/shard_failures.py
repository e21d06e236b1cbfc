"""Failures that strike a sharded job whatever has divided its model: how many workers, and what fails."""

from __future__ import annotations

from shared_core.faults import ANY_STEP, Fault

#: Two epochs have six batches and seven boundaries each, the last one for the end.
EVERYWHERE: dict[str, tuple[int, list[Fault]]] = {
    "all_but_one": (4, [Fault(rank, 4, "update.before", "SIGKILL") for rank in (0, 1, 2)]),
    "one_rank_again": (2, [Fault(1, step, "forward", "SIGKILL", incarnation=n) for n, step in enumerate((3, 4, 10))]),
    "the_replacement": (
        4,
        [Fault(1, 4, "update.before", "SIGKILL"), Fault(1, ANY_STEP, "join", "SIGKILL", incarnation=1)],
    ),
    "a_survivor_in_the_recovery": (
        4,
        [Fault(1, 4, "forward", "SIGKILL"), Fault(2, ANY_STEP, "recovery.exchanged", "SIGKILL")],
    ),
    "stopped": (2, [Fault(1, 3, "collective.before", "SIGSTOP", nth=5)]),
    "in_the_update": (4, [Fault(1, 5, "update.during", "SIGKILL", nth=20)]),
    "before_the_first_batch": (2, [Fault(1, 0, "startup", "SIGKILL")]),
}
