"""Captures of a script's variables, and what becomes of them in a second run of the script, in one process."""

from __future__ import annotations

import csv
import functools
import hashlib
import itertools
import random
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from shared_core.errors import CorruptFile, RecoveryFailed
from shared_core.pipeline.compat import OF_MODULES
from shared_core.worker.variables import data_sets, graft, writer
from shared_core.worker.variables.liveness import live
from shared_core.worker.variables.scopes import import_again
from shared_core.worker.variables.variables import Origin, Variables

#: At this step the second run begins, with what the first one held there.
AT, END = 4, 8
_taken: dict[str, Any] = {}
_refusals: list[str] = []


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of other tests, which this process has imported too, are no part of these scripts."""
    tests = str(Path(__file__).parents[1])
    for name, module in list(sys.modules.items()):
        if name != __name__ and str(getattr(module, "__file__", None)).startswith(tests):
            monkeypatch.delitem(sys.modules, name)


def steps(again: bool, origin: Origin = "same", variables: Variables | None = None) -> Iterator[int]:
    """The first run captures at each step; the second one is put in its place at one of them."""
    variables = variables or Variables(0)
    for step in range(AT if again else 0, END):
        if again and step == AT:
            _refusals.append(variables.restore(dict(_taken), origin))
        elif not again:
            captured = variables.capture()
            if step == AT:
                _taken.update(captured)
        yield step


def both(script: Callable[[bool], Any]) -> tuple[Any, Any, str]:
    """What a script returns in each run, and what is refused in the second."""
    _taken.clear()
    _refusals.clear()
    results = [script(again) for again in (False, True)]  # at one place of this function, as in two processes
    return results[0], results[1], _refusals[0]


class Hostile:
    """Nothing of it is called."""

    def __init__(self) -> None:
        self.__dict__["count"] = 0

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError

    __reduce_ex__ = __reduce__ = __getstate__ = __setstate__ = __eq__ = __hash__ = __setattr__  # type: ignore


@pytest.mark.parametrize("made", [True, False], ids=["made", "control"])
def test_a_metric_that_is_copied_in_the_loop_is_made_again(made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not made:
        monkeypatch.setattr(graft, "_makes_the_rest", lambda cls: False)

    def script(again: bool) -> Any:
        metric, kept = MeanMetric(), []
        for step in steps(again):
            if step % 2 == 0:
                kept.append(metric.clone())
            for each in (metric, *kept):
                each.update(float(step))
        return [(each.compute().item(), each.update_count) for each in kept]

    first, second, refused = both(script)
    assert (refused == "" and first == second) if made else "_update_signature" in refused


class Shared:
    """As a wrapper of torchmetrics: its state is at first the default itself."""

    def __init__(self) -> None:
        self.defaults = {"seen": torch.zeros(2)}
        self.seen = self.defaults["seen"]


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "control"])
def test_what_does_not_count_is_not_changed_by_another_name(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr(graft.Graft, "keep", lambda *_: None)

    def script(again: bool) -> Any:
        variables, held = Variables(0), Shared()
        variables.leave(Shared, {"defaults"})
        variables.ignore("held")
        variables.tell("metric", held)
        for _ in steps(again, variables=variables):
            held.seen = held.seen + 1
        return held.seen.tolist(), held.defaults["seen"].tolist()

    first, second, refused = both(script)
    assert not refused and (first == second) is kept


def test_only_what_may_be_read_is_state() -> None:
    def script() -> list[frozenset[str] | None]:
        found = []
        batch = count = dead = 0
        for batch in range(2):
            frame = sys._getframe()
            found.append(live(frame.f_code, frame.f_lasti, frame.f_globals))
            dead = batch
            count += dead
        nn.Linear(1, 1).eval()  # is not the function of that name
        print(count)
        return found

    [alive, _] = script()
    assert alive is not None and {"count", "batch", "found"} <= alive and "dead" not in alive


def test_what_a_with_cannot_leave_unwritten_is_no_state() -> None:
    def script(context: Any) -> frozenset[str] | None:
        found, outputs, kept = [], None, None
        for batch in range(2):
            frame = sys._getframe()
            found.append(live(frame.f_code, frame.f_lasti, {**frame.f_globals, **frame.f_locals}))
            with torch.autocast("cpu", enabled=batch > 5), torch.no_grad():
                outputs = batch
            with context:
                kept = batch
            print(outputs, kept)
        return found[0]

    passing = script(nullcontext())
    assert passing is not None and not {"outputs", "kept"} & passing


def test_what_a_with_that_ends_exceptions_may_leave_is_state() -> None:
    """The control: these are then read as they were."""

    def script(context: Any) -> frozenset[str] | None:
        found, kept, other = [], None, None
        for batch in range(2):
            frame = sys._getframe()
            found.append(live(frame.f_code, frame.f_lasti, {**frame.f_globals, **frame.f_locals}))
            with context:
                kept = 1 // batch
            with context if batch < 5 else nullcontext():
                other = 1 // batch
            print(kept, other)
        return found[0]

    found = script(suppress(ZeroDivisionError))
    assert found is not None and {"kept", "other"} <= found


def test_all_may_be_read_where_they_are_named_in_a_text() -> None:
    def script() -> frozenset[str] | None:
        frame = sys._getframe()
        alive = live(frame.f_code, frame.f_lasti, {})
        eval("alive")
        return alive

    assert script() is None


def test_a_result_can_be_read_but_not_differentiated() -> None:
    def script(again: bool) -> Any:
        weight = torch.ones(1, requires_grad=True)
        loss = weight * 0
        for step in steps(again):
            if again and step == AT:
                with pytest.raises(RecoveryFailed, match="differentiated again"):
                    loss.backward()
            before = float(loss)
            loss = weight * step
        return before, float(loss)

    first, second, refused = both(script)
    assert first == second and not refused


def test_iterators_over_plain_containers_are_moved_on() -> None:
    def script(again: bool) -> Any:
        rows = [*range(20)]
        some = {
            "list": iter(rows),
            "reversed": reversed(rows),
            "tuple": iter(("a", "b", "c", "d", "e", "f")),
            "range": iter(range(3, 40, 2)),
            "text": iter("words that are read"),
            "bytes": iter(b"0123456789"),
            "made again": iter(rows),
            "ended": iter([1]),
        }
        same, seen, extra = some["list"], [], []
        for step in steps(again):
            if step == 1:
                rows.append(20)
                extra = [*rows[::-1]]
                some["made again"] = iter(extra)
            seen.append([next(each, None) for each in some.values()])
            next(same)
        rows.append(21)
        extra.append(22)
        return seen, {name: list(each) for name, each in some.items()}, same is some["list"]

    first, second, refused = both(script)
    assert first == second and not refused


@pytest.mark.parametrize("changes", [True, False])
def test_what_is_too_large_is_compared(changes: bool) -> None:
    def script(again: bool) -> Any:
        table = list(range(2_000_000))
        for step in steps(again):
            if changes:
                table.append(step)
        return len(table)

    _, _, refused = both(script)
    assert ("`table` (test_variables_here.py:" in refused) == changes, refused


@pytest.mark.parametrize("how", ["numpy", "data", "memory"])
def test_large_arrays_that_change_between_both_ends(how: str) -> None:
    def script(again: bool) -> Any:
        table = np.zeros(100_000) if how == "numpy" else torch.zeros(100_000)
        total = 0.0
        for step in steps(again):
            if step == 2:
                (table if how == "numpy" else table.data if how == "data" else table.numpy())[54_321] = 1.0
            total += float(table[54_321])
        return total

    first, second, refused = both(script)
    assert first == second == END - 2 and not refused


def test_of_larger_arrays_parts_are_looked_at_in_turn_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def script(again: bool) -> Any:
        table, kept = np.zeros(400_000), np.zeros(400_000)
        kept.flags.writeable = False
        total = 0.0
        for step in steps(again):
            table[12_345] += 1.0
            total += float(table[12_345]) + kept[0] + step
        return total

    first, second, refused = both(script)
    assert first == second and not refused
    told = capsys.readouterr().err
    assert told.count("the variable 'table' (test_variables_here.py:") == 1 and "13 steps" in told, told
    assert "'kept'" not in told


def test_what_cannot_be_written_is_told_and_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    def script(again: bool) -> Any:
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        count = 0
        for step in steps(again):
            count += step
        return count, len(deep)

    first, _, refused = both(script)
    told = capsys.readouterr().err
    assert told.count("the variable 'deep' (test_variables_here.py:") == 1 and "RecursionError" in told, told
    assert first[0] == sum(range(END)) and "`deep` (test_variables_here.py:" in refused, refused


def test_only_modules_of_the_script_are_imported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_it.py").write_text("import random\nx = random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    library = next(each for each in ("turtle", "cgi", "this", "antigravity") if each not in sys.modules)
    before = random.getstate()
    assert import_again([library, "beside_it", "there_is_none", "beside_it:Class"])
    assert "beside_it" in sys.modules and library not in sys.modules and random.getstate() == before
    assert not import_again(["beside_it"])
    del sys.modules["beside_it"]


class Named(nn.Linear):
    """Its attributes have names that begin as DeepSpeed's do."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.ds_seen, self._ds_rows, self.all_parameters_seen = 0, list[int](), 0


