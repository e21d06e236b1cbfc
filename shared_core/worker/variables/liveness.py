"""Which variables of a running function may still be read before they are written: only these are state."""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

#: Code that names one of these may read every variable.
READS_ALL = frozenset({"locals", "globals", "vars", "dir", "eval", "exec"})
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
_JUMP_CODES = frozenset((*dis.hasjrel, *dis.hasjabs))
_CALLS = frozenset({"PRECALL", "CALL", "CALL_KW"})
_OF_CALLS = frozenset({"PUSH_NULL", "KW_NAMES", "LOAD_CONST"})
#: None of what these packages give to ``with`` ends an exception. Other objects may, as ``contextlib.suppress`` does.
_NEVER_SUPPRESS = frozenset({"torch", "accelerate", "tqdm"})

_known: dict[tuple[CodeType, int], frozenset[str] | None] = {}


def live(code: CodeType, last: int, held: Mapping[str, Any]) -> frozenset[str] | None:
    """Names of variables that may be read, before they are written, by what follows the running instruction.

    ``last`` is ``f_lasti`` of the frame, ``held`` what its variables and globals hold, by which it is told which
    ``with`` may end an exception. Of a module, all names in its functions are included. None where any variable may be
    read. Cached by code and instruction.
    """
    key = (code, last)
    if key not in _known:
        _known[key] = _live(code, last, held)
    return _known[key]


def _live(code: CodeType, last: int, held: Mapping[str, Any]) -> frozenset[str] | None:
    if _reads_all(code):
        return None
    always = {*code.co_cellvars, *code.co_freevars}
    if not code.co_flags & 1:  # a module or a class: others look its variables up by name
        for inner in _inside(code):
            always.update(inner.co_names)
            if _reads_all(inner):
                return None
    instructions = list(dis.get_instructions(code))
    index = {each.offset: number for number, each in enumerate(instructions)}
    handlers: list[list[int]] = [[] for _ in instructions]
    goes_on: set[int] = set()
    stored = {name for each in instructions if each.offset > last for name in _effect(each)[1]}
    known = {name: value for name, value in held.items() if name not in stored}
    bytecode: Any = dis.Bytecode(code)  # its exception table is public, but not in the stubs
    for entry in bytecode.exception_entries:
        if _never_suppresses(instructions, index[entry.start], known):
            goes_on.add(index[entry.target])
        for number, each in enumerate(instructions):
            if entry.start <= each.offset < entry.end:
                handlers[number].append(index[entry.target])
    following = [_following(number, each, index) + handlers[number] for number, each in enumerate(instructions)]
    for number in goes_on:
        jump = next(i for i in range(number, len(instructions)) if instructions[i].opcode in _JUMP_CODES)
        following[jump] = [jump + 1]
    effects = [_effect(each) for each in instructions]
    before: list[frozenset[str]] = [frozenset()] * len(instructions)
    changed = True
    while changed:
        changed = False
        for number in range(len(instructions) - 1, -1, -1):
            after = frozenset().union(*(before[each] for each in following[number]))
            reads, writes = effects[number]
            now = reads | (after - writes)
            if now != before[number]:
                before[number], changed = now, True
    here = max((number for number, each in enumerate(instructions) if each.offset <= last), default=0)
    return frozenset(always).union(*(before[each] for each in following[here]))


def _never_suppresses(instructions: list[dis.Instruction], body: int, held: Mapping[str, Any]) -> bool:
    """Whether the body of a ``with`` begins here that lets each exception pass: by what its names hold now."""
    enter = body - 1
    if instructions[enter].opname != "BEFORE_WITH" or instructions[body].is_jump_target:
        return False
    at = instructions[enter].offset
    jumps = [i for i, each in enumerate(instructions) if each.opcode in _JUMP_CODES and each.argval == at]
    return all(_lets_pass(instructions[:end], held) for end in (enter, *jumps))


def _lets_pass(instructions: list[dis.Instruction], held: Mapping[str, Any]) -> bool:
    """Whether the last of them have loaded what never ends an exception: names, attributes of it, perhaps a call."""
    at, names = instructions[-1].positions, list[str]()
    for each in reversed(instructions):
        if at is None or each.positions is None:
            return False
        if each.positions[::2] != at[::2] or each.opname in _OF_CALLS:
            continue  # an argument
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(each.argval)
        elif each.opname in ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_NAME", "LOAD_GLOBAL"):
            names.append(each.argval)
            break
        elif each.opname not in _CALLS or each.positions != at:
            return False
    found = held.get(names.pop()) if names else None
    for name in reversed(names):
        found = inspect.getattr_static(found, name, None)
    if not isinstance(found, (type, FunctionType)):
        found = type(found)
    return found is contextlib.nullcontext or str(found.__module__).partition(".")[0] in _NEVER_SUPPRESS


def _reads_all(code: CodeType) -> bool:
    """Whether it names one of these, other than as an attribute, as ``model.eval()`` does."""
    if READS_ALL.isdisjoint(code.co_names):
        return False
    return any(each.opname in _LOADS and each.argval in READS_ALL for each in dis.get_instructions(code))


def _inside(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _inside(each)


def _following(number: int, each: dis.Instruction, index: dict[int, int]) -> list[int]:
    found = [] if each.opname in _ENDS | _JUMPS or number + 1 == len(index) else [number + 1]
    if each.opcode in _JUMP_CODES and each.argval in index:
        found.append(index[each.argval])
    return found


def _effect(each: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Names that an instruction reads, and those that it writes without having read them."""
    name, value = each.opname, each.argval
    if name == "STORE_FAST_LOAD_FAST":
        return frozenset({value[1]}) - {value[0]}, frozenset({value[0]})
    names = frozenset(value if isinstance(value, tuple) else (value,))
    if not all(isinstance(each, str) for each in names):
        return frozenset(), frozenset()
    if name in ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_FAST_STORE_FAST"):
        return frozenset(), names
    if name.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "DELETE_")):
        return names, frozenset()
    return frozenset(), frozenset()
