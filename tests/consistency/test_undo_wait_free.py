"""An update overlapped with backward gives plain DDP's bits; cut off, it is taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs

SCRIPT = str(Path(__file__).parent / "scripts" / "wait_free.py")


@pytest.mark.parametrize("nproc", [2, 3])
def test_the_result_is_plain_ddps(jobs: Jobs, nproc: int) -> None:
    result = jobs.run(SCRIPT, nproc=nproc, launcher="plain")
    assert result.status == 0, result.tail()
    assert len(result.reports) == nproc
    for rank, report in result.reports.items():
        cases = report["extra"]["results"]
        differs = [case for case, (plain, overlapped) in cases.items() if plain != overlapped]
        assert not differs, f"rank {rank}: {differs}"
        assert len({plain for plain, _ in cases.values()}) > len(cases) / 2, "most cases differ from each other"


def test_a_backward_pass_that_is_cut_off_is_taken_back_and_misuse_is_refused(jobs: Jobs) -> None:
    result = jobs.run(SCRIPT, launcher="plain", args=["--mistakes"])
    assert result.status == 0, result.tail()
    for report in result.reports.values():
        results = report["extra"]["results"]
        partial, messages = results["partial"], results["messages"]
        assert set(partial["versions"]) == {3, 4}, "some parameters had their update, some had not"
        assert partial["versions"][0] == 3 and partial["versions"][-1] == 4
        assert partial["torn"] and partial["back"]
        assert partial["count"] == partial["versions"].count(4) and partial["again"] == 0
        assert "was changed after backward (clipped, unscaled?)" in messages["clipped"]
        assert "was changed after backward" in messages["replaced"]
        assert "a second backward pass before optimizer.step()" in messages["twice"]
        assert "the update has failed" in messages["broken"]
        assert "does not work with DistributedDataParallel(find_unused_parameters=...)" in messages["unused"]
        assert "does not work with DistributedDataParallel(static_graph=...)" in messages["static"]
        assert "Own is not one of torch.optim" in messages["foreign"]
