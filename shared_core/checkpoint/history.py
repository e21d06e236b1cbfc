"""The job-history file: how runs ended, one JSON line for each event of a run.

A run that is killed cannot write that it was. So each run writes when it begins, from time to time how far it is, and
at a proper end how it ended; one that has fallen silent without an end was killed. A run that continues after a restart
keeps its name, and with it its place in the file.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from shared_core.codec import Between, Count, Record, fit
from shared_core.errors import ConfigError
from shared_core.events import console
from shared_core.kinds import open_fd, open_regular
from shared_core.plain_json import parse

#: ``running`` while it lasts; ``completed`` as planned; ``stopped`` early with its state saved; ``killed`` without.
ENDS = ("running", "completed", "stopped", "killed")
#: A run that has written nothing for so many seconds was killed.
SILENT_S = 6 * 3600.0
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT


_Seconds = Annotated[float, Between(0, 1e18)]


@dataclass(frozen=True)
class Run(Record):
    """What is known of a run; also a line of the file.

    Attributes:
        name: unique, and kept over restarts.
        end: one of :data:`ENDS`.
        useful_s: useful seconds that it has trained.
        worker_s: seconds that its workers were at work, added up.
        rolled_back: by tier, how often it went back to a checkpoint.
        group: equal in runs that resemble each other, such as a project's name.
        time: when this was written, seconds since the epoch.
    """

    name: str
    end: str = "running"
    useful_s: _Seconds = 0.0
    worker_s: _Seconds = 0.0
    rolled_back: Mapping[str, Count] = field(default_factory=dict)
    group: str = ""
    time: _Seconds = 0.0

    def __post_init__(self) -> None:
        if self.end not in ENDS:
            raise ConfigError(f"end must be one of {', '.join(ENDS)}, not {self.end!r}")


def append(path: str | os.PathLike[str], run: Run) -> None:
    """Add a line, in one write, so that lines of several jobs never mix. A torn line before it is ended first.

    While another job writes, the file may seem to end in the middle of that job's line (its size grows page by page):
    then an empty line follows it, which is no damage. Raises OSError if the file cannot be written.
    """
    line = replace(run, time=run.time or time.time()).to_json().encode() + b"\n"
    fd = open_fd(path, _APPEND, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(fd, line)
        if written != len(line):
            raise OSError(
                f"only {written} of {len(line)} bytes were written to the job history {path}; is the disk full?"
            )
    finally:
        os.close(fd)


def read(path: str | os.PathLike[str], *, group: str | None = None, now: float | None = None) -> list[Run]:
    """The runs of a file (of one group), in the order in which they were first named; none if there is no file.

    Lines that cannot be read are passed over, and the user is told. ``now`` is in seconds since the epoch. Raises
    OSError.
    """
    now = time.time() if now is None else now
    last: dict[str, Run] = {}
    skipped = 0
    try:
        with open_regular(path) as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    for line in filter(None, lines):
        try:
            run: Run = fit(parse(line), Run)
        except ValueError:
            skipped += 1
            continue
        last[run.name] = run
    if skipped:
        console(f"job history {path}: {skipped} of {sum(map(bool, lines))} lines cannot be read and are passed over")
    runs = []
    for run in last.values():
        if group is not None and run.group != group:
            continue
        silent = run.end == "running" and now - run.time > SILENT_S
        runs.append(replace(run, end="killed") if silent else run)
    return runs


# -- when runs end before their planned end, and how many of them without a chance to save ----------------------------


#: With fewer early ends than this in a bin, a hazard is not divided further.
ENDS_A_BIN = 10
MOST_BINS = 8
#: Weight of the priors: of a hazard, in ends; of the share of abrupt ends, in graceful ends.
PRIOR_ENDS, PRIOR_GRACEFUL = 0.5, 2.0


@dataclass(frozen=True)
class RunEnding:
    """Hazard of ending early, constant between given times, and the share of abrupt ends among those.

    Attributes:
        since_s: where each rate begins, in useful seconds of a run, ascending; the first is 0.
        rates: early ends a second from there on.
        abrupt: share of them after which only a durable checkpoint is left.
    """

    since_s: tuple[float, ...]
    rates: tuple[float, ...]
    abrupt: float

    _sums: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pieces = zip(itertools.pairwise(self.since_s), self.rates[:-1], strict=True)
        sums = itertools.accumulate((rate * (until - since) for (since, until), rate in pieces), initial=0.0)
        object.__setattr__(self, "_sums", tuple(sums))

    @classmethod
    def constant(cls, rate: float, abrupt: float) -> RunEnding:
        return cls((0.0,), (rate,), abrupt)

    def rate(self, useful_s: float) -> float:
        """Early ends a second, at this time of a run."""
        return self.rates[bisect.bisect_right(self.since_s, useful_s) - 1]

    def cumulative(self, useful_s: float) -> float:
        """The hazard's integral from 0."""
        piece = bisect.bisect_right(self.since_s, useful_s) - 1
        return self._sums[piece] + self.rates[piece] * (useful_s - self.since_s[piece])


