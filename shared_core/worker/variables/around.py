"""Iterators of C between a script's ``for`` and the passes and epochs that it iterates: ``enumerate``, ``zip``
and others.

They count for themselves, and no variable holds them. They hold what they iterate; nobody else may hold them: a loop
has been left when they have let go of it. So they are looked for while they ask for an item, and what is published is
how often they have asked.
"""

from __future__ import annotations

import ast
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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shared_core.worker.variables.expressions import asks_again, collects, loops_around, way_to
from shared_core.worker.variables.kinds import LIBRARIES, OURS, kind_of, root_of
from shared_core.worker.variables.scopes import is_script, script_frames

_MOST = 12
_MEMORY: tuple[Any, ...] = ([], (), range(0), "", b"", {}, set())
#: Iterators over what is in memory: the next item changes nothing else.
_PURE = (*(type(iter(each)) for each in _MEMORY), itertools.count)
#: Each time they are asked for an item, they ask all that they read from, in order.
_TOGETHER = (zip, map)
#: What :func:`.kinds.kind_of` says of objects whose attributes are captured.
_PYTHONS = frozenset({"object", "fixed"})
_NOTHING = frozenset({"CACHE", "PRECALL", "EXTENDED_ARG"})
#: Stands before the names of those whose place cannot be given to another process.
_STUCK = "!"


# -- looking ----------------------------------------------------------------------------------------------------------


def is_bare(frame: types.FrameType) -> bool:
    """Whether a script's ``for`` iterates directly the result of the call that runs in this frame."""
    return is_script(frame.f_code, frame.f_globals) and _iterates_next(frame.f_code, frame.f_lasti)


def calls_for_item(frame: types.FrameType) -> bool:
    """Whether the script asks for an item by a call, such as ``next(iter(loader))``, and not in a ``for``."""
    asking = next(iter(script_frames(frame)), None)
    if asking is None:
        return False
    at = (each.opname for each in dis.get_instructions(asking.f_code) if each.offset == asking.f_lasti)
    return next(at, "").startswith("CALL")


@functools.lru_cache(maxsize=256)
def _iterates_next(code: types.CodeType, last: int) -> bool:
    after = (each.opname for each in dis.get_instructions(code) if each.offset > last)
    found = itertools.islice((name for name in after if name not in _NOTHING), 2)
    return list(found) == ["GET_ITER", "FOR_ITER"]


def links_around(thing: Any) -> list[Any]:
    """All that asks this one for its items, directly or through others, the innermost first. Slow: it looks at all
    objects. ``thing`` calls this itself, from its own frame.
    """
    found = [thing]
    for each in (thing, *_asking_in_python(thing)):
        while each is not None and len(found) < _MOST:
            if all(each is not one for one in found):
                found.append(each)
            each = _outer(each, found)
    return found[1:]


