"""Both ends of a pipeline fail, whose data any worker can read: nobody waits for a replacement,
and no bit differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from harness import Jobs
from rerouted import go, kill
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shared_core.errors import Unsupported
from shared_core.faults import Fault

pytest.importorskip("deepspeed")

#: Replacements are withheld.
WITHHELD = {"SWIFT_RECOVERY_REROUTE_REJOIN_AFTER_S": "600"}


#: Arguments, number of workers, faults. Ranks 0 and 2 of four are a pipeline, of six ranks 0 and 3.
CASES: dict[str, tuple[Sequence[str], int, list[Fault]]] = {
    "in_a_step": (("--clip", "1.0"), 4, [kill(0, 3, 2), kill(2, 3, 2)]),
    "one_stage_is_ahead": ((), 4, [kill(2, 5), kill(0, 4, 1, "reroute.reduce", after=0)]),
    "who_reads_fails": ((), 6, [kill(0, 3, 2), kill(3, 3, 2), kill(1, 5, 3)]),
    "before_an_evaluation": (("--evaluate-after", "4"), 4, [kill(0, 3, 2), kill(2, 3, 2)]),
    "in_an_evaluation": (
        ("--evaluate-after", "3"),
        4,
        [kill(0, 4, 1, "reroute.evaluate"), kill(2, 4, 2, "reroute.evaluate")],
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_nobody_waits_for_the_ends_of_a_pipeline(jobs: Jobs, name: str) -> None:
    args, nproc, faults = CASES[name]
    result = go(jobs, faults, ("--shared", *args), nproc, WITHHELD)
    assert len(result.struck) == len(faults) and result.reports.keys().isdisjoint(f.rank for f in faults), result.tail()
    assert not result.kinds("restart") and not result.kinds("admitted"), result.tail()


@pytest.mark.nightly
def test_replacements_of_the_ends_come_later(jobs: Jobs) -> None:
    args = ("--shared", "--steps", "12", "--sum-after", "11")
    result = go(jobs, [kill(0, 3, 2), kill(2, 3, 2)], args)
    assert {event.rank for event in result.kinds("admitted")} == {0, 2} and len(result.reports) == 4, result.tail()


def test_each_pipeline_gets_what_the_others_read_for_it() -> None:
    from shared_core.pipeline import SharedData

    rows = TensorDataset(torch.arange(42.0))

    def of(pipeline: int, pipelines: int = 3) -> SharedData:
        sampler: DistributedSampler[object] = DistributedSampler(rows, pipelines, pipeline)
        grid = SimpleNamespace(data_parallel_size=3, get_data_parallel_rank=lambda: pipeline)
        return SharedData(DataLoader(rows, 4, sampler=sampler), SimpleNamespace(grid=grid))

    drawn = [[next(data)[0] for _ in range(10)] for data in map(of, range(3))]
    anybody = of(1)
    for number in (9, 0, 1, 2, 8):  # an epoch has four batches
        for pipeline in range(3):
            assert torch.equal(anybody.read(pipeline, number)[0], drawn[pipeline][number])
    assert len(torch.cat([torch.cat(each[:4]) for each in drawn]).unique()) == 42
    with pytest.raises(Unsupported, match="SharedData needs data|divides the data among 2 ranks"):
        of(0, pipelines=2)
