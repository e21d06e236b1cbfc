"""What a job runs on, in words for a reader."""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from typing import Any

#: Packages whose versions matter to a job.
_PACKAGES = ("torch", "swift-recovery")


def facts() -> dict[str, Any]:
    """This machine's name, the processors that this process may use, and versions of what is installed."""
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
