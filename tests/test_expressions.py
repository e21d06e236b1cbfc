"""What a running expression holds when a worker fails: refused by name if the replacement has another value there."""

from __future__ import annotations

import pytest
from harness import Jobs, few

from shared_core.faults import Fault
from shared_core.worker.variables import around, expressions
from tests.support.runner import compare

#: Passes have twenty batches, and one step boundary more.
IN_A_PASS, IN_THE_SECOND = [Fault(1, 8, "forward", "SIGKILL")], [Fault(0, 27, "bucket", "SIGKILL")]
CANNOT = {
    "list": ("goes through a comprehension,", IN_A_PASS),
    "sum": ("goes through sum(),", IN_A_PASS),
    "generator": ("goes through max(),", IN_THE_SECOND),
    "map": ("goes through list(),", IN_A_PASS),
    "added": ("has read `total` before", IN_THE_SECOND),
    "attribute": ("has read `sums.loss` before", IN_A_PASS),
    "epochs": ("goes through a comprehension,", IN_THE_SECOND),
    "counted": ("goes through a for statement that counts for itself,", IN_A_PASS),
    "loaders": ("goes through a comprehension,", IN_THE_SECOND),
}


@pytest.mark.parametrize("way", few(CANNOT, "list", "added", "counted"))
def test_what_an_expression_holds_is_refused_by_name(way: str, jobs: Jobs) -> None:
    expected, faults = CANNOT[way]
    result = jobs.run("expressions.py", args=[way], faults=faults)
    compare(result, jobs.reference("expressions.py", args=[way]))
    [restart] = result.kinds("restart")
    assert expected in restart.fields["reason"] and "expressions.py:" in restart.fields["reason"]


@pytest.mark.parametrize(("way", "faults"), [("equal", IN_THE_SECOND), ("while", IN_A_PASS)], ids=["equal", "while"])
def test_what_is_the_same_in_the_replacement_is_not(way: str, faults: list[Fault], jobs: Jobs) -> None:
    jobs.check("expressions.py", args=[way], faults=faults)


def _places(text: str) -> list[tuple[bool, list[str]]]:
    """What is found at each call of ``at``."""
    found: list[tuple[bool, list[str]]] = []

    def at(*_: object) -> int:
        import ast
        import sys

        frame = sys._getframe(1)
        read = expressions.read_before(frame.f_code, frame.f_lasti)
        found.append((expressions.collects(frame.f_code, frame.f_lasti), [ast.unparse(each) for each in read]))
        return 1

    import linecache

    name = f"<places {text}>"
    linecache.cache[name] = (len(text), None, [text + "\n"], name)
    exec(compile(text, name, "exec"), {"at": at, "d": {"k": 1}, "x": 1, "y": [1, 2]})
    return found


@pytest.mark.parametrize(
    ("text", "collects", "read"),
    [
        ("at()", False, []),
        ("z = at()", False, []),
        ("x += at()", False, ["x"]),
        ("d['k'] += at()", False, ["d['k']"]),
        ("z = x + y[0] * at()", False, ["x", "y[0]"]),
        ("z = max(x, at())", False, ["max", "x"]),
        ("y.append(at())", False, ["y.append"]),
        ("z = f'{x} {at()}'", False, ["x"]),
        ("z = at() + x", False, []),
        ("z = x and at()", False, []),
        ("z = at() if x else y", False, []),
        ("z = [at() for _ in y[:1]]", True, []),
        ("z = {k: x + at() for k in y[:1]}", True, ["x"]),
        ("z = [e for e in (at(),)]", False, []),
        ("z = list(at() for _ in y[:1])", False, []),
    ],
)
def test_what_has_been_read_before_a_call(text: str, collects: bool, read: list[str]) -> None:
    [(found, names)] = _places(text)
    assert found == collects and sorted(names) == sorted(read)


def test_who_asks_for_one_item_keeps_nothing() -> None:
    import sys

    asked: list[list[str]] = []

    def items():  # type: ignore[no-untyped-def]
        for _ in range(2):
            asked.append(list(around.collectors(sys._getframe())))
            yield 1

    next(items())
    items().__next__()
    for _ in items():
        break
    sum(items())
    assert asked == [[], [], [], ["sum()"], ["sum()"]]
