"""What a job says at its end of the device that it trains on; see :mod:`tests.support.device`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from shared_core.devices import random_states
from tests.support.device import device
from tests.support.digest import digest
from tests.support.report import Report, generators_digest


def finish(report: Report, digests: Mapping[str, str], **extra: Any) -> None:
    """Report the end of a rank, with the generators of the host and of the device, and say one line of it."""
    every = dict(digests) | {"generators": generators_digest()}
    if device().type != "cpu":
        every["device_generator"] = digest(random_states())
    # One write: the lines of two ranks do not mix.
    sys.stdout.write(f"rank {report.who['rank']} on {device().type}: {digest(every)}\n")
    sys.stdout.flush()
    report.finish(every, **extra)
