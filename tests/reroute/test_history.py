"""What all survivors agree on after a loss, without processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from shared_core.reroute.ahead import Plans
from shared_core.reroute.history import History
from shared_core.reroute.problem import Variant
from shared_core.reroute.schedule import Kind, Topology, Worker

TOPOLOGY = Topology(3, 2, 3)


def history(folder: Path) -> History:
    return History(Plans(TOPOLOGY, Variant.DECOUPLED, True, folder, 0))


def change(past: History, generation: int, lost: Collection[Worker], at: Mapping[Worker, tuple[int, int]]) -> None:
    places = {f"{worker.pipeline}:{worker.stage}": list(place) for worker, place in at.items()}
    gone = [list(worker) for worker in lost]
    past.change({"generation": generation, "lost": gone, "ready": False, "at": places})


def test_who_had_the_sum_is_lost_after_the_one_whose_gradients_are_in_it(tmp_path: Path) -> None:
    past, workers = history(tmp_path), TOPOLOGY.workers()
    change(past, 0, (), dict.fromkeys(workers, (0, 0)))
    rows = past.begin(0).plan.schedule.rows
    summed, first, waits = Worker(0, 1), Worker(1, 1), Worker(2, 1)
    at = {worker: (0, len(rows[worker]) - 1) for worker in workers if worker != first}
    at[summed] = 0, len(rows[summed])
    change(past, 1, [first], at)
    assert not any(one.pipeline == 1 for one in past.begin(0).plan.schedule.rows[waits] if one.kind is not Kind.OPT)
    change(past, 2, [summed, first], {worker: (0, 0) for worker in at if worker != summed})
    again = {(one.pipeline, one.micro_batch) for one in past.begin(0).plan.schedule.rows[waits] if one.kind is Kind.F}
    assert again == {(d, j) for d in (0, 1) for j in range(3)}
