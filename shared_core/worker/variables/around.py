"""What stands between a script's ``for`` and the passes and epochs that it iterates: ``enumerate``, ``zip`` and others
of C, which count for themselves, and which no variable holds.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import gc
import inspect
import itertools
import sys
import types
import warnings
import weakref
from collections.abc import Sequence
from operator import length_hint
from pathlib import Path
from typing import Any

from shared_core.worker.variables.kinds import kind_of
from shared_core.worker.variables.scopes import is_script

_DEEPEST = 6
#: Iterators over what is in memory: the next item changes nothing else.
_MEMORY: tuple[Any, ...] = ([], (), range(0), "", b"", {}, set())
_PURE = tuple(type(iter(each)) for each in _MEMORY)
#: What :func:`.kinds.kind_of` says of objects whose attributes are captured.
_PYTHONS = frozenset({"object", "fixed"})
#: They ask all that they read from for an item, in order, each time that they are asked for one.
_TOGETHER = (zip, map)
_NOT_SHOWN = "not shown"
_NOTHING_BEFORE = frozenset({"CACHE", "PRECALL", "EXTENDED_ARG"})

#: What an iterator is, and where: plain data.
Place = list[Any]


def is_bare(frame: types.FrameType) -> bool:
    """Whether a script has called, in the running instruction of this frame, what a ``for`` iterates itself."""
    return is_script(frame.f_code, frame.f_globals) and _iterates_next(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=256)
def _iterates_next(code: types.CodeType, last: int) -> bool:
    after = (each.opname for each in dis.get_instructions(code) if each.offset > last)
    found = itertools.islice((name for name in after if name not in _NOTHING_BEFORE), 2)
    return list(found) == ["GET_ITER", "FOR_ITER"]


def around(thing: Any) -> tuple[list[Any], list[Any]]:
    """Iterators of C that ask this one for its items, directly or through others, the innermost first; and all that
    asks, those of Python too. Slow: all objects are looked at. Called by what is asked.
    """
    found: list[Any] = []
    chain = [thing, *_of_python(thing)]
    for each in tuple(chain):
        for _ in range(_DEEPEST):
            each = _outer(each)
            if each is None:
                break
            (chain if kind_of(type(each)) in _PYTHONS or isinstance(each, types.GeneratorType) else found).append(each)
    return found, [*chain, *found]


def _of_python(thing: Any) -> list[Any]:
    """Generators, and objects with ``__next__``, that are asking this one. What they hold is captured: with the
    variables of running functions, or as attributes.
    """
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and not _runs(frame, thing):
        frame = frame.f_back
    frames: list[types.FrameType] = []
    while frame is not None and (frame := frame.f_back) is not None and _is_asked(frame):
        frames.append(frame)
    if not frames:
        return []
    running = {id(each.gi_frame): each for each in gc.get_objects() if type(each) is types.GeneratorType}
    return [found for each in frames if (found := running.get(id(each), _own_of(each))) is not None]


def _runs(frame: types.FrameType, thing: Any) -> bool:
    return getattr(thing, "gi_frame", None) is frame or (frame.f_code.co_name == "__next__" and _own_of(frame) is thing)


def _is_asked(frame: types.FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR) or frame.f_code.co_name == "__next__"


def _own_of(frame: types.FrameType) -> Any:
    """The object of the method that runs."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names and frame.f_code.co_argcount else None


def _outer(thing: Any) -> Any:
    """What holds this one and asks it; of generators those that do not run, which show what they hold."""
    for each in gc.get_referrers(thing):
        if type(each) is tuple:  # zip and map hold what they read from in one
            each = next((one for one in gc.get_referrers(each) if isinstance(one, _TOGETHER)), None)
        elif type(each) is dict:  # attributes
            each = next((one for one in gc.get_referrers(each) if hasattr(type(one), "__next__")), None)
        if each is not None and hasattr(type(each), "__next__"):
            return each
    return None


def places(found: Sequence[Any], chain: Sequence[Any]) -> list[Place]:
    """Where each of :func:`around` is."""
    return [_place(each, chain) for each in found]


def _place(each: Any, chain: Sequence[Any]) -> Place:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that iterators are pickled: here only their places are looked at
        try:
            parts = each.__reduce__()[1:]
        except TypeError:
            return [type(each).__name__, _NOT_SHOWN]
    if type(each) is enumerate:
        return ["enumerate", parts[0][1]]
    if type(each) is filter:
        return ["filter"]
    if isinstance(each, _TOGETHER):
        members = _members(each, parts)
        mine = next((i for i, one in enumerate(members) if any(one is link for link in chain)), len(members))
        return [type(each).__name__, mine, [_of_member(one) for i, one in enumerate(members) if i != mine]]
    return [type(each).__name__, *(_simple(one) for part in parts if isinstance(part, tuple) for one in part)]


def _members(each: Any, parts: Any) -> tuple[Any, ...]:
    return tuple(parts[0][1:] if type(each) is map else parts[0])


