"""What a replacement's operations give before its join."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared_core.errors import Unsupported
from shared_core.worker.comm.startup import StartUp
from shared_core.worker.state.publications import RecordKey

OP: Any = SimpleNamespace(signature=("broadcast", ((3,), torch.int64)), results=[torch.zeros(3, dtype=torch.int64)])


def test_each_part_of_the_program_has_results_of_its_own() -> None:
    first, later = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    records = {RecordKey(-1, "w", "broadcast", 0): [first], RecordKey(-1, "w", "broadcast", 0, (1, 3, 0)): [later]}
    state: Any = SimpleNamespace(rank=1, in_startup=True, starting=True, entry=-1, part=(), records=records)
    startup = StartUp(state)
    assert startup.answer("w", OP, OP.results) == [first]
    state.part = (1, 3, 0)
    assert startup.answer("w", OP, OP.results) == [later]
    assert startup.answer("w", OP, OP.results) is OP.results  # the failed worker had not come to this one


def test_what_was_too_large_to_be_kept_is_an_error_in_a_replacement() -> None:
    records: dict[Any, list[torch.Tensor]] = {RecordKey(-1, "w", "broadcast", 0): []}
    state: Any = SimpleNamespace(rank=1, in_startup=True, starting=True, entry=-1, part=(), records=records)
    with pytest.raises(Unsupported, match=r"rank 1: .* broadcast .* \(24 bytes\).* at most 256 MiB"):
        StartUp(state).answer("w", OP, OP.results)
