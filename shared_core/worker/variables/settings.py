"""Settings of the whole process that a script may change while it trains, and on which its results depend."""

from __future__ import annotations

import decimal
import gc
import locale
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shared_core.worker.comm.compat import PRINTED

#: Their product is flushed to zero where torch flushes such numbers; nothing else tells.
_SMALLEST: float = 5e-324
_ONE: float = 1.0
_NUMBERS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _decimal() -> tuple[Any, ...]:
    _, (*numbers, flags, traps) = decimal.getcontext().__reduce__()
    return *numbers, [each.__name__ for each in flags], [each.__name__ for each in traps]


def _set_decimal(to: Sequence[Any]) -> None:
    context = decimal.getcontext()  # in place: the script may hold it
    for name, value in zip(_NUMBERS, to[:-2], strict=True):
        setattr(context, name, value)
    for signals, names in zip((context.flags, context.traps), to[-2:], strict=True):
        signals.update((each, each.__name__ in names) for each in signals)


def _set_collector(to: Sequence[int]) -> None:
    gc.enable() if to[0] else gc.disable()
    gc.set_threshold(*to[1:])


def _set_logging(to: Sequence[int]) -> None:
    logging.root.setLevel(to[0])
    logging.disable(to[1])


def _printed() -> dict[str, Any]:
    return {k: v for k, v in np.get_printoptions().items() if k not in ("formatter", "override_repr")}


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return ""


#: How each is read, as plain data, and how it is set.
_CHOICES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    # choices that torch makes, on CPUs too
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    "math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "mkldnn": (lambda: bool(torch.backends.mkldnn.enabled), torch.backends.mkldnn.set_flags),
    "denormal": (lambda: _SMALLEST * _ONE == 0.0, torch.set_flush_denormal),
    "anomalies": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda to: torch.autograd.set_detect_anomaly(*to),
    ),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "lower": (lambda: torch.get_autocast_dtype("cpu"), lambda to: torch.set_autocast_dtype("cpu", to)),
    "tensors": (lambda: dict(PRINTED), PRINTED.update),
    "numpy": (lambda: dict(np.geterr()), lambda to: np.seterr(**to)),
    "printed": (_printed, lambda to: np.set_printoptions(**to)),
    "decimal": (_decimal, _set_decimal),
    "logging": (lambda: (logging.root.level, logging.root.manager.disable), _set_logging),
    "locale": (lambda: locale.setlocale(locale.LC_ALL), lambda to: locale.setlocale(locale.LC_ALL, to)),
    "collector": (lambda: (gc.isenabled(), *gc.get_threshold()), _set_collector),
    "recursion": (sys.getrecursionlimit, sys.setrecursionlimit),
    "digits": (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    "folder": (_folder, lambda to: os.chdir(to) if to else None),
}
#: Beginnings of environment variables of a job, which a replacement has its own of.
_OF_THE_JOB = (b"SWIFT_", b"TORCHELASTIC_")


class ProcessSettings:
    """Reads and sets them. What the environment was at the first call, a replacement's script has set too."""

    def __init__(self) -> None:
        self._begun: dict[bytes, bytes] | None = None
        self._seen, self._changed = dict[bytes, bytes](), dict[bytes, bytes | None]()

    def read(self) -> dict[str, Any]:
        """As plain data; of the environment, what has changed."""
        return {"choices": {name: read() for name, (read, _) in _CHOICES.items()}, "environment": self._changes()}

    def _changes(self) -> dict[bytes, bytes | None]:
        now = _environment()
        if self._begun is None:
            self._begun = self._seen = dict(now)
        elif now != self._seen:
            self._seen = dict(now)
            names = sorted(name for name in {*now, *self._begun} if not name.startswith(_OF_THE_JOB))
            self._changed = {name: now.get(name) for name in names if now.get(name) != self._begun.get(name)}
        return self._changed

    def put(self, found: Mapping[str, Any]) -> None:
        """Put back what :meth:`read` has returned in another process."""
        for name, to in found["choices"].items():
            read, put = _CHOICES[name]
            if to != read():
                put(to)
        for key, value in found["environment"].items():
            if value is None:
                os.environb.pop(key, None)
            else:
                os.environb[key] = value


def _environment() -> dict[bytes, bytes]:
    """The live dictionary below ``os.environ``: to read it through ``os.environ`` takes 150 µs."""
    found: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return found
