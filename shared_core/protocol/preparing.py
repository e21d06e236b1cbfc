"""Which ranks have a hot standby, decided from measurements, and whether a worker forks itself as its own. Pure.

A hot standby has run the script as one rank up to its first step boundary. At the failure of that rank the others do
not wait for the script's start-up; until then it takes the memory of a worker.

A forked process has the memory of its parent, one thread, and the parent's open files. So a worker forks only where it
knows all threads and files that it has: what is not known may be a pool without threads in the copy, or a file that
both of them read on from one place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shared_core.codec import Count
from shared_core.config import SwiftConfig

#: ``auto`` prepares from this start-up on, in seconds: below it a replacement is hardly later than the recovery.
LEAST_STARTUP_S = 2.0
#: ``auto`` leaves this share of the machine's memory free, and at least so many bytes.
RESERVE_SHARE, RESERVE_BYTES = 0.1, 1 << 30
#: Seconds from a failure of a hot standby to the next try, by failures in a row; after the last there is none.
RETRY_S = (1.0, 5.0, 25.0)
#: Exit code of a standby that cannot serve: its rank has no replica, so a replacement continues from a checkpoint.
EXIT_UNFIT = 76
_GIB = 1 << 30


def place_key(rank: int, incarnation: int) -> str:
    """Key of the generation in which a hot standby takes its rank's place."""
    return f"place/{rank}.{incarnation}"


@dataclass(frozen=True)
class Prepared:
    """``prepared``, in the job's store: a standby waits for its rank's place.

    Attributes:
        until: a file; once it exists, the standby is useless. Empty where it stays useful.
        forked: it is a copy of the rank's worker, which has made it.
    """

    rank: Count
    incarnation: Count
    pid: Count
    until: str = ""
    forked: bool = False


@dataclass(frozen=True)
class Measured:
    """What ``auto`` decides by.

    Attributes:
        startup_s: longest time that the script took to its first step boundary.
        worker_bytes: memory that the largest worker has to itself.
        free_bytes: memory that processes can still get.
    """

    startup_s: float
    worker_bytes: int
    free_bytes: int
    total_bytes: int

    @property
    def reserve_bytes(self) -> int:
        return max(int(RESERVE_SHARE * self.total_bytes), RESERVE_BYTES)

    @property
    def fits(self) -> int:
        """Workers for which there is memory above the reserve."""
        return max(0, self.free_bytes - self.reserve_bytes) // max(1, self.worker_bytes)


@dataclass(frozen=True)
class PreparingDecision:
    number: int
    text: str


def decide(
    config: SwiftConfig, ranks: Sequence[int], measured: Measured, prepared: int = 0, *, forked: int = 0
) -> PreparingDecision:
    """How many of ``ranks``, those of a machine whose workers have forked none, get a hot standby that runs the script.
    The memory of those ``prepared`` is not free any more; so many others are ``forked``.
    """
    if config.restarts or config.shrinks:
        return PreparingDecision(
            0, f"no standby is prepared: with on_failure={config.on_failure!r} nobody takes a failed rank's place"
        )
    takes = f"the script takes {measured.startup_s:.1f} s to its first batch"
    memory = (
        f"a worker has {measured.worker_bytes / _GIB:.2f} GiB, {measured.free_bytes / _GIB:.2f} GiB are free, and "
        f"{measured.reserve_bytes / _GIB:.2f} GiB stay free"
    )
    if config.standby.prepared != "auto":
        number = min(int(config.standby.prepared), len(ranks))
        return PreparingDecision(number, f"{_standbys(number)} prepared, as asked for: {takes}; {memory}")
    if config.reroutes:
        return PreparingDecision(
            0, "no standby is prepared: with on_failure='reroute' the others do not wait for a replacement"
        )
    if measured.startup_s < LEAST_STARTUP_S:
        return PreparingDecision(0, f"no standby is prepared: {takes}, less than {LEAST_STARTUP_S:g} s")
    if forked and not ranks:
        return PreparingDecision(0, f"each worker has forked a hot standby: {takes}")
    others = len([rank for rank in ranks if rank != 0])
    number = min(others, prepared + measured.fits)
    if not others:
        return PreparingDecision(
            0, f"no standby is prepared: {takes}, but only rank 0 is here, whose start may write files"
        )
    return PreparingDecision(number, f"{_standbys(number)} prepared{_forked(forked)}: {takes}; {memory}")


def _forked(number: int) -> str:
    return f", and {number} {'was' if number == 1 else 'were'} forked" if number else ""


def _standbys(number: int) -> str:
    return {0: "no standby is", 1: "1 standby is"}.get(number, f"{number} standbys are")


def order(ranks: Collection[int], failures: Mapping[int, int]) -> list[int]:
    """Ranks of a machine in the order in which standbys are prepared for them.

    A rank that failed before comes first: what it has of its own (its samples, its memory, its core) may be the cause.
    Rank 0 comes last, because there scripts open files for writing before they train. ``failures`` counts those of
    each rank.
    """
    return sorted(ranks, key=lambda rank: (rank == 0, -failures.get(rank, 0), -rank))


def next_rank(
    number: int, ranks: Collection[int], failures: Mapping[int, int], prepared: Collection[int]
) -> int | None:
    """The rank for which a standby is prepared next; None if there are ``number`` already."""
    if len(prepared) >= number:
        return None
    return next((rank for rank in order(ranks, failures) if rank not in prepared), None)


def retry_s(failures: int) -> float | None:
    """Seconds until the next try after so many failures in a row, at least one; None to give up."""
    return RETRY_S[failures - 1] if failures <= len(RETRY_S) else None


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
