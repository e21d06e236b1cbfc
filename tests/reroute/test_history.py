"""What all survivors agree on after a loss, without processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shared_core.reroute.history import History
from shared_core.reroute.planner import plan
from shared_core.reroute.problem import Variant
from shared_core.reroute.schedule import Kind, Topology, Worker

TOPOLOGY = Topology(3, 2, 3)


def history() -> History:
    return History(lambda lost: plan(TOPOLOGY, lost, variant=Variant.DECOUPLED, ordered=True))


def change(past: History, generation: int, lost: Collection[Worker], at: Mapping[Worker, tuple[int, int]]) -> None:
    places = {f"{worker.pipeline}:{worker.stage}": list(place) for worker, place in at.items()}
    past.change({"generation": generation, "lost": [list(worker) for worker in lost], "at": places})


def test_who_had_the_sum_is_lost_after_the_one_whose_gradients_are_in_it() -> None:
    past, workers = history(), TOPOLOGY.workers()
    change(past, 0, (), dict.fromkeys(workers, (0, 0)))
    rows = past.begin(0).plan.schedule.rows
    summed, first, waits = Worker(0, 1), Worker(1, 1), Worker(2, 1)
    at = {worker: (0, len(rows[worker]) - 1) for worker in workers if worker != first} | {summed: (0, len(rows[summed]))}
    change(past, 1, [first], at)
    assert not any(one.pipeline == 1 for one in past.begin(0).plan.schedule.rows[waits] if one.kind is not Kind.OPT)
    change(past, 2, [summed, first], {worker: (0, 0) for worker in at if worker != summed})
    again = {(one.pipeline, one.micro_batch) for one in past.begin(0).plan.schedule.rows[waits] if one.kind is Kind.F}
    assert again == {(d, j) for d in (0, 1) for j in range(3)}
