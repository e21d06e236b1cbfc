"""Traces drawn from a seed. Each failure hits one place (or rack) drawn from all; where it is vacant already nothing
happens, so every worker fails at the same rate whatever happened to the others.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from itertools import count

from benchmarks.simulate.trace import HOUR_S, Trace, TraceEvent
from shared_core.errors import ConfigError

#: Hours until the place of a failed worker is filled again, where a specification does not say it.
REPAIR_H = 1.0


def exponential(workers: int, hours: float, mtbf_h: float, repair_h: float = REPAIR_H, seed: int = 0) -> Trace:
    """Failures without memory; ``mtbf_h`` is the mean time between failures of the whole job, in hours."""
    generator = random.Random(seed)
    return _single(workers, hours, repair_h, generator, lambda: generator.expovariate(1 / mtbf_h))


def weibull(
    workers: int, hours: float, mtbf_h: float, shape: float, repair_h: float = REPAIR_H, seed: int = 0
) -> Trace:
    """Times between failures of the job are Weibull with mean ``mtbf_h``; a ``shape`` below 1 makes bursts."""
    generator, scale = random.Random(seed), mtbf_h / math.gamma(1 + 1 / shape)
    return _single(workers, hours, repair_h, generator, lambda: generator.weibullvariate(scale, shape))


def periodic(workers: int, hours: float, every_h: float, repair_h: float = REPAIR_H, seed: int = 0) -> Trace:
    """One failure every ``every_h`` hours; the victims are drawn."""
    return _single(workers, hours, repair_h, random.Random(seed), lambda: every_h)


def racks(workers: int, hours: float, mtbf_h: float, size: int, repair_h: float = REPAIR_H, seed: int = 0) -> Trace:
    """Racks of ``size`` neighbours that fail together, without memory; ``mtbf_h`` between failures of a rack."""
    generator = random.Random(seed)
    number = math.ceil(workers / size)

    def victims() -> range:
        first = generator.randrange(number) * size
        return range(first, min(first + size, workers))

    return _draw(workers, hours, repair_h, lambda: generator.expovariate(1 / mtbf_h), victims)


#: Names of the generators and the form of their numbers: hours, but for a Weibull's shape and a rack's size.
FORMS = {
    "exponential": "MTBF_H[:REPAIR_H]",
    "weibull": "MTBF_H:SHAPE[:REPAIR_H]",
    "periodic": "EVERY_H[:REPAIR_H]",
    "racks": "MTBF_H:SIZE[:REPAIR_H]",
}


def parse(spec: str, workers: int, hours: float, seed: int = 0) -> Trace:
    """A trace from ``NAME:NUMBER[:NUMBER...]``, see ``FORMS``.

    Raises:
        ConfigError: for an unknown name, or numbers that are missing, too many or not positive.
    """
    name, *words = spec.split(":")
    if name not in FORMS:
        forms = ", ".join(f"{known}:{form}" for known, form in FORMS.items())
        raise ConfigError(f"unknown trace {spec!r}: choose a file, gcp, {forms}")
    wrong = ConfigError(f"trace {spec!r} must look like {name}:{FORMS[name]}, with numbers above 0")
    needed = FORMS[name].partition("[")[0].count(":") + 1
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise wrong from None
    if not needed <= len(numbers) <= needed + 1 or not all(n > 0 and math.isfinite(n) for n in numbers):
        raise wrong
    repair_h = numbers[needed] if len(numbers) > needed else REPAIR_H
    if name == "weibull":
        return weibull(workers, hours, numbers[0], numbers[1], repair_h, seed)
    if name == "racks":
        if numbers[1] != int(numbers[1]):
            raise wrong
        return racks(workers, hours, numbers[0], int(numbers[1]), repair_h, seed)
    return (exponential if name == "exponential" else periodic)(workers, hours, numbers[0], repair_h, seed)


def _single(workers: int, hours: float, repair_h: float, generator: random.Random, gap_h: Callable[[], float]) -> Trace:
    def victim() -> range:
        place = generator.randrange(workers)
        return range(place, place + 1)

    return _draw(workers, hours, repair_h, gap_h, victim)


def _draw(
    workers: int, hours: float, repair_h: float, gap_h: Callable[[], float], victims: Callable[[], range]
) -> Trace:
    if workers < 1 or hours <= 0:
        raise ConfigError(f"a trace needs workers and hours, not {workers} and {hours:g}")
    events = tuple(_events(hours, repair_h, gap_h, victims))
    return Trace(workers, hours * HOUR_S, events)


def _events(
    hours: float, repair_h: float, gap_h: Callable[[], float], victims: Callable[[], range]
) -> Iterator[TraceEvent]:
    vacant: set[int] = set()
    repairs: list[tuple[float, int, tuple[int, ...]]] = []
    now, number = gap_h(), count()
    while True:
        while repairs and repairs[0][0] <= min(now, hours):
            at, _, places = heapq.heappop(repairs)
            vacant.difference_update(places)
            yield TraceEvent(at * HOUR_S, joined=places)
        if now >= hours:
            return
        lost = tuple(place for place in victims() if place not in vacant)
        if lost:
            vacant.update(lost)
            heapq.heappush(repairs, (now + repair_h, next(number), lost))
            yield TraceEvent(now * HOUR_S, lost=lost)
        now += gap_h()
