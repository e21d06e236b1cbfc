"""What the variables of a random program may be, how a step changes them, and what a failure takes of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of variable; ``{x}`` in its texts is how the program reads and writes it, ``{net}`` its network.

    Attributes:
        first: expression of the first value.
        change: statements of a step; ``v`` is the step's loss as a number, ``i`` the number of the batch.
        number: expression of a number that depends on it.
        registers: ``job.register`` takes such a value by name.
        attribute: it may be an attribute of a module.
        on_callback: it may be one of a callback.
    """

    first: str
    change: tuple[str, ...]
    number: str
    registers: bool = True
    attribute: bool = True
    on_callback: bool = True


KINDS: dict[str, Kind] = {
    "count": Kind("0", ("{x} += 1",), "{x}"),
    "total": Kind("0.0", ("{x} += v",), "{x}"),
    "best": Kind("9.0", ("{x} = min({x}, v)",), "{x}"),
    "losses": Kind("[]", ("{x}.append(v)",), "sum({x})"),
    "table": Kind("{{}}", ("{x}[i % 3] = {x}.get(i % 3, 0.0) + v",), "sum({x}.values())"),
    "nested": Kind(
        "{{'a': [0.0], 'n': {{'b': 0}}}}",
        ("{x}['a'].append(v)", "{x}['n']['b'] += 1"),
        "sum({x}['a']) + {x}['n']['b']",
    ),
    "pair": Kind("(0, 0.0)", ("{x} = ({x}[0] + 1, v)",), "{x}[0] + {x}[1]"),
    "text": Kind("''", ("{x} += chr(97 + int(v * 1e4) % 26)",), "len({x})"),
    "smooth": Kind("torch.zeros(3)", ("{x} = 0.9 * {x} + v",), "float({x}.sum())"),
    "window": Kind("deque(maxlen=3)", ("{x}.append(v)",), "sum({x})", registers=False),
    "seen": Kind("set()", ("{x}.add(int(v * 1e4) % 17)",), "len({x})", registers=False),
    "rows": Kind(
        "deque(maxlen=4)", ("{x}.append(Row(i, v))",), "sum(row.loss * row.step for row in {x})", registers=False
    ),
    "raw": Kind("bytearray()", ("{x}.append(int(v * 1e4) % 251)",), "sum({x})", registers=False),
    "numbers": Kind("array('d')", ("{x}.append(v)",), "sum({x})", registers=False),
    "exact": Kind("Decimal(0)", ("{x} += Decimal(int(v * 1e4)) / 7",), "float({x})", registers=False),
    "part": Kind("Fraction(0)", ("{x} += Fraction(int(v * 1e4), 9973)",), "float({x})", registers=False),
    "point": Kind("Point()", ("{x}.x += v", "{x}.seen.append(i)"), "{x}.x + len({x}.seen)", registers=False),
    "meter": Kind("Meter()", ("{x}.update(v)",), "{x}.mean", registers=False),
    "meters": Kind("[Meter(), Meter()]", ("{x}[i % 2].update(v)",), "{x}[0].mean + {x}[1].mean", registers=False),
    "dice": Kind("random.Random(5)", ("{x}.random()",), "{x}.getstate()[1][-1]", registers=False, attribute=False),
    "coin": Kind(
        "torch.Generator().manual_seed(9)",
        ("torch.rand(1, generator={x})",),
        "{x}.get_state().sum().item() % 97",
        registers=False,
        attribute=False,
    ),
    "draws": Kind(
        "np.random.default_rng(4)",
        ("{x}.random()",),
        "{x}.bit_generator.state['state']['state'] % 97",
        registers=False,
        attribute=False,
    ),
    "average": Kind(
        "[each.detach().clone() for each in {net}.parameters()]",
        (
            "for mean, each in zip({x}, {net}.parameters()):",
            "    mean.mul_(0.9).add_(each.detach(), alpha=0.1)",
        ),
        "{x}[0].sum().item()",
        registers=False,
        on_callback=False,
    ),
    "draw": Kind("random.Random(6).random", ("{x}()",), "{x}.__self__.getstate()[1][-1]", registers=False),
    "append": Kind("[].append", ("{x}(v)",), "sum({x}.__self__)", registers=False),
    "grid": Kind("np.zeros(20000)", ("{x}[7000 + 3 * i] += v",), "float({x}.sum())", registers=False),
    "tick": Kind("made_tick()", ("{x}(v)",), "{x}(0.0)", registers=False, attribute=False),
    "tally": Kind("Counter()", ("{x}[int(v * 1e4) % 5] += 1",), "max({x}.values(), default=0)", registers=False),
    "groups": Kind("defaultdict(list)", ("{x}[i % 2].append(v)",), "sum(map(sum, {x}.values()))", registers=False),
    "by_name": Kind(
        "{{'a': [], 'b': deque(maxlen=2)}}",
        ("{x}['a'].append(v)", "{x}['b'].append((i, v))"),
        "sum({x}['a']) + sum(row[1] for row in {x}['b'])",
        registers=False,
    ),
    "slotted": Kind("Slotted(0)", ("{x}.add(v)",), "{x}.total + {x}.count", registers=False),
    "heap": Kind("[]", ("heapq.heappush({x}, (v, i))",), "min({x}, default=(0.0,))[0]", registers=False),
    "ordered": Kind(
        "OrderedDict()",
        ("{x}[i % 3] = v", "{x}.move_to_end(min({x}))"),
        "sum({x}.values())",
        registers=False,
    ),
    "alias": Kind("[[0.0]] * 2", ("{x}[0][0] += v",), "{x}[1][0]", registers=False),
    "loop": Kind("made_loop()", ("{x}['me']['n'] += v",), "{x}['n']", registers=False),
    "frozen": Kind("Frozen(0.0, ())", ("{x} = {x}.then(v)",), "{x}.last + len({x}.all)", registers=False),
    "mode": Kind("Mode.LOW", ("{x} = Mode.HIGH if v > 0.5 else Mode.LOW",), "{x}.value", registers=False),
    "numbering": Kind("itertools.count(3)", ("next({x})",), "int(repr({x})[6:-1])", registers=False),
    "legacy": Kind(
        "np.random.RandomState(8)", ("{x}.rand()",), "int({x}.get_state()[2])", registers=False, attribute=False
    ),
    "lines": Kind("''", ("{x} = '%s|%d:%.4f' % ({x}[-40:], i, v)",), "len({x})"),
    "halves": Kind("None", ("Slotted.made += v",), "Slotted.made", registers=False),
    "kept_tensors": Kind(
        "deque(maxlen=2)",
        ("{x}.append(torch.full((2,), v))",),
        "sum(each.sum().item() for each in {x})",
        registers=False,
    ),
    "memo": Kind("remember", ("{x}(i, v)",), "len({x}.seen)", registers=False, attribute=False),
    "tree": Kind("Node(0.0)", ("{x}.grow(v)",), "{x}.sum()", registers=False),
    "shared": Kind("None", ("Shared.total += v",), "Shared.total", registers=False),
    "module": Kind("None", ("globals()['TOTAL'] += v",), "TOTAL", registers=False),
}

