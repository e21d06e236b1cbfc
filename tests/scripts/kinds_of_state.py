"""State of many kinds in plain attributes and variables, changed in each step, and used in the loss."""

from __future__ import annotations

import array
import collections
import dataclasses
import decimal
import fractions
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Row = collections.namedtuple("Row", "state reward")  # noqa: PYI024 (as scripts write it)
#: Changed by the steps of each framework.
SEEN: dict[str, float] = {}


@dataclasses.dataclass
class Meter:
    total: float = 0.0
    rows: list[Row] = dataclasses.field(default_factory=list)


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


def counter() -> Callable[[float], float]:
    total = 0.0

    def add(value: float) -> float:
        nonlocal total
        total += value
        return total

    return add


class State:
    """All kinds in one object."""

    made = 0

    def __init__(self, seed: int) -> None:
        self.buffer: collections.deque[Row] = collections.deque(maxlen=7)
        self.meter, self.slots, self.add = Meter(), Slots(), counter()
        self.bytes, self.array = bytearray(4), array.array("d", [0.0, 0.0])
        self.exact, self.third = decimal.Decimal(0), fractions.Fraction(0)
        self.meters = {"train": [Meter(), Meter()]}
        self.random, self.numpy = random.Random(seed), np.random.default_rng(seed)
        self.table, self.moving = np.zeros(3), torch.zeros(2)
        self.best: Any = None
        self.itself = self

    def step(self, value: float) -> None:
        """One more step."""
        row = Row(np.array([value, 1.0]), value)
        self.buffer.append(row)
        self.meter.total += value
        self.meter.rows.append(row)
        self.meters["train"][len(self.meter.rows) % 2].total += value
        self.slots.value += value
        self.bytes[len(self.meter.rows) % 4] += 1
        self.array[1] += value
        self.exact += decimal.Decimal("0.1")
        self.third += fractions.Fraction(1, 3)
        self.add(value)
        self.table[len(self.meter.rows) % 3] += value
        self.moving = 0.9 * self.moving + value
        if len(self.meter.rows) % 5 == 1:
            self.best = Meter(value)
        State.made += 1
        SEEN["last"] = value

    def factor(self) -> float:
        """What a loss is multiplied by, which depends on all of it."""
        parts = [len(self.buffer), self.meter.total, len(self.meter.rows), self.slots.value, sum(self.bytes)]
        parts += [self.array[1], float(self.exact), float(self.third), self.add(0.0), State.made, len(SEEN)]
        parts += [self.meters["train"][0].total, self.random.random(), float(self.numpy.random()), self.table.sum()]
        parts += [float(self.moving.sum()), 0.0 if self.best is None else self.best.total, self.itself is self]
        parts += [sum(float(row.state.sum()) + row.reward for row in self.buffer)]
        return 1.0 + 0.01 * float(np.tanh(sum(map(float, parts))))

    def plain(self) -> list[Any]:
        """All of it as plain data."""
        return [
            [[row.state.tolist(), row.reward] for row in (*self.buffer, *self.meter.rows)],
            [self.meter.total, self.slots.value, bytes(self.bytes), list(self.array), str(self.exact), str(self.third)],
            [self.add(0.0), State.made, dict(SEEN), self.random.random(), self.numpy.random(), self.table, self.moving],
            [[each.total for each in self.meters["train"]], None if self.best is None else self.best.total],
        ]
