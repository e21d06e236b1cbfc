"""The benchmark of undo: its rows, and that the way it compares with is exact too."""

from __future__ import annotations

import pytest
import torch

from benchmarks import undo
from benchmarks.undo_residuals import apply, residual, residual_rows


def test_rows_of_one_optimizer() -> None:
    rows = {row.metric: row for row in undo.measure("SGD momentum", "foreach", 1, 1, 2.0)}
    assert rows["memory of undo"].value == pytest.approx(8.0)
    assert rows["bits as before the step after undo (1 = all)"].holds is True
    # 8.4 MB at 2 GB/s
    assert rows["fetching the state from a replica instead (at the measured rate)"].value == pytest.approx(
        4.2, rel=0.01
    )
    assert all(row.value is not None and row.value > 0 for row in rows.values())


def test_residuals_keep_every_bit() -> None:
    old = torch.tensor([1.0, -0.0, float("nan"), 3e38, 1e-45, -2.0])
    old.view(torch.int32)[2] = -0x3EDCC
    guess = torch.tensor([1.0 + 2**-23, 0.0, 1.0, -3e38, float("-inf"), -2.0])
    kept = residual(old, guess)
    assert torch.equal(apply(guess, kept).view(torch.int32), old.view(torch.int32))
    assert kept.places.tolist() == [1, 2, 3, 4]
    rows = {row.metric: row for row in residual_rows(64, 2, 2)}
    assert rows["bits as before the step after undo (1 = all)"].holds is True
