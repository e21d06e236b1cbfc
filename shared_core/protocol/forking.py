"""Whether a worker forks itself as its own hot standby, decided from what a fork would share or leave behind. Pure.

A forked process has the memory of its parent, one thread, and the parent's open files. So a worker forks only where it
knows all threads and files that it has: what is not known may be a pool without threads in the copy, or a file that
both of them read on from one place.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared_core.config import SwiftConfig
from shared_core.protocol.preparing import Measured


@dataclass(frozen=True)
class Forkable:
    """A worker that may fork itself.

    Attributes:
        workers: on this machine; each may need as much memory for its copy.
        compute_threads: that an operation of torch uses.
        threads: beside those of the product and of gloo, by name.
        files: open ones whose use by two processes is not known to be safe, connections and pipes among them.
        unfit: of what is trained, why no copy of this process can take the place; empty if it can.
        measured: ``startup_s`` is that of this worker.
    """

    workers: int
    machines: int
    compute_threads: int
    threads: tuple[str, ...]
    files: tuple[str, ...]
    unfit: str
    measured: Measured


def why_not(config: SwiftConfig, found: Forkable) -> str:
    """Why a worker does not fork itself whose start took long enough, with ``standby.prepared="auto"``; empty if it
    does.
    """
    if not config.replaces:
        return f"on_failure={config.on_failure!r}"
    if found.machines > 1:
        return "the job has several machines"
    if found.unfit:
        return found.unfit
    if found.compute_threads > 1:
        return f"operations of torch use {found.compute_threads} threads"
    if found.threads:
        return f"it has other threads: {', '.join(sorted(set(found.threads)))}"
    if found.files:
        return f"it holds {found.files[0]} open"
    if found.measured.fits < found.workers:
        return "there is no memory for a copy of each worker"
    return ""
