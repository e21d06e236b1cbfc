"""The random state that reading data can touch: the three global generators and those that loaders own. CPU only."""

from __future__ import annotations

import array
import ctypes
import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

#: Global generators as plain data: ``torch`` (bytes), ``python`` and ``numpy`` (tuples); any subset of the three.
RandomParts = dict[str, Any]

_MANY_NOTES = 256


class RawRandom:
    """The global generators as the libraries return them, compared and packed on demand.

    ``earlier``, of the same process, gives NumPy's state if it has not moved since, which is several times cheaper. Do
    not pass it after NumPy's generator has been set.
    """

    __slots__ = ("torch", "python", "numpy", "_words")

    def __init__(self, earlier: RawRandom | None = None) -> None:
        self.torch = torch.default_generator.get_state()
        self.python = random.getstate()
        self._words = _numpy_words()
        # A normal number that is kept for the next draw (index 3) can be used up while the words stay.
        still = earlier is not None and self._words == earlier._words and not earlier.numpy[3]
        self.numpy: Any = earlier.numpy if earlier is not None and still else np.random.get_state(legacy=True)

    def pack(self, names: frozenset[str] | None = None) -> RandomParts:
        """Plain data of the named generators, of all where ``names`` is None."""
        parts: RandomParts = {}
        if names is None or "torch" in names:
            parts["torch"] = self.torch.numpy().tobytes()
        if names is None or "python" in names:
            version, words, gauss = self.python
            parts["python"] = (version, array.array("I", words).tobytes(), gauss)
        if names is None or "numpy" in names:
            kind, keys, *rest = self.numpy
            parts["numpy"] = (kind, keys.tobytes(), *rest)
        return parts


def _numpy_words() -> bytes:
    """Words and position of NumPy's global generator, read from memory: 100 times faster than its state."""
    source = vars(np.random)["get_bit_generator"]()  # public, but not in the stubs
    if type(source) is not np.random.MT19937:
        return repr(np.random.get_state(legacy=False)).encode()
    return ctypes.string_at(source.ctypes.state_address, 4 * (624 + 1))


def changed(before: RawRandom, after: RawRandom) -> frozenset[str]:
    """Names of the generators that were drawn from between the two."""
    names = set()
    if not torch.equal(before.torch, after.torch):
        names.add("torch")
    if before.python != after.python:
        names.add("python")
    one, two = before.numpy, after.numpy
    if one is not two and (one[2:] != two[2:] or not np.array_equal(one[1], two[1])):
        names.add("numpy")
    return frozenset(names)


class DrawLog:
    """Notes what a sequence of draws started from, leaving out what follows from the draw before. A generator that only
    these draws use needs one note; one that others use in between (dropout) needs one a draw.
    """

    def __init__(self) -> None:
        self.notes: dict[int, RandomParts] = {}
        self._after: RawRandom | None = None

    def note(self, number: int, before: RawRandom, after: RawRandom) -> None:
        """Draw ``number`` took the generators from ``before`` to ``after``."""
        consumed = changed(before, after)
        if self._after is not None and consumed:
            consumed &= changed(self._after, before)
        if consumed:
            self.notes[number] = before.pack(consumed)
            if len(self.notes) == _MANY_NOTES:
                warnings.warn(
                    "this loader draws from a global random generator that the model draws from too; its state is "
                    f"published with every batch ({_MANY_NOTES} so far). Give the sampler or data set a "
                    "torch.Generator of its own.",
                    stacklevel=2,
                )
        self._after = after


def read_random() -> RandomParts:
    """All global generators as plain data."""
    return RawRandom().pack()


def write_random(parts: Mapping[str, Any]) -> None:
    """Set the generators that ``parts`` holds; inverse of :func:`read_random`."""
    if "torch" in parts:
        torch.default_generator.set_state(torch.frombuffer(bytearray(parts["torch"]), dtype=torch.uint8))
    if "python" in parts:
        version, words, gauss = parts["python"]
        random.setstate((version, tuple(array.array("I", words)), gauss))
    if "numpy" in parts:
        kind, keys, *rest = parts["numpy"]
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))


def restore_raw(raw: RawRandom) -> None:
    """Set all global generators to ``raw``, without packing."""
    torch.default_generator.set_state(raw.torch)
    random.setstate(raw.python)
    np.random.set_state(raw.numpy)


def seed_random(seed: int) -> None:
    """Seed the three global generators (of this process, CPU) from one 64-bit number."""
    torch.default_generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)


def generator_state(value: object) -> Any:
    """State of a generator object as plain data, None if ``value`` is no generator."""
    if isinstance(value, torch.Generator):
        return ("torch", value.get_state().cpu().numpy().tobytes())
    if isinstance(value, random.Random):
        return ("python", value.getstate())
    if isinstance(value, np.random.Generator):
        return ("generator", _state_of_bits(value.bit_generator))
    if isinstance(value, np.random.BitGenerator):
        return ("bits", _state_of_bits(value))
    if isinstance(value, np.random.RandomState):
        return ("legacy", value.get_state(legacy=False))
    return None


def new_generator(state: tuple[str, Any]) -> Any:
    """A generator of the host with this state of :func:`generator_state`."""
    kind, data = state
    made: Any
    if kind == "torch":
        made = torch.Generator()
    elif kind == "python":
        made = random.Random()  # noqa: S311 (of the script)
    elif kind == "generator":
        made = np.random.Generator(getattr(np.random, data["bit_generator"])())
    elif kind == "bits":
        made = getattr(np.random, data["bit_generator"])()
    else:
        made = np.random.RandomState()  # noqa: NPY002 (of the script)
    set_generator_state(made, state)
    return made


def set_generator_state(value: Any, state: tuple[str, Any]) -> None:
    """Inverse of :func:`generator_state`, in place."""
    kind, data = state
    if kind == "torch":
        value.set_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    elif kind == "python":
        version, words, gauss = data
        value.setstate((version, tuple(words), gauss))
    elif kind in ("generator", "bits"):
        _set_state_of_bits(value.bit_generator if kind == "generator" else value, data)
    else:
        value.set_state(data)


def _state_of_bits(bits: Any) -> dict[str, Any]:
    """With the seeds that its children get."""
    seeds = bits.seed_seq
    if not isinstance(seeds, np.random.SeedSequence):
        return dict(bits.state)
    return {**bits.state, "seeds": {**seeds.state, "entropy": _as_numbers(seeds.entropy)}}


def _set_state_of_bits(bits: Any, data: Mapping[str, Any]) -> None:
    wanted, here = data.get("seeds"), bits.seed_seq
    if wanted is not None and isinstance(here, np.random.SeedSequence):
        mine, count = {**here.state, "entropy": _as_numbers(here.entropy)}, wanted["n_children_spawned"]
        if mine | {"n_children_spawned": count} == wanted and mine["n_children_spawned"] <= count:
            here.spawn(count - mine["n_children_spawned"])  # others may hold it
        else:
            bits.__setstate__((bits.state, np.random.SeedSequence(**wanted)))
    bits.state = {name: value for name, value in data.items() if name != "seeds"}


def _as_numbers(entropy: Any) -> Any:
    return entropy if isinstance(entropy, int) else np.asarray(entropy).tolist()
