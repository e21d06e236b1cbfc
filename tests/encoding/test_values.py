"""Attributes as plain data: whatever is state comes back equal and in place; what is none is left alone."""

from __future__ import annotations

import datetime
import importlib
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoded import same
from torch import nn

from shared_core.encoding.attributes import LARGE, Holder, Holders
from shared_core.encoding.plain import dumps, loads
from shared_core.encoding.values import NotPlain, assign, decode, encode
from shared_core.errors import CorruptFile


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


VALUES: list[Any] = [
    None,
    True,
    3,
    2.5,
    "text",
    b"bytes",
    1 + 2j,
    [1, [2, (3, "x")], {"k": {4, 5}}],
    (1, (2,)),
    {1: "a", (2, 3): [None]},
    OrderedDict(b=1, a=2),
    Counter("hello"),
    frozenset({1, 2}),
    datetime.timedelta(seconds=3),
    Path("/a/b"),
    Colour.RED,
    Level.LOW,
    torch.float16,
    torch.tensor(1.5),
    torch.tensor(7),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.tensor(float("nan")),
    torch.arange(6.0).view(2, 3),
    torch.tensor([True, False]),
    torch.zeros(0, 3),
    torch.randn(40, 40, generator=torch.Generator().manual_seed(0)),  # its value is in the name of the case
    np.arange(4, dtype=np.int16).reshape(2, 2),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__} {str(v)[:20]!r}")
def test_round_trip(value: Any) -> None:
    back = decode(loads(dumps(encode(value))))
    assert type(back) is type(value)
    if isinstance(value, torch.Tensor):
        assert back.dtype == value.dtype and back.shape == value.shape
    assert same(encode(back), encode(value))


@pytest.mark.parametrize(
    "value",
    [object(), print, nn.Linear(1, 1), nn.Parameter(torch.zeros(1)), [object()], torch.zeros(1, requires_grad=True)],
)
def test_what_is_no_state(value: Any) -> None:
    with pytest.raises(NotPlain):
        encode(value)


def test_a_loss_with_its_graph_is_kept_without_it() -> None:
    loss = (torch.ones(1, requires_grad=True) * 2).sum()
    assert float(decode(encode(loss))) == 2.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(1),
        lambda: np.random.default_rng(1),
        lambda: np.random.RandomState(1),
        lambda: random.Random(1),
    ],
)
def test_generators_are_put_back_in_place(make: Any) -> None:
    def draw(generator: Any) -> Any:
        if isinstance(generator, torch.Generator):
            return torch.rand(3, generator=generator).tolist()
        return (
            [generator.random() for _ in range(3)]
            if isinstance(generator, random.Random)
            else generator.random(3).tolist()
            if isinstance(generator, np.random.Generator)
            else generator.rand(3).tolist()
        )

    one, two = make(), make()
    draw(one)
    state = loads(dumps(encode(one)))
    expected = draw(one)
    assert assign(two, state) is two
    assert draw(two) == expected


def test_containers_keep_their_identity() -> None:
    history: list[int] = [1]
    table: defaultdict[str, int] = defaultdict(int, a=1)
    window: deque[int] = deque([1], maxlen=3)
    assert assign(history, encode([4, 5])) is history and history == [4, 5]
    assert assign(table, encode(defaultdict(int, b=2))) is table and table == {"b": 2} and table["new"] == 0
    assert assign(window, encode(deque([1, 2], maxlen=3))) is window and window.maxlen == 3


class Thing:
    def __init__(self) -> None:
        self.number: Any = 1
        self.thing: Any = None
        self.vocabulary = list(range(LARGE + 1))
        self.open = print


def test_attributes_that_come_go_and_change_kind() -> None:
    one, two = Thing(), Thing()
    source, target = Holder(one, frozenset()), Holder(two, frozenset())
    one.number, one.late = "text", [1]  # type: ignore[attr-defined]
    one.open = "now plain"  # type: ignore[assignment]
    del one.thing
    names, values = loads(dumps(source.capture()))
    assert "vocabulary" not in names, "large containers that exist from the start are constant data"
    target.restore((names, values))
    assert two.number == "text" and two.late == [1] and two.open == "now plain"  # type: ignore[attr-defined]


def test_user_objects_that_hang_on_a_module() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.thing = Thing()
            self.colour = Colour.RED

    one, two = Module(), Module()
    ignore = frozenset(vars(nn.Module()))
    source, target = Holders({"": one}, ignore), Holders({"": two}, ignore)
    one.thing.number = 5
    one.thing = Thing()  # another object in its place
    one.thing.number = 6
    target.restore(loads(dumps(source.capture())))
    assert two.thing.number == 6
    assert Colour.RED.value == "red" and Colour("red") is Colour.RED


def test_no_module_is_imported_because_data_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither itself nor by what looks a name up in a module that is there."""
    (tmp_path / "never_imported.py").write_text("raise SystemExit('imported')")
    (tmp_path / "lazy_names.py").write_text("def __getattr__(name): raise SystemExit(f'{name} was asked for')")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("lazy_names")
    for module in ("never_imported", "lazy_names", "this"):
        with pytest.raises(CorruptFile, match="cannot be made again"):
            decode(("\0enum", module, "X", "Y"))
    assert "never_imported" not in sys.modules and "this" not in sys.modules


@pytest.mark.parametrize("name", ["mro", "__class__", "nothing"])
def test_only_members_of_an_enumeration_are_taken(name: str) -> None:
    with pytest.raises(CorruptFile):
        decode(("\0enum", Colour.__module__, Colour.__qualname__, name))
    with pytest.raises(CorruptFile):
        decode(("\0enum", "os", "environ", "X"))