def test_attributes_are_the_scripts_whatever_their_names_begin_with() -> None:
    def script(again: bool) -> Any:
        variables, net = Variables(0), Named()
        variables.leave(nn.Module, OF_MODULES)
        variables.attach([net], [])
        for step in steps(again, variables=variables):
            net.ds_seen += 1
            net._ds_rows.append(step)
            net.all_parameters_seen += 1
        return net.ds_seen, net._ds_rows, net.all_parameters_seen

    first, second, refused = both(script)
    assert first == second == (END, list(range(END)), END) and not refused


def test_no_code_of_the_script_runs() -> None:
    def script(again: bool) -> Any:
        it, held = Hostile(), []
        for _ in steps(again):
            it.__dict__["count"] += 1
            held.append(it)
        return it.__dict__["count"], len(held), all(each is it for each in held)

    first, second, refused = both(script)
    assert first == second == (END, END, True) and not refused


def test_a_later_start_may_change_what_did_not_change() -> None:
    def script(again: bool) -> Any:
        rate, count, name = 0.2 if again else 0.1, 0, "second" if again else "first"
        for _ in steps(again, "checkpoint"):
            count += 1
        return rate, count, name

    assert both(script) == ((0.1, END, "first"), (0.2, END, "second"), "")


class Counts:
    made = 0

    def __init__(self) -> None:
        self.count = 0

    @classmethod
    def made_more(cls) -> int:
        cls.made += 1
        return cls.made

    def more(self) -> int:
        self.count += 1
        return self.count