def _of_member(one: Any) -> Any:
    if isinstance(one, _PURE):
        return ["left", length_hint(one)]
    if type(one) is itertools.count and isinstance(n := one.__reduce__()[1][0], int):
        return ["count", n]
    return [type(one).__qualname__, _NOT_SHOWN]


def _simple(one: Any) -> Any:
    return one if isinstance(one, (int, float, str, type(None))) else type(one).__qualname__


def can_be_put_back(place: Place) -> bool:
    """Whether an iterator that is at this place can be moved there in a replacement."""
    if place[0] in ("zip", "map"):
        return place[1] == 0 and all(each[1] != _NOT_SHOWN for each in place[2])
    return place[0] in ("enumerate", "filter")


def put_back(found: Sequence[Any], chain: Sequence[Any], theirs: Sequence[Place]) -> str:
    """Move what is around an iterator to where it was in another run.

    Returns:
        The name of what cannot be moved; empty if there is none.
    """
    mine = places(found, chain)
    if [each[0] for each in mine] != [each[0] for each in theirs]:
        return next((str(each[0]) for each in (*theirs, *mine)), "for")
    for i, (each, here, there) in enumerate(zip(found, mine, theirs, strict=True)):
        if type(each) is enumerate and not _count_from(each, there[1]):
            return "enumerate"
        if here != there and _NOT_SHOWN not in there and isinstance(each, _TOGETHER) and can_be_put_back(there):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                members = _members(each, each.__reduce__()[1:])
            for one, (_, now), (_, then) in zip(members[1:], here[2], there[2], strict=True):
                for _ in range(abs(now - then)):
                    next(one)
        if places(found, chain)[i] != there or _NOT_SHOWN in there:
            return str(there[0])
    return ""


def _count_from(each: Any, number: int) -> bool:
    """Set the next number of an ``enumerate``, which has no method for it: it lies behind what all objects have, which
    is checked before and afterwards."""
    place = ctypes.c_ssize_t.from_address(id(each) + object.__basicsize__)
    if place.value != each.__reduce__()[1][1] or not 0 <= number < 1 << 62:
        return False
    place.value = number
    return bool(each.__reduce__()[1][1] == number)


def script_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost frame of the script, from this one outward."""
    while frame is not None and not is_script(frame.f_code, frame.f_globals):
        frame = frame.f_back
    return frame


class _Walk:
    """One loop of a script that is running.

    Args:
        thing: what it iterates.
        bare: nothing is around it, as its code shows.
    """

    def __init__(self, thing: Any, bare: bool) -> None:
        frame = script_frame(sys._getframe(2))
        self.ref = weakref.ref(thing)
        self.key = (frame.f_code, frame.f_lasti) if frame is not None else None
        self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "the script"
        self.found: list[Any] | None = [] if bare else None
        self.chain: list[Any] = []

    def places(self) -> list[Place]:
        """Where all that is around is."""
        return places(self.found or (), self.chain)


class Walks:
    """The loops of a script that are running, and what is around what they iterate."""

    def __init__(self) -> None:
        #: Places in the script where nothing was around.
        self._bare: set[tuple[types.CodeType, int]] = set()
        self._walks: list[_Walk] = []

    def begin(self, thing: Any, *, bare: bool = False) -> None:
        """A loop of the script asks this for its first item. Called by what it asks.

        Args:
            thing: what is asked.
            bare: see :func:`is_bare`.
        """
        self._walks.append(_Walk(thing, bare))

    def end(self, thing: Any) -> None:
        """It has left it."""
        self._walks = [each for each in self._walks if each.ref() not in (None, thing)]

    def capture(self) -> list[list[Place]]:
        """Where all that is around is, from the outermost loop inward."""
        for walk in self._running():
            self._look(walk)
        return [walk.places() for walk in self._running()]

    def cannot_move(self) -> list[tuple[str, str]]:
        """(place in the script, name) of all that is around and cannot be put back in a replacement."""
        return [
            (walk.where, place[0]) for walk in self._running() for place in walk.places() if not can_be_put_back(place)
        ]

    def restore(self, captured: Sequence[Sequence[Place]]) -> tuple[str, str] | None:
        """Inverse of :meth:`capture`, in another process; (place in the script, name) of what cannot be put back."""
        for walk, theirs in zip(self._running(), captured, strict=False):
            if not theirs:
                walk.found = walk.found or []
                continue
            walk.found = None
            self._look(walk)
            if name := put_back(walk.found or (), walk.chain, theirs):
                return walk.where, name
        return None

    def _running(self) -> list[_Walk]:
        return [each for each in self._walks if each.ref() is not None]

    def _look(self, walk: _Walk) -> None:
        if walk.found is None:
            walk.found, walk.chain = ([], []) if walk.key in self._bare else around(walk.ref())
            if not walk.found:
                walk.chain = []
                if walk.key is not None:
                    self._bare.add(walk.key)