def _asking_in_python(thing: Any) -> list[Any]:
    """Generators, and objects with ``__next__``, that are running and ask this one."""
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
    """The object whose method runs in this frame."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names and frame.f_code.co_argcount else None


def _outer(thing: Any, known: Sequence[Any]) -> Any:
    """What holds this one and asks it, except those already known. Of generators, only those not running show what
    they hold.
    """
    for each in gc.get_referrers(thing):
        if type(each) is tuple:  # zip and map hold what they read from in one
            each = next((one for one in gc.get_referrers(each) if isinstance(one, _TOGETHER)), None)
        elif type(each) is dict:  # attributes
            each = next((one for one in gc.get_referrers(each) if hasattr(type(one), "__next__")), None)
        if each is not None and hasattr(type(each), "__next__") and all(each is not one for one in known):
            return each
    return None


# -- what collects items ----------------------------------------------------------------------------------------------

_COMPREHENSION, _FOR = "a comprehension", "a for statement that counts for itself"
#: Functions that ask for one item and keep nothing.
_ONE = frozenset({"next", "__next__", "send"})


def collectors(frame: types.FrameType | None, outermost: types.CodeType | None = None) -> Iterator[str]:
    """Names of what asks for items and keeps what it makes of them where no variable shows it: a comprehension, or a
    function such as ``sum``. ``frame`` runs what is asked. Where ``outermost`` is given, comprehensions that call the
    code that asks count too, as far as to the frame of ``outermost``.
    """
    frame = frame.f_back if frame is not None else None
    while frame is not None and (_is_asked(frame) or frame.f_code.co_filename.startswith(OURS)):
        if _collects(frame):
            yield _COMPREHENSION
        frame = frame.f_back
    if frame is None:
        return
    if _collects(frame):
        yield _COMPREHENSION
    elif function := _collecting(frame):
        yield function
    while outermost is not None and frame.f_code is not outermost and (frame := frame.f_back) is not None:
        if _collects(frame):
            yield _COMPREHENSION


def _collects(frame: types.FrameType) -> bool:
    return is_script(frame.f_code, frame.f_globals) and collects(frame.f_code, frame.f_lasti)


def _collecting(frame: types.FrameType) -> str:
    """Name of the function that asks from this frame for more than one item: one in C that it calls, or its own in a
    library.
    """
    if not is_script(frame.f_code, frame.f_globals):
        module = str(frame.f_globals.get("__name__"))
        return "" if module.partition(".")[0] in LIBRARIES else f"{module}.{frame.f_code.co_name}()"
    call = next(iter(way_to(frame.f_code, frame.f_lasti)), None)
    if not isinstance(call, ast.Call) or asks_again(frame.f_code, frame.f_lasti):
        return ""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return "" if name in _ONE else f"{ast.unparse(call.func)}()"


#: A place in running code: what is in ``f_code`` and ``f_lasti`` of a frame.
Place = tuple[types.CodeType, int]


def places(frame: types.FrameType | None) -> list[Place]:
    """Where the script is: in all its running functions, from ``frame`` outward."""
    return [(each.f_code, each.f_lasti) for each in script_frames(frame)]


def _loops(made: Iterable[Place]) -> frozenset[ast.AST]:
    return frozenset[ast.AST]().union(*(loops_around(*each) for each in made))


def counts_for_itself(frame: types.FrameType | None, before: frozenset[ast.AST]) -> bool:
    """Whether a ``for`` statement, other than those of ``before``, asks for an item in its body. Its place is on the
    interpreter's stack: a replacement would go through it from its beginning.
    """
    return not _loops(places(frame)) <= before


# -- what can be moved ------------------------------------------------------------------------------------------------


def kinds_of(links: Sequence[Any], thing: Any) -> list[str]:
    """Names of the iterators that count for themselves, the innermost first; see :data:`_STUCK`."""
    found: list[str] = []
    counts = True  # each is asked as often as the thing
    for each in links:
        if isinstance(each, types.GeneratorType) or kind_of(type(each)) in _PYTHONS:
            counts = counts and _gives_one_for_one(each)
        elif type(each) is filter:
            counts = False
        else:
            movable = counts and (type(each) is enumerate or _can_move_together(each, (thing, *links)))
            found.append(type(each).__name__ if movable else _STUCK + type(each).__name__)
    return found


def _gives_one_for_one(each: Any) -> bool:
    if root_of(type(each)) == "tqdm" or root_of(type(each)) in ("shared_core", "lightning_swift", "accelerate_swift"):
        return True
    if not isinstance(each, types.GeneratorType):
        return False
    if "tqdm" in each.gi_code.co_filename or not is_script(each.gi_code, _globals_of(each)):
        return True  # of a loader, or of a progress bar
    names = [one.opname for one in dis.get_instructions(each.gi_code)]
    jumps = any("JUMP_IF" in name or "JUMP_FORWARD_IF" in name or "JUMP_BACKWARD_IF" in name for name in names)
    return names.count("FOR_ITER") == 1 and names.count("YIELD_VALUE") == 1 and not jumps


def _globals_of(each: types.GeneratorType[Any, Any, Any]) -> dict[str, Any]:
    return each.gi_frame.f_globals if each.gi_frame is not None else {}


def _can_move_together(each: Any, chain: Sequence[Any]) -> bool:
    members = _members(each) if isinstance(each, _TOGETHER) else ()
    return bool(members) and any(members[0] is one for one in chain) and all(type(one) in _PURE for one in members[1:])


def _members(each: Any) -> tuple[Any, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pickling iterators is deprecated; only what they hold is read here
        parts: tuple[Any, ...] = each.__reduce__()[1]
    return parts[1:] if type(each) is map else parts


def move(links: Sequence[Any], times: int) -> bool:
    """Advance these links by ``times`` items, if :func:`kinds_of` allows it; False if that cannot be."""
    for each in links:
        if type(each) is enumerate and not _count_on(each, times):
            return False
        if isinstance(each, _TOGETHER):
            for one in _members(each)[1:]:
                for _ in range(times):
                    next(one, None)
    return True


def _count_on(each: Any, times: int) -> bool:
    """Add to the number of an ``enumerate``, in its C structure: it has no method for that. The number lies right
    behind the object header. That is checked before and afterwards; False if it is not so.
    """
    number = each.__reduce__()[1][1]
    place = ctypes.c_ssize_t.from_address(id(each) + object.__basicsize__)
    if place.value != number or not 0 <= number + times < 1 << 62:
        return False
    place.value = number + times
    return bool(each.__reduce__()[1][1] == number + times)


# -- loops ------------------------------------------------------------------------------------------------------------


class _Walk:
    """One running loop of a script: what it iterates (held weakly), a word for that, and the frame that runs it."""

    def __init__(self, thing: Any, frame: types.FrameType | None, what: str) -> None:
        self.what = what
        self.ref = weakref.ref(thing)
        self.key = (frame.f_code, frame.f_lasti) if frame is not None else None
        self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "the script"
        self.kinds: list[str] | None = None
        self.given = 0
        #: See :func:`collectors`; ``begun``: it had collected something when the loop began.
        self.collectors: list[str] = []
        self.begun = False
        #: ``for`` statements in which it was made, where its items are asked for one by one; else None.
        self.before: frozenset[ast.AST] | None = None
        self.counts = False

    def stuck(self, kinds: Sequence[str]) -> list[tuple[str, str]]:
        """(place in the script, what) of all that cannot be moved in a replacement."""
        names = [each.removeprefix(_STUCK) for each in kinds if each.startswith(_STUCK)]
        names = [each if each == _FOR else f"{each}()" for each in names]
        return [(self.where, each) for each in (*self.collectors, *names)]


class Walks:
    """The running loops of a script, and what is around what they iterate."""

    def __init__(self) -> None:
        #: What is around, by the place in the script.
        self._known: dict[tuple[types.CodeType, int], list[str]] = {}
        self._walks: list[_Walk] = []

    def begin(
        self, thing: Any, what: str, *, bare: bool = False, first: bool = True, made: Sequence[Place] = ()
    ) -> None:
        """``thing`` calls this itself when a loop asks it for its first item. ``what`` is a word for it; ``bare``:
        see :func:`is_bare`; ``first``: no loop inside the outer one has ended before; ``made``: where ``thing`` was, if
        that is known and not where it is iterated.
        """
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and not is_script(frame.f_code, frame.f_globals):
            frame = frame.f_back
        self._walks = [each for each in self._walks if each.ref() not in (None, thing)]
        walk = _Walk(thing, frame, what)
        outer = next((each.key[0] for each in self._walks if each.key is not None), None)
        walk.collectors = list(collectors(sys._getframe(1)))
        if not (first or walk.collectors):
            walk.collectors = list(collectors(sys._getframe(1), outer))
            walk.begun = bool(walk.collectors)
        if made:
            walk.before = _loops(made)
        elif not bare and frame is not None and not asks_again(frame.f_code, frame.f_lasti):
            whole = [each.key for each in self._walks if each.key is not None and each.what == "epochs"]
            walk.before = _loops(whole).union(*(way_to(*each) for each in whole)) if whole else None
        walk.kinds = [] if bare else self._known.get(walk.key) if walk.key is not None else None
        self._walks.append(walk)

    def end(self, thing: Any) -> None:
        self._walks = [each for each in self._walks if each.ref() not in (None, thing)]

    def gave(self, thing: Any, *, count: int | None = None) -> None:
        """It is about to give an item; or it has given ``count`` in all."""
        for each in self._walks:
            if each.ref() is thing:
                each.given = each.given + 1 if count is None else count

    def capture(self) -> list[tuple[str, list[str], int]]:
        """(word, what is around it, items given) of each loop, from the outermost inward."""
        for each in self._walks:
            if each.before is not None and getattr(each.ref(), "gi_running", True):  # it is asked now
                each.counts = counts_for_itself(sys._getframe(1), each.before)
        return [
            (each.what, self._look(each) + [_STUCK + _FOR] * each.counts, each.given)
            for each in self._walks
            if each.ref() is not None
        ]

    def stuck(self) -> list[tuple[str, str]]:
        """(place in the script, what) of all that cannot be moved in a replacement."""
        return [
            found for each in self._walks for found in each.stuck([*(each.kinds or ()), *[_STUCK + _FOR] * each.counts])
        ]

    def look(self, thing: Any) -> None:
        """Find what is around ``thing``. Call while it is being asked for an item."""
        for each in self._walks:
            if each.ref() is thing:
                self._look(each)

    def move(self, thing: Any, kinds: Sequence[str], given: int) -> tuple[str, str] | None:
        """In a replacement, when ``thing`` is asked for its first item: move what is around it to where the failed
        worker had it. Returns (place in the script, what) of what cannot be moved; None if all is well.
        """
        walk = next((each for each in self._walks if each.ref() is thing), None)
        if walk is None:
            return None
        walk.kinds, walk.given = [each for each in kinds if each != _STUCK + _FOR], given
        if walk.collectors and (given or walk.begun):
            return walk.stuck(())[0]
        if not kinds or not given:
            return None
        links = links_around(thing)
        mine = kinds_of(links, thing)
        stuck = walk.stuck((*kinds, *mine))
        if not stuck and mine != walk.kinds:
            stuck = walk.stuck((_STUCK + kinds[0],))
        if not stuck and not move(links, given):
            stuck = walk.stuck((_STUCK + "enumerate",))
        return next(iter(stuck), None)

    def restore(self, captured: Sequence[tuple[str, Sequence[str], int]]) -> tuple[str, str] | None:
        """Inverse of :meth:`capture`, except for loops that have given items here. Returns as :meth:`move`."""
        todo = list(captured)
        for walk in list(self._walks):
            place = next((each for each in todo if each[0] == walk.what), None)
            if place is not None:
                todo.remove(place)
                if not walk.given and (found := self.move(walk.ref(), *place[1:])) is not None:
                    return found
        return None

    def _look(self, walk: _Walk) -> list[str]:
        if walk.kinds is None:
            thing = walk.ref()
            walk.kinds = kinds_of(links_around(thing), thing)
            if walk.key is not None:
                self._known[walk.key] = walk.kinds
        return walk.kinds
