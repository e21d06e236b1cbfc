"""A curve from a file of metrics: CSV as Lightning's ``CSVLogger`` writes it, or JSON lines."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shared_core.errors import ConfigError
from shared_core.kinds import open_regular
from shared_core.plain_json import parse

#: (step, value)
Curve = list[tuple[float, float]]
#: What a row calls the step.
STEPS = ("step", "global_step", "_step")


def read_curve(path: str | os.PathLike[str], name: str | None = None) -> tuple[str, Curve]:
    """A metric's name and its values in order of steps; of a step that is there twice, the later row counts.

    Rows without the metric, and rows that cannot be read, are left out: the file may still be written.

    Args:
        path: of the file; a line that begins with ``{`` makes it one of JSON lines.
        name: of the metric; by default the first whose name has ``loss`` in it.

    Raises ConfigError if there is no such metric in it, or no step.
    """
    with open_regular(path) as file:
        text = file.read().decode(errors="replace")
    rows = list(_json_rows(text) if text.lstrip().startswith("{") else csv.DictReader(io.StringIO(text)))
    names = list(dict.fromkeys(str(key) for row in rows for key in row if key is not None))
    step = next((each for each in STEPS if each in names), None)
    if step is None:
        raise ConfigError(f"--metrics {path} has no column of steps: must be one of {', '.join(STEPS)}")
    chosen = name or next((each for each in names if "loss" in each.lower()), None)
    found = _number_pairs(rows, step, chosen) if chosen in names else []
    if chosen is None or not found:
        known = ", ".join(each for each in names if each != step) or "none"
        wanted = f"no values of --metric {name}" if name else "no metric with loss in its name (--metric NAME)"
        raise ConfigError(f"--metrics {path} has {wanted}; it has: {known}")
    return chosen, sorted(dict(found).items())


def thinned(curve: Sequence[tuple[float, float]], most: int = 800) -> Curve:
    """Not more than about ``most`` points that look like the curve: the least and the largest of each stretch."""
    if len(curve) <= most:
        return list(curve)
    size = math.ceil(2 * len(curve) / most)
    kept: Curve = []
    for begin in range(0, len(curve), size):
        stretch = curve[begin : begin + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _json_rows(text: str) -> Iterator[Mapping[str, Any]]:
    for line in text.splitlines():
        try:
            row = parse(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _number_pairs(rows: Iterable[Mapping[str, Any]], step: str, name: str) -> Curve:
    found = []
    for row in rows:
        try:
            pair = (float(row[step]), float(row[name]))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if all(map(math.isfinite, pair)):
            found.append(pair)
    return found
