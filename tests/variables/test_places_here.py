"""Values in places that are easily forgotten are put back, or refused by name; in one process."""

from __future__ import annotations

import array
import contextlib
import contextvars
import datetime
import decimal
import dis
import enum
import functools
import gc
import locale
import logging
import os
import queue
import random
import re
import sqlite3
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_variables_here import both, steps
from torch import nn

from shared_core.worker.variables.kinds import attributes_stored
from shared_core.worker.variables.variables import Variables

CONTEXT, LOCAL = contextvars.ContextVar[int]("context"), threading.local()
_hidden = 0


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of other tests are no part of these scripts."""
    tests = str(Path(__file__).parents[1])
    for name, module in list(sys.modules.items()):
        if name != __name__ and str(getattr(module, "__file__", None)).startswith(tests):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("STAGE", "0")
    yield
    logging.root.setLevel(logging.WARNING)
    torch.set_float32_matmul_precision("highest")


def add(one: int, other: int) -> int:
    return one + other


def multiply(one: int, other: int) -> int:
    return one * other + 1


combine = add


class Only:
    _made: Only | None = None
    count = 0


@functools.lru_cache(2)
def registry(name: str) -> dict[int, int]:
    return {}


def of_a_thread(again: bool) -> Any:
    CONTEXT.set(0)
    LOCAL.total = 0
    for step in steps(again):
        CONTEXT.set(CONTEXT.get() + step)
        LOCAL.total += step
    return CONTEXT.get(), LOCAL.total


def with_an_underscore(again: bool) -> Any:
    global _hidden
    _hidden, Only._made = 0, None
    for step in steps(again):
        _hidden += step
        Only._made = Only._made or Only()
        Only._made.count += step
    return _hidden, Only._made and Only._made.count


def functions(again: bool) -> Any:
    global combine
    combine, rate, total = add, lambda step: step, 0
    for step in steps(again):
        if step == 2:
            combine, rate = multiply, lambda step: -step
        total = combine(total, rate(step))
    return total


def defined_again(again: bool) -> Any:
    global add
    first, total = add, 0
    for step in steps(again):
        if step == 2:
            add = multiply
        total = add(total, step)
    add = first
    return total


def classes_and_modules_of_a_function(again: bool) -> Any:
    class Here:
        count = 0

    settings = types.ModuleType("settings")
    settings.rate = 0
    for step in steps(again):
        Here.count += step
        settings.rate += 1
    return Here.count, settings.rate


def beside_tensors(again: bool) -> Any:
    variables, net, latent = Variables(0), nn.Linear(2, 2), torch.zeros(2, requires_grad=True)
    variables.attach([net], [])
    net.weight.count = 0
    for step in steps(again, variables=variables):
        net.weight.count += step
        net.bias.mean = getattr(net.bias, "mean_", torch.zeros(2)) * 0.5 + step
        net.bias.mean_ = net.bias.mean
        (latent * step).sum().backward()
    assert latent.grad is not None
    return net.weight.count, net.bias.mean_.tolist(), latent.grad.tolist()


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


def counting(factor: float) -> Callable[..., Any]:
    count = 0

    def hook(*given: Any) -> Any:
        nonlocal count
        count += 1
        return given[-1] * (1 + factor * count) if isinstance(given[-1], torch.Tensor) else None

    return hook


def what_only_hooks_hold(again: bool) -> Any:
    variables, net, loose = Variables(0), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    optimizer, seen = torch.optim.SGD(net.parameters(), 0.0), list[Any]()
    for module in (net[0], loose):
        nn.init.ones_(module.weight)
        module.register_forward_hook(functools.partial(counting(0.5)))
    net[0].bias.register_hook(counting(0.25))
    optimizer.register_step_post_hook(Counting().step)
    variables.attach([net], [optimizer])
    for step in steps(again, variables=variables):
        (net(torch.ones(1, 2)).sum() + loose(torch.ones(1, 2)).sum() * step).backward()
        optimizer.step()
        seen.append([net[0].bias.grad.tolist(), loose.weight.grad.tolist(), optimizer.param_groups[0]["weight_decay"]])
        optimizer.zero_grad()
        loose.zero_grad()
    return seen


class Counting:
    count = 0

    def step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.count += 1
        optimizer.param_groups[0]["weight_decay"] = self.count


def beside_what_is_attached(again: bool) -> Any:
    variables, net = Variables(0), nn.Sequential(nn.Linear(2, 2))
    optimizer, part = torch.optim.SGD(net.parameters(), 0.1), torch.utils.data.Subset([*range(9)], [0])
    variables.attach([net], [optimizer])
    variables.count_data_sets()
    things: list[Any] = [net, net[0], optimizer]
    things[2].seen = []
    for step in steps(again, variables=variables):
        for each in things:
            each.seen = [*getattr(each, "seen", []), step]
        things[1].mask = torch.ones(2) * step
        part.indices = [*part.indices, step]
    return [each.seen for each in things], things[1].mask.tolist(), part.indices


def a_class_that_only_its_objects_lead_to(again: bool) -> Any:
    def make() -> Any:
        class Here:
            count = 0

            def __init__(self) -> None:
                self.below: list[Any] = []

            def more(self) -> int:
                type(self).count += 1
                self.below.append(type(self)())
                return type(self).count

        return Here()

    here = make()
    for _ in steps(again):
        here.more()
    return here.count, len(here.below), {type(each) is type(here) for each in here.below}


def memory_that_others_show(again: bool) -> Any:
    raw = bytearray(8)
    shown, array = memoryview(raw), np.frombuffer(raw, np.uint8)
    for step in steps(again):
        raw[step] = shown[0] = step
    return raw, bytes(shown), array.tolist()


def settings_of_the_process(again: bool) -> Any:
    logger, pattern = logging.getLogger("own"), re.compile("a")
    logger.setLevel(logging.INFO)
    for step in steps(again):
        if step == 2:
            os.environ["STAGE"], os.environ["NEW"] = "1", "x"
            torch.set_float32_matmul_precision("medium")
            logger.setLevel(logging.ERROR)
            logging.root.setLevel(logging.ERROR)
            pattern = re.compile("b")
    found = os.environ["STAGE"], os.environ.pop("NEW"), torch.get_float32_matmul_precision(), pattern.pattern
    os.environ["STAGE"] = "0"
    torch.set_float32_matmul_precision("highest")
    levels = logger.level, logging.root.level
    logging.root.setLevel(logging.WARNING)
    return *found, *levels


def printed_and_without_gradients(again: bool) -> Any:
    torch.set_printoptions(profile="default")
    seen = []
    for step in steps(again):
        if step == 2:
            torch.set_printoptions(precision=1)
            torch.set_grad_enabled(False)
            torch.set_autocast_enabled("cpu", True)
            torch.set_anomaly_enabled(True, False)
        anomalies = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        seen.append((str(torch.tensor(1 / 3)), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), anomalies))
    torch.set_anomaly_enabled(False)
    torch.set_printoptions(profile="default")
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    return seen


def settings_of_python(again: bool) -> Any:
    before = gc.get_threshold(), sys.getrecursionlimit(), sys.get_int_max_str_digits()
    locale.setlocale(locale.LC_ALL, "C")
    decimal.setcontext(decimal.Context())
    for step in steps(again):
        if step == 2:
            gc.disable()
            gc.set_threshold(800, 10, 10)
            sys.setrecursionlimit(3000)
            sys.set_int_max_str_digits(0)
            locale.setlocale(locale.LC_ALL, "C.UTF-8")
            decimal.getcontext().Emax, decimal.getcontext().traps[decimal.Inexact] = 77, True
    found = gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), sys.get_int_max_str_digits()
    choices = locale.setlocale(locale.LC_ALL), str(decimal.getcontext())
    gc.enable()
    gc.set_threshold(*before[0])
    sys.setrecursionlimit(before[1])
    sys.set_int_max_str_digits(before[2])
    locale.setlocale(locale.LC_ALL, "C")
    decimal.setcontext(decimal.Context())
    return *found, *choices


def what_is_given_to_libraries(again: bool) -> Any:
    torch.nn.Linear.calls = torch.seen = 0  # type: ignore[attr-defined]
    loader, twice = torch.utils.data.DataLoader([1]), lambda layer, x: x * 2
    loader.read = []  # type: ignore[attr-defined]
    plain, relu = nn.ReLU.forward, nn.ReLU()
    for step in steps(again):
        torch.nn.Linear.calls += step  # type: ignore[attr-defined]
        torch.seen += 1  # type: ignore[attr-defined]
        loader.read.append(step)  # type: ignore[attr-defined]
        if step == 2:
            nn.ReLU.forward = twice  # type: ignore[assignment, method-assign]
    found = torch.nn.Linear.calls, torch.seen, loader.read, relu(-1.0)  # type: ignore[attr-defined]
    nn.ReLU.forward = plain  # type: ignore[method-assign]
    return found


class Acts:
    def act(self, value: int) -> int:
        return value


def other_act(self: Acts, value: int) -> int:
    return -value


def methods_in_the_place_of_others(again: bool) -> Any:
    here, first, found = Acts(), Acts.act, []
    for step in steps(again):
        if step == 2:
            Acts.act = other_act  # type: ignore[method-assign]
        found.append(here.act(step))
    Acts.act = first  # type: ignore[method-assign]
    return found


def a_function_defined_again(again: bool) -> Any:
    def factor(step: int) -> int:
        return step

    total = 0
    for step in steps(again):
        if step == 2:

            def factor(step: int) -> int:
                return -step

        total += factor(step)
    return total


def weak_references(again: bool) -> Any:
    keep = [Only() for _ in range(9)]
    counts, by_step = weakref.WeakKeyDictionary[Only, int](), weakref.WeakValueDictionary[int, Only]()
    newest, gone, seen = weakref.ref(keep[0]), weakref.ref(keep[0]), weakref.WeakSet[Only]()
    for step in steps(again):
        counts[keep[step % 3]] = counts.get(keep[step % 3], 0) + step
        by_step[step] = keep[step]
        seen.add(keep[step])
        newest = weakref.ref(keep[1])
        if step == 2:
            gone = weakref.ref(Only())
    found = [counts.get(each) for each in keep], [keep.index(each) for each in by_step.values()], len(seen)
    return *found, newest() is keep[1], gone()


class Draws(random.Random):
    count = 0


def memory_seen_as_another_type(again: bool) -> Any:
    array, tensor, rows = np.zeros(4, np.float32), torch.zeros(4), np.zeros(2, [("x", "f4"), ("n", "i4")])
    bits, other, draws = array.view(np.int32), tensor.view(torch.int32), Draws(3)
    for step in steps(again):
        bits += 1
        other += step
        rows["n"] += step
        rows["x"][step % 2] = step
        draws.count += draws.randrange(3)
    return array.tobytes(), tensor.view(torch.int32).tolist(), rows.tolist(), draws.count


def a_sparse_tensor(again: bool) -> Any:
    table = torch.sparse_coo_tensor([[0]], [1.0], (4,), check_invariants=True)
    for step in steps(again):
        table = table + table * step
    return table.to_dense().tolist()


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


def what_a_class_of_choices_holds(again: bool) -> Any:
    Level.LOW.count = 0  # type: ignore[attr-defined]
    for step in steps(again):
        Level.LOW.count += step  # type: ignore[attr-defined]
    return Level.LOW.count  # type: ignore[attr-defined]


class Shade(enum.Enum):
    DARK = 1


def what_is_first_given_to_a_choice(again: bool) -> Any:
    vars(Shade.DARK).pop("count", None)
    for step in steps(again):
        if step >= 2:
            Shade.DARK.count = getattr(Shade.DARK, "count", 0) + step  # type: ignore[attr-defined]
    return Shade.DARK.count  # type: ignore[attr-defined]


def by_type(again: bool) -> Any:
    @functools.singledispatch
    def kind(value: object) -> str:
        return "other"

    class Own:
        pass

    @kind.register
    def _(value: str) -> str:
        return f"text {again is None}"

    @kind.register(Own)
    def _(value: Own) -> str:
        return f"own {again is None}"

    kind(True)
    found = []
    for step in steps(again):
        if step == 2:
            kind.register(int, add)
        found.append(kind(step) if step < 2 else kind(step, 1))  # type: ignore[call-arg]
        found += [kind("a"), kind(Own()), kind(0.5)]
    return found[-16:]


def generators_that_were_spawned(again: bool) -> Any:
    seeds, bits, drawn = np.random.default_rng(3), np.random.PCG64(5), 0
    for _ in steps(again):
        drawn = int(seeds.spawn(1)[0].integers(1000)) + int(bits.random_raw() % 1000)
    return drawn


def a_file_that_is_read(again: bool) -> Any:
    line = ""
    with open(__file__, encoding="utf-8") as file:
        for _ in steps(again):
            line = file.readline()
    return line


def moments_of_a_zone(again: bool) -> Any:
    now = datetime.datetime(2026, 3, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "summer"))
    room = array.array("f", [0.0] * 4)
    shown = memoryview(room)
    for step in steps(again):
        now += datetime.timedelta(hours=step)
        shown[step % 4] = float(step)
    return str(now), now.tzname(), room.tolist()


def results_of_a_cached_function(again: bool) -> Any:
    registry.cache_clear()
    registry("seen")
    for step in steps(again):
        registry("seen")[step] = step
    return registry("seen")


@pytest.mark.parametrize(
    "script",
    [
        of_a_thread,
        with_an_underscore,
        functions,
        defined_again,
        classes_and_modules_of_a_function,
        beside_tensors,
        what_only_hooks_hold,
        beside_what_is_attached,
        a_class_that_only_its_objects_lead_to,
        memory_that_others_show,
        settings_of_the_process,
        printed_and_without_gradients,
        settings_of_python,
        what_is_given_to_libraries,
        methods_in_the_place_of_others,
        a_function_defined_again,
        weak_references,
        memory_seen_as_another_type,
        a_sparse_tensor,
        what_a_class_of_choices_holds,
        what_is_first_given_to_a_choice,
        by_type,
        generators_that_were_spawned,
        a_file_that_is_read,
        moments_of_a_zone,
        results_of_a_cached_function,
    ],
)
def test_it_is_put_back(script: Callable[[bool], Any]) -> None:
    first, second, refused = both(script)
    assert first == second and not refused


@pytest.mark.filterwarnings("ignore:.*jit.script")
def test_a_scripted_module_is_put_back() -> None:
    def script(again: bool) -> Any:
        net = torch.jit.script(Counted())
        for _ in steps(again):
            net(torch.ones(1))
        return net.count.item()

    assert both(script) == (float(8), float(8), "")


def results_that_come_late(again: bool) -> Any:
    registry.cache_clear()
    for step in steps(again):
        registry("seen")[step] = step


def other_hooks(again: bool) -> Any:
    net = nn.Linear(1, 1)
    for step in steps(again):
        if step == 2:
            net.register_forward_hook(lambda module, given, result: result * 2)


def a_hook_that_is_gone(again: bool) -> Any:
    variables, net = Variables(0), nn.Linear(1, 1)
    handle = net.weight.register_hook(lambda gradient: gradient * 2)
    variables.attach([net], [])
    for step in steps(again, variables=variables):
        if step == 2:
            handle.remove()


def a_table_in_memory(again: bool) -> Any:
    table = sqlite3.connect(":memory:")
    table.execute("create table seen (step)")
    for step in steps(again):
        table.execute("insert into seen values (?)", (step,))


def what_re_finds(again: bool) -> Any:
    found = re.finditer("a", "aaaaaaaaaa")
    for _ in steps(again):
        next(found)


def a_ragged_tensor(again: bool) -> Any:
    table = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    for step in steps(again):
        table = table * step


def what_a_thread_makes(again: bool) -> Any:
    may = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(int)
        for _ in steps(again):
            may.set()
            later.result()
            may.clear()
            later = pool.submit(may.wait)
        may.set()


def what_a_thread_may_fill(again: bool) -> Any:
    shared = queue.Queue[int]()
    with ThreadPoolExecutor(1) as pool:
        for step in steps(again):
            pool.submit(shared.put, step).result()
            shared.get()


def what_is_to_be_left(again: bool) -> Any:
    with contextlib.ExitStack() as stack:
        for step in steps(again):
            if step == 2:
                stack.callback(int)


choose = first_choice = lambda one: one  # noqa: E731


def a_lambda_of_the_module(again: bool) -> Any:
    global choose
    choose = first_choice
    for step in steps(again):
        if step == 2:
            exec("choose = lambda one: -one", globals())
        choose(step)


def a_closure(again: bool) -> Any:
    rate = lambda step: step  # noqa: E731
    for step in steps(again):
        if step == 2:
            rate = lambda step: step + len(repr(rate))  # noqa: B023, E731
        rate(step)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (results_that_come_late, "`registry` (test_places_here.py) was a cache with a result that has changed"),
        (other_hooks, "`net` (test_places_here.py:"),
        (a_hook_that_is_gone, "`tensor.0.weight._backward_hooks.0` (a hook) was not there in the failed worker"),
        (a_table_in_memory, "`table` (test_places_here.py:"),
        (what_re_finds, "`found` (test_places_here.py:"),
        (what_a_thread_makes, "`later` (test_places_here.py:"),
        (what_a_thread_may_fill, "`shared` (test_places_here.py:"),
        (what_is_to_be_left, "`stack` (test_places_here.py:"),
        (a_ragged_tensor, "`table` (test_places_here.py:"),
        (a_lambda_of_the_module, "`choose` (test_places_here.py"),
        (a_closure, "was another function <lambda>"),
    ],
)
def test_it_is_refused_by_name(script: Callable[[bool], Any], name: str) -> None:
    _, _, refused = both(script)
    assert name in refused, refused


def constant(again: bool) -> Any:
    table, mask = torch.sparse_coo_tensor([[0]], [1.0], (4,), check_invariants=True), functools.cache(torch.ones)
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    net = nn.Linear(1, 1)
    net.register_forward_hook(lambda module, given, result: result * 2)
    rows, total = sqlite3.connect(":memory:"), 0.0
    rows.execute("create table filled (x)")
    rows.execute("insert into filled values (1)")
    for step in steps(again):
        total += (
            rows.execute("select x from filled").fetchone()[0]
            * step
            * (table.to_dense() @ mask(4)).item()
            * ragged.unbind()[0].item()
        )
    return total


def test_what_stays_as_it_is_is_not_refused() -> None:
    first, second, refused = both(constant)
    assert first == second and not refused


def test_what_code_stores_is_what_its_disassembly_says() -> None:
    found = [value.__code__ for value in vars(nn.Transformer).values() if isinstance(value, types.FunctionType)]
    found += [value.__code__ for value in vars(nn.Module).values() if isinstance(value, types.FunctionType)]
    stored = [[*attributes_stored(code)] for code in found]
    assert any(stored)
    for code, names in zip(found, stored, strict=True):
        assert names == [one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"]
