"""The state of the global random generators, of torch and its devices, Python and numpy."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from shared_core.devices import random_states, set_random_states
from shared_core.encoding.plain import dumps, loads
from shared_core.encoding.raw_memory import memory_of

#: What a Mersenne Twister of numpy has in memory: 624 words and a position.
_TWISTER_BYTES = 625 * 4
_REFERENCES = ctypes.sizeof(ctypes.c_ssize_t)


class _Remembered:
    """The encoded state of one generator, made again only when its memory has changed.

    Few scripts draw from Python's and numpy's generators at each batch, and to ask these for their state takes a
    hundred times longer than to look whether their memory is what it was. ``memory`` copies that; None where it is not
    known to say all.
    """

    def __init__(self, memory: Callable[[], Any], state: Callable[[], Any]) -> None:
        self._memory, self._state = memory, state
        self._seen: Any = None
        self._encoded = b""

    def encoded(self) -> bytes:
        memory = self._memory()
        if memory is None or memory != self._seen:
            self._encoded, self._seen = dumps(self._state()), memory
        return self._encoded


def _object(thing: Any, size: int) -> bytes:
    """The memory of a Python object, apart from its count of references."""
    return ctypes.string_at(id(thing) + _REFERENCES, size - _REFERENCES)


def python_memory(generator: random.Random) -> Any:
    """All that the state of a generator of Python's consists of."""
    return _object(generator, random.Random.__base__.__basicsize__), generator.gauss_next  # type: ignore[union-attr, attr-defined]


def numpy_memory(generator: Any, bits: Any) -> Any:
    """All of the state of a numpy ``RandomState``; None if it is no Mersenne Twister."""
    if type(bits).__name__ != "MT19937":
        return None
    # The object itself holds the second of two normal numbers that are drawn together.
    return _object(generator, type(generator).__basicsize__), ctypes.string_at(
        bits.ctypes.state_address, _TWISTER_BYTES
    )


def _shows_all(memory: Callable[[Any], Any], generator: Any, draw: Callable[[], Any]) -> bool:
    """Whether the memory changes with each draw of a normal number; every second one takes what is left."""
    seen = [memory(generator)]
    for _ in range(4):
        draw()
        seen.append(memory(generator))
    return all(one != two for one, two in zip(seen, seen[1:], strict=False))


def _of_python() -> _Remembered:
    own, trial = random.getstate.__self__, random.Random(0)  # type: ignore[attr-defined]
    known = _shows_all(python_memory, trial, lambda: trial.gauss(0.0, 1.0))
    return _Remembered(lambda: python_memory(own) if known else None, random.getstate)


def _of_numpy(numpy: Any) -> _Remembered:
    own, twister = numpy.random.get_state.__self__, numpy.random.MT19937(0)
    trial = numpy.random.RandomState(twister)
    known = _shows_all(lambda it: numpy_memory(it, twister), trial, trial.standard_normal)
    bits = getattr(numpy.random, "get_bit_generator", lambda: None)
    return _Remembered(lambda: numpy_memory(own, bits()) if known else None, numpy.random.get_state)


_remembered: dict[str, _Remembered] = {}


def random_state() -> dict[str, Any]:
    # As bytes, which are several times cheaper to publish than a tensor.
    of_torch = torch.default_generator.get_state()
    state: dict[str, Any] = {"torch": bytes(memory_of(of_torch)[: of_torch.nbytes])}
    of_devices = random_states()
    if of_devices:
        state["devices"] = of_devices
    if "python" not in _remembered:
        _remembered["python"] = _of_python()
    state["python"] = _remembered["python"].encoded()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if "numpy" not in _remembered:
            _remembered["numpy"] = _of_numpy(numpy)
        state["numpy"] = _remembered["numpy"].encoded()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    of_torch = state["torch"]
    torch.set_rng_state(
        torch.frombuffer(bytearray(of_torch), dtype=torch.uint8) if isinstance(of_torch, bytes) else of_torch
    )
    set_random_states(state.get("devices", []))
    random.setstate(_decoded(state["python"]))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(_decoded(state["numpy"]))


def _decoded(value: Any) -> Any:
    return loads(value) if isinstance(value, bytes) else value  # those of an added worker are made as they are
