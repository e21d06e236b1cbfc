"""Changes to encoded values: pure functions of bytes and a random generator, so that a seed repeats them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

#: Numbers at which lengths, counts and signs go wrong.
_NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63,
    2**64 - 1,
)
#: Bytes that mean something in texts, pickles and paths.
_BYTES = b"\0\n\r\t \"'[]{},:.-+/\\0129eE\x7f\x80\xff"
#: Written into JSON as they are, without quotes.
_RAW = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1", "-0.0", "1.5", "1e16", "9" * 25, "9" * 5000, "true", "null",
    "[]", "{}", '""', "[[]]", '[{}]', '{"a":{}}', "[" * 1200 + "]" * 1200, "[" * 120_000, '{"a":' * 60_000,
)  # fmt: skip
_STRINGS = (
    "",
    "\0",
    "..",
    "../../x",
    "/",
    "\ud800",
    "\u0661",
    "²",
    "0",
    "-1",
    "nan",
    "a" * 5000,
    "x:y",
    "1:2",
    "\x1b[2J",
)
_HOLE = "\u0001raw\u0001"

Change = Callable[[bytearray, random.Random, Sequence[bytes]], None]


def mutated(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """``data`` with a few changes.

    Args:
        data: an encoded value.
        others: encoded values of the same format, of which parts are taken.
        chance: draws the changes.
    """
    for _ in range(chance.choice((1, 1, 1, 2, 3, 5))):
        if chance.random() < 0.45 and (changed := _changed_json(data, chance)) is not None:
            data = changed
            continue
        part = bytearray(data)
        chance.choice(_CHANGES)(part, chance, others)
        data = bytes(part)
    return data


# -- bytes ----------------------------------------------------------------------------------------


def _span(data: bytearray, chance: random.Random) -> tuple[int, int]:
    """Where a part begins and ends: mostly a small one."""
    begin = chance.randrange(len(data) + 1)
    longest = len(data) - begin
    return begin, begin + min(longest, chance.choice((1, 1, 2, 4, 8, 16, longest // 4, longest)))


def _flip(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _put(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.choice(_BYTES)


def _truncate(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    del data[chance.randrange(len(data) + 1) :]


def _remove(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    begin, end = _span(data, chance)
    del data[begin:end]


def _repeat(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    begin, end = _span(data, chance)
    data[end:end] = data[begin:end] * chance.choice((1, 1, 2, 50))


def _move(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    begin, end = _span(data, chance)
    part = data[begin:end]
    del data[begin:end]
    at = chance.randrange(len(data) + 1)
    data[at:at] = part


def _splice(data: bytearray, chance: random.Random, others: Sequence[bytes]) -> None:
    other = bytearray(chance.choice(others))
    if chance.random() < 0.5:
        at = chance.randrange(min(len(data), len(other)) + 1)
        data[at:] = other[at:]
    else:
        begin, end = _span(other, chance)
        at, until = _span(data, chance)
        data[at:until] = other[begin:end]


def _insert(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice((chance.randbytes(chance.randrange(1, 9)), bytes(chance.choice((1, 8, 4096)))))


def _lie(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    """Another number where one may stand, most often where one stands that could be a length of this very value."""
    size, order = chance.choice((1, 2, 4, 4, 8, 8)), chance.choice(("little", "little", "big"))
    if len(data) < size:
        return
    places = range(len(data) - size + 1)
    looked = chance.sample(places, min(len(places), 64))
    lengths = [at for at in looked if 0 < int.from_bytes(data[at : at + size], order) <= len(data)]
    at = chance.choice(lengths) if lengths and chance.random() < 0.8 else chance.choice(places)
    there = int.from_bytes(data[at : at + size], order)
    number = chance.choice(
        (there + 1, there - 1, 2 * there, len(data), chance.choice(_NUMBERS), chance.choice(_NUMBERS))
    )
    data[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, order)


def _shift(data: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    """Two numbers that change by as much, one up and one down: lengths whose sum stays."""
    size = chance.choice((4, 8))
    lengths = [
        at
        for at in range(min(len(data) - size + 1, 256))
        if int.from_bytes(data[at : at + size], "little") <= len(data)
    ]
    if len(lengths) > 1:
        for at, step in zip(chance.sample(lengths, 2), (1, -1), strict=True):
            number = int.from_bytes(data[at : at + size], "little") + step
            data[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")


_CHANGES: tuple[Change, ...] = (
    _flip, _flip, _put, _truncate, _remove, _repeat, _move, _splice, _splice, _insert, _lie, _lie, _lie, _shift,
)  # fmt: skip


# -- JSON -----------------------------------------------------------------------------------------


def _changed_json(data: bytes, chance: random.Random) -> bytes | None:
    """The same with a value inside it changed, of the whole or of a line; None where neither is JSON."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    for part, whole in ((data, True), (lines[at], False)):
        try:
            value = json.loads(part)
        except (ValueError, RecursionError):
            continue
        if not isinstance(value, dict | list):
            continue
        changed = _changed_text(value, chance)
        return changed if whole else b"\n".join((*lines[:at], changed, *lines[at + 1 :]))
    return None


def _changed_text(value: Any, chance: random.Random) -> bytes:
    holes: list[str] = []
    places = list(_places(value))
    if not places:
        return chance.choice(_RAW).encode()
    container, key = chance.choice(places)
    there = container[key]
    how = chance.randrange(8)
    if how == 0:
        del container[key]
    elif how == 1 and isinstance(container, dict):
        container[chance.choice((*_STRINGS, f"{key} ", f"{key}s"))] = container.pop(key)
    elif how == 2:
        container[key] = chance.choice(_STRINGS)
    elif how == 3:
        container[key] = [there] if chance.random() < 0.5 else {str(key): there}
    elif how == 4 and isinstance(there, int | float):
        container[key] = chance.choice(
            (-there, there + 1, there - 1, float(there) if abs(there) < 1e300 else 0, str(there), *_NUMBERS)
        )
    elif how == 5:
        other, where = chance.choice(places)
        container[key] = json.loads(json.dumps(other[where])) if where in other or isinstance(other, list) else None
    elif how == 6 and isinstance(container, list):
        container.insert(key, there)
    else:
        holes.append(chance.choice(_RAW))
        container[key] = _HOLE
    text = json.dumps(value)
    for raw in holes:
        text = text.replace(json.dumps(_HOLE), raw)
    return text.encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Where values stand in a value, in the order of the text."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        container = todo.pop()
        keys = container.keys() if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                todo.append(container[key])
    return found
