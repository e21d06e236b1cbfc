"""What each part of the product takes of a step, measured by wrapping its entry points in the worker of the benchmark.

Times are those of the processor, on the thread that makes the call, so that other programs count little. A part
includes what it calls; ``within`` names the part that it is itself a part of.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

#: What it is, where it is called, what it is a part of.
PARTS: tuple[tuple[str, str, str], ...] = (
    ("step boundary", "shared_core.job:Job.step_boundary", ""),
    ("step boundary: state captured", "shared_core.worker.state.local_state:StateParts.capture", "step boundary"),
    (
        "step boundary: variables of the script",
        "shared_core.worker.variables.variables:Variables.capture",
        "step boundary: state captured",
    ),
    (
        "step boundary: written",
        "shared_core.worker.state.publications:SharedMemoryPublisher.publish_boundary",
        "step boundary",
    ),
    ("forward: buckets released", "shared_core.worker.comm.results:CollectiveResults.release", ""),
    ("before a bucket", "shared_core.worker.state.forward_pass:ForwardRecorder.before_bucket", ""),
    ("a bucket reduced in place: issue", "shared_core.worker.comm.group:SwiftProcessGroup._in_place", ""),
    ("a collective: issue", "shared_core.worker.comm.operations:Operations.submit", "a bucket, where it is one"),
    ("a collective: gloo", "shared_core.worker.comm.operations:Operations.start", "a collective: issue"),
    ("a collective: end, on gloo's thread", "shared_core.worker.comm.operations:Operations._finished", ""),
    ("before an update", "shared_core.worker.state.updates:Updates._begin_step", ""),
    (
        "before an update: parameters kept",
        "shared_core.worker.state.updates:UpdateImages.keep",
        "before an update",
    ),
    ("after an update: counted", "shared_core.worker.state.updates:Updates._one_more", ""),
)


class Parts:
    """Times the parts in this process, from now on."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)
        for name, where, _ in PARTS:
            module, _, path = where.partition(":")
            owner, method = path.split(".")
            kind = getattr(importlib.import_module(module), owner)
            setattr(kind, method, self._timed(name, getattr(kind, method)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds[name].append(time.thread_time() - begin)

        return timed

    def take(self, steps: int) -> dict[str, float]:
        """Seconds of each part in one of the last ``steps`` steps: its median call, times its calls."""
        found = {name: statistics.median(each) * len(each) / steps for name, each in self._seconds.items()}
        self._seconds.clear()
        return found
