"""What the running expressions of a script hold, and no variable shows: values read before a call in the same
expression, and what a comprehension has collected.

In ``total += step(next(it))`` the old ``total`` has been read when a batch is asked for. A replacement reads it before
it has the failed worker's variables. So such values are compared, and a difference is refused by name.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_OF_MODULES = ("_parameters", "_buffers", "_modules")
#: Expressions that are code of their own, by its name.
_WHOLE: dict[str, type[ast.AST]] = {
    "<listcomp>": ast.ListComp,
    "<setcomp>": ast.SetComp,
    "<dictcomp>": ast.DictComp,
    "<genexpr>": ast.GeneratorExp,
    "<lambda>": ast.Lambda,
}
#: Stands for what cannot be read without running code of the script.
_UNKNOWN = object()


@functools.lru_cache(maxsize=512)
def way_to(code: types.CodeType, last: int) -> tuple[ast.AST, ...]:
    """The running instruction's node in the source, and all around it up to the statement, or to the expression whose
    code this is; the innermost first. Empty where the source is not known. ``last`` is ``f_lasti`` of the frame.
    """
    line, end_line, column, end_column = next(_positions(code, last), (None,) * 4)
    if None in (line, end_line, column, end_column):
        return ()
    at, around = _nodes(code.co_filename)
    found = at.get((line, column, end_line, end_column))
    if found is None:  # a call of a method begins at its name there
        found = at.get((end_line, end_column))
    outer = around.get(found) if found is not None and asks_again(code, last) else None
    if isinstance(outer, (ast.For, ast.AsyncFor, ast.comprehension)) and outer.iter is found:
        # from Python 3.13 on what a loop goes through is the place where it asks
        found = around[outer] if isinstance(outer, ast.comprehension) else outer
    way: list[ast.AST] = []
    whole = _WHOLE.get(code.co_name, ast.stmt)
    while found is not None:
        outside = len(way) > 1 and isinstance(way[-1], ast.comprehension) and way[-2] is way[-1].iter
        way.append(found)
        ends = isinstance(found, ast.stmt) or (isinstance(found, whole) and not outside)
        found = None if ends else around.get(found)
    return tuple(way)


def _positions(code: types.CodeType, last: int) -> Iterator[Any]:
    for number, each in enumerate(code.co_positions()):
        if 2 * number == last:
            yield each


@functools.lru_cache(maxsize=16)
def _nodes(file: str) -> tuple[dict[Any, ast.AST], dict[ast.AST, ast.AST]]:
    """Nodes by place, calls by their ends too; and the node around each."""
    at: dict[Any, ast.AST] = {}
    around: dict[ast.AST, ast.AST] = {}
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # it has been changed since it was compiled
        return {}, {}
    for each in ast.walk(tree):
        around.update(dict.fromkeys(ast.iter_child_nodes(each), each))
        if isinstance(each, (ast.expr, ast.stmt)):
            at[each.lineno, each.col_offset, each.end_lineno, each.end_col_offset] = each
            if isinstance(each, ast.Call):
                at[each.end_lineno, each.end_col_offset] = each
    return at, around


@functools.lru_cache(maxsize=512)
def loops_around(code: types.CodeType, last: int) -> frozenset[ast.AST]:
    """``for`` statements of a function that run the running instruction in their bodies."""
    way = way_to(code, last)
    inner, around = way[-1] if way else None, _nodes(code.co_filename)[1]
    found: set[ast.AST] = set()
    while inner is not None and not isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        outer = around.get(inner)
        if isinstance(outer, (ast.For, ast.AsyncFor)) and any(each is inner for each in outer.body):
            found.add(outer)
        inner = outer
    return frozenset(found)


def asks_again(code: types.CodeType, last: int) -> bool:
    """Whether the running instruction is that of a loop over what it asks."""
    while last > 0 and code.co_code[last] == dis.opmap["CACHE"]:  # Python 3.12 is past it when it asks again
        last -= 2
    return code.co_code[last] == dis.opmap["FOR_ITER"]


def collects(code: types.CodeType, last: int) -> bool:
    """Whether the running instruction is in the items of a comprehension, other than a generator expression."""
    way = way_to(code, last)
    iterates = asks_again(code, last)
    for inner, outer in zip((None, *way), way, strict=False):
        if isinstance(outer, COMPREHENSIONS):
            # what the first loop goes through is made before anything is collected
            return iterates or inner is None or inner is not outer.generators[0]
    return False


@functools.lru_cache(maxsize=512)
def read_before(code: types.CodeType, last: int) -> tuple[ast.expr, ...]:
    """Expressions whose values the running one has, and needs after the running instruction."""
    found: list[ast.expr] = []
    way = way_to(code, last)
    for inner, outer in zip(way, way[1:], strict=False):
        if isinstance(outer, ast.AugAssign):
            found.append(outer.target)
        elif isinstance(outer, ast.expr) and not isinstance(outer, (ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr)):
            found += _left_of(inner, outer)
    return tuple(found)


def _left_of(inner: ast.AST, outer: ast.expr) -> Iterator[ast.expr]:
    if isinstance(outer, (*COMPREHENSIONS, ast.GeneratorExp)):
        return
    for each in ast.iter_child_nodes(outer):
        if each is inner:
            break
        if isinstance(each, ast.keyword):
            each = each.value
        if isinstance(each, ast.FormattedValue):
            each = each.value
        if isinstance(each, ast.expr) and not isinstance(each, ast.Constant):
            yield each


def names_read(code: types.CodeType, last: int) -> frozenset[str]:
    """Variables in :func:`read_before`."""
    return frozenset(each.id for one in read_before(code, last) for each in ast.walk(one) if isinstance(each, ast.Name))


class Unfinished:
    """What running expressions of these frames have read. Make one before variables are put back."""

    def __init__(self, frames: Sequence[types.FrameType]) -> None:
        self._read = [
            (frame, each, _value(each, frame)) for frame in frames for each in read_before(frame.f_code, frame.f_lasti)
        ]

    def stale(self) -> tuple[str, str] | None:
        """After variables were put back: (source, place) of what was read and is another value now."""
        for frame, each, before in self._read:
            if not _same(before, _value(each, frame)):
                return ast.unparse(each), f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return None


def _value(node: ast.expr, frame: types.FrameType) -> Any:
    """Of an expression, or :data:`_UNKNOWN`. Runs none of the script's code."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        for space in (frame.f_locals, frame.f_globals, frame.f_builtins):
            if node.id in space:
                return space[node.id]
    elif isinstance(node, ast.Attribute):
        to = _value(node.value, frame)
        return to if to is _UNKNOWN else _attribute(to, node.attr)
    elif isinstance(node, ast.Subscript):
        to, key = _value(node.value, frame), _value(node.slice, frame)
        if isinstance(to, dict) and isinstance(key, _ATOMS):
            return dict.get(to, key)
        if type(to) in (list, tuple) and isinstance(key, int) and -len(to) <= key < len(to):
            return to[key]
    return _UNKNOWN


def _attribute(to: Any, name: str) -> Any:
    """A method stands for its object."""
    own = getattr(to, "__dict__", {})
    for space in (own, *(own.get(each, {}) for each in _OF_MODULES if isinstance(to, nn.Module))):
        if name in space:
            return space[name]
    bases = (to if isinstance(to, type) else type(to)).__mro__
    found = next((vars(each)[name] for each in bases if name in vars(each)), _UNKNOWN)
    if isinstance(found, types.MemberDescriptorType):
        with suppress(AttributeError):
            return found.__get__(to)
    if isinstance(found, (types.FunctionType, types.MethodDescriptorType, classmethod, staticmethod)):
        return to
    return _UNKNOWN if hasattr(type(found), "__get__") else found


def _same(before: Any, now: Any) -> bool:
    if before is _UNKNOWN or now is _UNKNOWN:
        return False
    return before is now or (isinstance(now, _ATOMS) and type(before) is type(now) and repr(before) == repr(now))