#: What the kinds need, and how a program says what it holds at its end.
PRELUDE = """
import hashlib
import heapq
import itertools
import json
import os
import random
import warnings
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import chain, cycle, islice
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

warnings.filterwarnings("ignore")
RANK = int(os.environ["RANK"])
TOTAL = 0.0
Row = namedtuple("Row", "step loss")


class Shared:
    total = 0.0


@dataclass
class Point:
    x: float = 0.0
    seen: list = field(default_factory=list)


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1

    @property
    def mean(self):
        return self.sum / max(self.count, 1)


class Slotted:
    __slots__ = ("total", "count", "rest")
    made = 0.0

    def __init__(self, total):
        self.total, self.count = total, 0

    def add(self, value):
        self.total += value
        self.count += 1
        if self.count % 2:
            self.rest = [value]
        else:
            del self.rest


@dataclass(frozen=True)
class Frozen:
    last: float
    all: tuple

    def then(self, value):
        return Frozen(value, (*self.all[-3:], value))


class Mode(Enum):
    LOW = 1
    HIGH = 2


class Node:
    def __init__(self, value, parent=None):
        self.value, self.parent, self.children = value, parent, []

    def grow(self, value):
        place = self
        while len(place.children) > 1:
            place = place.children[int(value * 1e4) % 2]
        place.children.append(Node(value, place))

    def sum(self):
        return self.value + sum(child.sum() for child in self.children)


def remember(key, value):
    remember.seen[key] = value


remember.seen = {}


def made_loop():
    found = {"n": 0.0}
    found["me"] = found
    return found


def made_tick():
    count = 0.0

    def tick(value):
        nonlocal count
        count += value
        return count

    return tick


def plain(value, depth=0):
    if depth > 8:
        return "deeper"
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).tolist()]
    if isinstance(value, dict):
        return [[str(key), plain(each, depth + 1)] for key, each in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple, deque, array)):
        return [plain(each, depth + 1) for each in value]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, torch.Generator):
        return plain(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if getattr(value, "__self__", None) is not None and not isinstance(value, type):
        return plain(value.__self__, depth + 1)  # what a method is bound to
    if callable(value) and getattr(value, "__closure__", None):
        return [plain(cell.cell_contents, depth + 1) for cell in value.__closure__]
    if hasattr(value, "__slots__") and not isinstance(value, type):
        return [[name, plain(getattr(value, name, None), depth + 1)] for name in value.__slots__]
    if value is remember:
        return plain(value.seen)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state()[1:3])
    if hasattr(value, "__dict__") and not isinstance(value, (type, Enum)):
        return plain(vars(value), depth + 1)
    return repr(value)


def say(text):
    os.write(1, (text + chr(10)).encode())  # at once: another process's line must not come between it and its end


def hold(**values):
    values |= {"Shared": Shared.total, "TOTAL": TOTAL, "made": Slotted.made}
    values |= {"torch": torch.get_rng_state(), "random": random.getstate()}
    values["numpy"] = np.random.get_state()[1].tolist()
    short = {}
    for name, value in values.items():
        text = json.dumps(plain(value))
        short[name] = text if len(text) < 120 else hashlib.sha256(text.encode()).hexdigest()
    path = f"held{RANK}.json"
    with open(path + ".new", "w") as file:
        json.dump(short, file)
    os.replace(path + ".new", path)
"""
