"""Settings of the whole process that a script may change while it trains, and on which its results depend."""

from __future__ import annotations

import decimal
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch


def read_settings() -> dict[str, Any]:
    """As plain data: torch's default type, choice of algorithms and number of threads, NumPy's errors, the precision of
    ``decimal``, the working folder.
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
    np.seterr(**found["numpy"])
    context = decimal.getcontext()
    context.prec, context.rounding = found["decimal"]
    if found["folder"] not in ("", here["folder"]):
        os.chdir(found["folder"])