def from_history(runs: Sequence[Run]) -> RunEnding | None:
    """The estimate from how earlier runs ended; None without any.

    Hazard: Gamma posterior, in up to 8 bins between quantiles of the early ends, at least 10 ends each; prior half an
    end at the overall rate (overall: at one end a mean run). Share of abrupt ends: posterior mean with two graceful
    ends as prior, which is 0 where no run was killed.
    """
    lengths = [run.useful_s for run in runs if run.useful_s > 0]
    if not lengths:
        return None
    early = sorted(run.useful_s for run in runs if run.end in ("stopped", "killed") and run.useful_s > 0)
    exposure = sum(lengths)
    overall = (PRIOR_ENDS + len(early)) / (PRIOR_ENDS * exposure / len(lengths) + exposure)
    bins = max(1, min(MOST_BINS, len(early) // ENDS_A_BIN))
    inner = sorted({early[len(early) * each // bins] for each in range(1, bins)})
    since, rates = (0.0, *inner), []
    for low, high in itertools.pairwise((*since, math.inf)):
        ends = sum(low <= end < high for end in early)
        at_risk = sum(min(length, high) - low for length in lengths if length > low)
        rates.append((PRIOR_ENDS + ends) / (PRIOR_ENDS / overall + at_risk))
    killed = sum(run.end == "killed" and run.useful_s > 0 for run in runs)
    return RunEnding(since, tuple(rates), killed / (len(early) + PRIOR_GRACEFUL))


# -- how often a job goes back to a checkpoint ------------------------------------------------------------------------


#: Weights and mean times between faults of one worker, in hours, of the prior's mixture; each counts as one fault.
#: Together one fault in some 280 worker-hours; a few real ones tell which of the scales holds.
PRIOR = ((0.001, 1.0), (0.01, 10.0), (0.1, 100.0), (0.5, 1e3), (0.3, 1e4), (0.089, 1e5))


@dataclass(frozen=True)
class Hazard:
    """Posterior of the faults that roll back: a mixture of Gamma distributions.

    Its mean is the best single value: expected overhead is linear in the hazard.

    Attributes:
        worker_s: seconds of work in which they were seen, summed over all workers.
        prior: pairs of weight and mean time between faults of one worker, in hours.
    """

    faults: int = 0
    worker_s: float = 0.0
    prior: tuple[tuple[float, float], ...] = PRIOR

    def seen(self, faults: int, worker_s: float) -> Hazard:
        return replace(self, faults=self.faults + faults, worker_s=self.worker_s + worker_s)

    def mean(self, workers: int) -> float:
        """Expected faults a second of ``workers``: each scale's ``(1 + n) / (M + E)``, weighted by its likelihood of
        ``n`` faults in a time ``E``.
        """
        scales = [(math.log(weight), hours * 3600) for weight, hours in self.prior]
        likely = [log + math.log(m) - (self.faults + 1) * math.log(m + self.worker_s) for log, m in scales]
        most = max(likely)
        weights = [math.exp(each - most) for each in likely]
        rates = [(1 + self.faults) / (m + self.worker_s) for _, m in scales]
        return workers * sum(w * rate for w, rate in zip(weights, rates, strict=True)) / sum(weights)
