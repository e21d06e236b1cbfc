"""Ranks of a machine keep the parameters before an update together: failures in an update change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Jobs
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.faults import Fault
from shared_core.worker.state.shared_images import SharedImages
from tests.support.runner import Mismatch

SCRIPT = "kept_parameters.py"


def killed(*ranks: int) -> dict[str, Any]:
    """Killed right after the update of batch 3, when the others have made it."""
    faults = [Fault(rank, 4, "update.after", "SIGKILL") for rank in ranks]
    return {"faults": faults, "args": ["--late", *map(str, ranks)]}


def test_those_that_fail_compute_with_the_parameters_before_the_update(jobs: Jobs) -> None:
    """Only one rank is left of the four that kept a part each."""
    assert not jobs.check(SCRIPT, nproc=4, **killed(0, 1, 3)).kinds("restart")


def test_inside_the_update(jobs: Jobs) -> None:
    faults = [Fault(1, 4, "update.during", "SIGKILL", nth=5), Fault(2, 6, "update.before", "SIGKILL")]
    assert not jobs.check(SCRIPT, nproc=4, faults=faults).kinds("restart")


@pytest.mark.nightly
def test_the_replacement_fails_in_the_same_batch(jobs: Jobs) -> None:
    case = killed(1)
    case["faults"].append(Fault(1, 4, "forward", "SIGKILL", incarnation=1))
    assert not jobs.check(SCRIPT, nproc=4, **case).kinds("restart")


@pytest.mark.nightly
def test_two_models_that_are_updated_in_turn(jobs: Jobs) -> None:
    case = killed(1)
    case["faults"][0] = Fault(1, 4, "update.after", "SIGKILL", nth=2)
    assert not jobs.check(SCRIPT, nproc=4, faults=case["faults"], args=[*case["args"], "--two"]).kinds("restart")


@pytest.mark.parametrize(("what", "then"), [("none", "seen"), ("spoilt", "ReplayDivergence")])
def test_control_without_them_other_bits(what: str, then: str, jobs: Jobs) -> None:
    """The jobs above need what is kept, and take it from the parts of all ranks. Wrong ones are noticed."""
    case = killed(1)
    with pytest.raises(Mismatch, match=then):
        jobs.check(SCRIPT, nproc=4, faults=case["faults"], args=[*case["args"], "--sabotage", what])


def test_where_a_part_is_missing_each_rank_keeps_all(jobs: Jobs) -> None:
    case = killed(1)
    result = jobs.check(SCRIPT, nproc=4, faults=case["faults"], args=[*case["args"], "--sabotage", "missing"])
    assert not result.kinds("restart")


def test_where_a_part_has_gone_all_start_again(jobs: Jobs) -> None:
    case = killed(1)
    result = jobs.run(SCRIPT, nproc=4, faults=case["faults"], args=[*case["args"], "--sabotage", "removed"])
    assert len(result.kinds("restart")) == 1, result.tail()


# -- the parts ---------------------------------------------------------------------------------------


def ranks_of(folder: Path, size: int, parameters: dict[int, torch.Tensor]) -> list[SharedImages]:
    made = [SharedImages(folder, 0, rank, size) for rank in range(size)]
    for rank, each in enumerate(made):
        (folder / f"rank{rank}" / "attempt0").mkdir(parents=True, exist_ok=True)
        each.attach(parameters)
    return made


def random_parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> dict[int, torch.Tensor]:
    return {3 * i: torch.randn(shape).to(dtype) for i, shape in enumerate(shapes)}


def by_place(parameters: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    return [parameters.get(place, torch.zeros(0)) for place in range(max(parameters) + 1)]


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.sampled_from([(), (1,), (7,), (0,), (70, 50), (4096,), (3, 5000)]), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.integers(2, 5),
)
def test_parts_of_all_ranks_are_the_parameters(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], dtype: torch.dtype, size: int
) -> None:
    folder, parameters = tmp_path_factory.mktemp("job"), random_parameters([(2, 2), *shapes], dtype)
    ranks = ranks_of(folder, size, parameters)
    for each in ranks:
        each.put(5, 5, by_place(parameters))
    image = ranks[0].complete(5, parameters)
    assert image is not None
    assert ranks[0].complete(4, parameters) is None and ranks[0].complete(5, [1]) is None
    before = {place: tensor.clone() for place, tensor in parameters.items()}
    for tensor in parameters.values():
        tensor.add_(1)
    found = image.read()
    assert found.keys() == before.keys()
    for place, tensor in before.items():
        assert found[place].shape == tensor.shape and torch.equal(found[place], tensor)


@pytest.mark.parametrize(
    "other", [torch.zeros(8, 8).t()[:4], torch.zeros(4, 4, device="meta")], ids=["not contiguous", "not on the CPU"]
)
def test_other_tensors_are_not_shared(tmp_path: Path, other: torch.Tensor) -> None:
    ranks = ranks_of(tmp_path, 2, {0: torch.zeros(4), 1: other})
    for each in ranks:
        each.put(1, 1, [torch.zeros(4), other])
    assert ranks[0].complete(1, [0]) is None


def test_without_room_for_one_part_nothing_is_complete(tmp_path: Path) -> None:
    parameters = random_parameters([(64, 256)], torch.float32)
    ranks = ranks_of(tmp_path, 2, parameters)
    (tmp_path / "rank1" / "attempt0").rmdir()
    for each in ranks:
        each.put(1, 1, by_place(parameters))
    assert ranks[0].complete(1, [0]) is None
