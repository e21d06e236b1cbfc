"""Settings of the whole process that a script may change while it trains, and on which its results depend."""

from __future__ import annotations

import decimal
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from shared_core.worker.comm.compat import PRINTED

#: Their product is flushed to zero where torch flushes such numbers; nothing else tells.
_SMALLEST: float = 5e-324
_ONE: float = 1.0
#: Choices that torch makes, on CPUs too: how one is read, and how it is set.
_CHOICES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    "math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "mkldnn": (lambda: bool(torch.backends.mkldnn.enabled), torch.backends.mkldnn.set_flags),
    "denormal": (lambda: _SMALLEST * _ONE == 0.0, torch.set_flush_denormal),
    "anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "lower": (lambda: torch.get_autocast_dtype("cpu"), lambda to: torch.set_autocast_dtype("cpu", to)),
    "tensors": (lambda: dict(PRINTED), PRINTED.update),
}
#: Beginnings of environment variables of a job, which a replacement has its own of.
_OF_THE_JOB = (b"SWIFT_", b"TORCHELASTIC_")


class ProcessSettings:
    """Reads and sets them. What the environment was at the first call, a replacement's script has set too."""

    def __init__(self) -> None:
        self._begun: dict[bytes, bytes] | None = None
        self._seen, self._changed = dict[bytes, bytes](), dict[bytes, bytes | None]()

    def read(self) -> dict[str, Any]:
        """As plain data: torch's default type, choices and number of threads, NumPy's errors and how it prints, the
        precision of ``decimal``, levels of logging, the working folder, and what has changed in the environment.
        """
        context, folder = decimal.getcontext(), ""
        with suppress(OSError):  # it has been removed
            folder = os.getcwd()
        return {
            "dtype": torch.get_default_dtype(),
            "deterministic": torch.get_deterministic_debug_mode(),
            "threads": torch.get_num_threads(),
            "choices": {name: read() for name, (read, _) in _CHOICES.items()},
            "numpy": dict(np.geterr()),
            "printed": {k: v for k, v in np.get_printoptions().items() if k not in ("formatter", "override_repr")},
            "decimal": (context.prec, context.rounding),
            "logging": (logging.root.level, logging.root.manager.disable),
            "folder": folder,
            "environment": self._changes(),
        }

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
        here = self.read()
        if found["dtype"] != here["dtype"]:
            torch.set_default_dtype(found["dtype"])
        if found["deterministic"] != here["deterministic"]:
            torch.set_deterministic_debug_mode(found["deterministic"])
        if found["threads"] != here["threads"]:
            torch.set_num_threads(found["threads"])
        for name, to in found["choices"].items():
            if to != here["choices"][name]:
                _CHOICES[name][1](to)
        np.seterr(**found["numpy"])
        np.set_printoptions(**found["printed"])
        context = decimal.getcontext()
        context.prec, context.rounding = found["decimal"]
        if found["logging"] != here["logging"]:
            logging.root.setLevel(found["logging"][0])
            logging.disable(found["logging"][1])
        if found["folder"] not in ("", here["folder"]):
            os.chdir(found["folder"])
        for key, value in found["environment"].items():
            if value is None:
                os.environb.pop(key, None)
            else:
                os.environb[key] = value


def _environment() -> dict[bytes, bytes]:
    """The live dictionary below ``os.environ``: to read it through ``os.environ`` takes 150 µs."""
    found: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return found
