"""Settings of the whole process that a script may change while it trains, and on which its results depend."""

from __future__ import annotations

import decimal
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

#: Choices between kernels, on CPUs too: how one is read, and how it is set.
_KERNELS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    "math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "mkldnn": (lambda: torch.backends.mkldnn.enabled, torch.backends.mkldnn.set_flags),
    "denormal": (lambda: _SMALLEST * _ONE == 0.0, torch.set_flush_denormal),
}
#: Flushed to zero where torch flushes such numbers; nothing else tells.
_SMALLEST, _ONE = 5e-324, 1.0


def read_settings() -> dict[str, Any]:
    """As plain data: torch's default type, choice of algorithms and kernels and number of threads, NumPy's errors, the
    precision of ``decimal``, the working folder.
    """
    context, folder = decimal.getcontext(), ""
    with suppress(OSError):  # it has been removed
        folder = os.getcwd()
    return {
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "threads": torch.get_num_threads(),
        "numpy": dict(np.geterr()),
        "decimal": (context.prec, context.rounding),
        "folder": folder,
        "kernels": {name: read() for name, (read, _) in _KERNELS.items()},
    }


def put_settings(found: Mapping[str, Any]) -> None:
    """Put back what :func:`read_settings` has returned in another process."""
    here = read_settings()
    if found["dtype"] != here["dtype"]:
        torch.set_default_dtype(found["dtype"])
    if found["deterministic"] != here["deterministic"]:
        torch.set_deterministic_debug_mode(found["deterministic"])
    if found["threads"] != here["threads"]:
        torch.set_num_threads(found["threads"])
    for name, value in found["kernels"].items():
        if value != here["kernels"][name]:
            _KERNELS[name][1](value)
    np.seterr(**found["numpy"])
    context = decimal.getcontext()
    context.prec, context.rounding = found["decimal"]
    if found["folder"] not in ("", here["folder"]):
        os.chdir(found["folder"])