def test_methods_that_a_variable_holds_are_found_again() -> None:
    """Bound to a class, to an object in C, and to objects that only a list, or nothing else, holds."""

    def script(again: bool) -> Any:
        Counts.made = 0
        each = Counts()
        held, lists = [Counts()], list[int]()
        of_class, append, more, of_each, shout = Counts.made_more, lists.append, held[0].more, each.more, "ab".upper
        draw, number, add = random.Random(3).random, itertools.count().__next__, functools.partial(Counts.more, each)
        drawn = []
        for step in steps(again):
            of_class()
            more()
            of_each()
            add()
            append(step)
            drawn = [draw(), number()]
        same = append.__self__ is lists and add.args[0] is each
        return Counts.made, held[0].count, each.count, lists, shout(), drawn, same

    first, second, refused = both(script)
    assert first == second and not refused
    assert first[:5] == (END, END, 2 * END, list(range(END)), "AB") and first[6]


def _primed() -> Iterator[Any]:
    yield from iter([torch.zeros(1), torch.ones(1), *[torch.zeros(1)] * END])


@pytest.mark.parametrize(
    ("made", "change", "was"),
    [
        (hashlib.sha256, lambda it, _: it.update(b"a"), "HASH that has continued"),
        (lambda: iter(dict.fromkeys(range(20), 0)), lambda it, _: next(it), "dict_keyiterator that has"),
        (lambda: csv.reader(["a", "b"] * 20), lambda it, _: next(it), "does not show what it holds"),
        (lambda: itertools.chain([1], csv.reader(["a"] * 20)), lambda it, _: next(it), "does not show what it holds"),
        (zlib.compressobj, lambda it, step: it.compress(bytes([step])), "does not show what it holds"),
        (lambda: iter(_primed()), lambda it, step: step == 1 and next(it), "generator that has continued"),
    ],
    ids=["hash", "keys", "csv", "nested", "zlib", "generator"],
)
def test_what_is_in_c_is_refused_where_it_has_changed_or_does_not_show_that(
    made: Callable[[], Any], change: Callable[[Any, int], Any], was: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(again: bool) -> Any:
        held = {"it": made()}
        for step in steps(again):
            change(held["it"], step)
        return len(held)

    _, _, refused = both(script)
    assert "`held['it']` (test_variables_here.py:" in refused and was in refused, refused
    told = "the variable 'held' (test_variables_here.py:" in capsys.readouterr().err
    assert told == ("does not show" in was)  # where it can be known, it is said at once


def test_the_variables_of_another_rank_stay_there() -> None:
    def script(again: bool) -> Any:
        rank, count = int(again), 0
        for _ in steps(again, "other"):
            count += 1
        return rank, count

    assert both(script) == ((0, END), (1, END - AT), "")


def test_damaged_captures_are_refused() -> None:
    with pytest.raises(CorruptFile):
        Variables(0).restore({"now": b"\x80\x05cos\nsystem\n.", "first": None})


class Watcher:
    """A callback."""

    def __init__(self) -> None:
        self.seen, self.rows = 0, list[int]()


@pytest.mark.parametrize("made_at", [-1, 2])
def test_an_ordered_dictionary_keeps_its_order(made_at: int) -> None:
    def script(again: bool) -> Any:
        ordered: Any = OrderedDict()
        for step in steps(again):
            if step == made_at:
                ordered = OrderedDict()
            ordered[step % 3] = step
            ordered.move_to_end(min(ordered))
        return [*ordered.items()], len(ordered)

    one, other, refused = both(script)
    assert refused == ""
    assert one == other


@pytest.mark.timeout(60)
@pytest.mark.parametrize("early", [True, False])
def test_keys_that_id_gives(early: bool) -> None:
    """They are put back in their places, or refused where the second run has not made as many."""

    def script(again: bool) -> Any:
        kept = [nn.Linear(1, 1) for _ in range(3)]
        seen = {id(each): 0 for each in kept} if early else {}
        for step in steps(again):
            each = kept[step % 3]
            seen[id(each)] = seen.get(id(each), 0) + step
        return [seen.get(id(each)) for each in kept]

    first, second, refused = both(script)
    if early:
        assert (second, refused) == (first, ""), refused
    else:
        assert "`seen`" in refused and "a dictionary with 3 keys that id() gives" in refused


@pytest.mark.parametrize("adds", [False, True])
def test_a_set_keeps_the_order_that_its_history_gave_it_or_is_refused(adds: bool) -> None:
    def script(again: bool) -> Any:
        pool, taken = set(range(4000)), []
        for number in range(4000):
            if number % 31:
                pool.discard(number)  # its table stays as large as it was
        for step in steps(again):
            taken.append(list(pool)[:3])
            pool.discard(taken[-1][0])
            if adds:  # around what was there before
                pool.add(31 * step + 1)
        return taken

    first, second, refused = both(script)
    assert "`pool` (" in refused and "whose order depends" in refused if adds else first == second and not refused


@pytest.mark.parametrize("changes", [True, False])
def test_what_a_framework_never_tells_of_again_is_named_if_it_has_changed(changes: bool) -> None:
    def script(again: bool) -> Any:
        variables, watcher = Variables(0), Watcher()
        variables.ignore("again")
        if not again:
            variables.tell("callback", watcher)
        for step in steps(again, variables=variables):
            if again and step == AT:
                variables.capture()  # the place itself may be published again
                try:
                    variables.capture()
                except RecoveryFailed as error:
                    return str(error)
            watcher.seen += changes
        return ""

    _, said, refused = both(script)
    assert refused == "" and ("the attributes of `callback` have changed" in said) is changes


def test_what_reading_changes_is_no_change_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a look takes so long that not each read has one."""
    monkeypatch.setattr(writer, "_DEAR_S", -1.0)
    monkeypatch.setattr(writer, "_LONGEST_WAIT", 1e9)
    told: list[str] = []
    read: dict[int, int] = {}
    data = SimpleNamespace(read=read, weights=[1.0])
    watched = data_sets.DataSets(set(), lambda name, _: told.append(name))
    watched.watch(lambda: {"train": SimpleNamespace(dataset=data)})
    for index in range(6):
        with watched.reading():
            read[index] = index
        assert not watched.changed()
    assert set(told) == {"train: dataset.read", "train: dataset.weights"}


def test_one_long_look_makes_nothing_dear() -> None:
    """On a busy machine: what the script changes would be missed."""
    cost = writer.LookCost()
    assert [cost.looked(took_s) for took_s in (0.5, 0.5, 0.0001, *[0.5] * 9)] == [0.0] * 12 and cost.is_due
    dear = writer.LookCost()
    assert any(dear.looked(0.5) for _ in range(9)) and not dear.is_due
