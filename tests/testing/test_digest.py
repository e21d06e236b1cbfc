"""Digests: equal bits, equal digest; any other difference shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.digest import digest, training_digest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (np.zeros(2), np.zeros(2, np.float32)),
        (1, 1.0),
        (1, True),
        ("1", 1),
        (["ab", "c"], ["a", "bc"]),
        ([[1], 2], [[1, 2]]),
        ({"a": 1}, {"b": 1}),
        (b"a", "a"),
        (None, "None"),
        (0.1 + 0.2, 0.3),
    ],
)
def test_differences_show(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        torch.tensor([float("nan"), 1.0]),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.zeros(4, 4).t()[1:],
        np.float32(3),
        {"x": [1, (2, None)], "y": {"z": b"ab"}},
        {3, 1, 2},
    ],
)
def test_the_same_bits_have_the_same_digest(value: Any) -> None:
    copy = value.clone() if isinstance(value, torch.Tensor) else value
    assert digest(value) == digest(copy)
    assert len(digest(value)) == 16


def test_unknown_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot digest a object"):
        digest(object())


def test_each_part_of_training_has_its_own_digest() -> None:
    def build(steps: int = 2, momentum: float = 0.0, metric: float = 1.0) -> dict[str, str]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(net.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        for _ in range(steps):
            net(torch.ones(5, 3)).sum().backward()
            optimizer.step()
            scheduler.step()
        if momentum:
            net[1].running_mean.add_(momentum)
        return training_digest(net, [optimizer], [scheduler], {"loss": metric})

    same, again = build(), build()
    assert same == again

    def differing(other: dict[str, str]) -> set[str]:
        return {part for part in same if same[part] != other[part]}

    assert differing(build(metric=2.0)) == {"metrics", "all"}
    assert differing(build(momentum=1.0)) == {"buffers", "all"}
    assert differing(build(steps=3)) >= {"parameters", "optimizers", "schedulers", "all"}
